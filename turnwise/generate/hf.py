# pyright: reportUnknownMemberType=false
"""HFGenerator: any causal Hugging Face model, in process, many sessions at once.

`requests` knows who waits, `scheduler` decides who runs. A runner runs them: pass by pass over a
slot cache (`slots/`), or in blocks that stay on the device (`blocks/`). `sampling` draws, `stops`
ends a completion.
"""

import asyncio
import warnings
from collections.abc import Sequence
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from turnwise.generate.base import ContextOverflowError, GeneratorError, Sampling, Session
from turnwise.generate.blocks.driver import BlockDriver
from turnwise.generate.blocks.engine import BlockEngine
from turnwise.generate.blocks.runner import BlockRunner
from turnwise.generate.requests import GeneratorStats, Request, Requests, Runner
from turnwise.generate.scheduler import Scheduler, SessionState
from turnwise.generate.slots.passes import Passes, RecomputePasses, SlotPasses
from turnwise.generate.slots.runner import PassRunner
from turnwise.generate.slots.support import unsupported, vocab_size
from turnwise.generate.stops import StopChecker, end_ids
from turnwise.types import Completion


class HFGenerator:
    """Generates with a transformers model in this process, with continuous batching over slots.

    The model is not copied, so after an update calling `weights_updated(version)` is enough.
    Sessions beyond the number of slots wait for one; a session that waits for its environment may
    lose its slot and is then brought back when it asks again.

    Args:
        slots: sequences decoded at once.
        max_context: ids that a session can hold. None: what the model can hold.
        deterministic: passes of fixed shape, so that a session's bits do not depend on the others
            (see docs/generation.md). None: on for float32 on the CPU.
        prefill_chunk: the longest piece of a prompt that one pass takes.
        prefill_tokens: tokens of one prefill pass, over all its rows.
        stop_ids: ids that end a completion, besides those that tokenizer, model and chat template
            name.
        end_of_turn: False: nothing but `stop_ids` ends a completion, so that all have the same
            length (benchmarks).
        engine: "slots" runs one pass at a time, exact on the CPU; "blocks" keeps sampling and
            stopping on the device and reads tokens a block at a time, for CUDA. "auto": blocks
            where the model is on CUDA.
        compile: compile the decode step of the block engine (half a minute, then about twice as
            fast).
        block_steps: most decode steps of one block; long replies take half as many at a time.

    Example:
        >>> from turnwise.testing.tiny import tiny_model, tiny_tokenizer
        >>> generator = HFGenerator(tiny_model(), tiny_tokenizer(), slots=2, max_context=64)
        >>> session = Session(key="a", seed=7)
        >>> first = asyncio.run(generator.generate(session, [1, 2, 3], Sampling(max_tokens=4)))
        >>> again = asyncio.run(generator.generate(session, [4, 5], Sampling(max_tokens=4)))
        >>> generator.stats.prefilled_tokens  # 3 given, then 2 given and the last sampled one
        6
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        *,
        slots: int = 64,
        max_context: int | None = None,
        device: str | torch.device | None = None,
        deterministic: bool | None = None,
        prefill_chunk: int = 256,
        prefill_tokens: int = 512,
        stop_ids: Sequence[int] = (),
        policy_version: int = 0,
        end_of_turn: bool = True,
        engine: Literal["auto", "slots", "blocks"] = "auto",
        compile: bool = False,
        block_steps: int = 8,
    ) -> None:
        if device is not None:
            model.to(torch.device(device))  # pyright: ignore[reportArgumentType]
        if slots < 1:
            raise ValueError(f"a generator needs at least one slot, got slots={slots}")
        self._model = model
        self._tokenizer = tokenizer
        self._max_context = context_length(model, max_context)
        self._vocab_size = vocab_size(model)
        weight = next(model.parameters())
        exact = deterministic
        if exact is None:
            exact = weight.device.type == "cpu" and weight.dtype == torch.float32
        self.deterministic = exact
        self._passes: Passes = self._make_passes(model, slots=slots, exact=exact)
        self._scheduler = Scheduler(
            slots=slots, chunk=prefill_chunk, prefill_tokens=prefill_tokens, exact=exact
        )
        own = end_ids(tokenizer, model.generation_config) if end_of_turn else frozenset[int]()
        self.stop_ids = own | frozenset(stop_ids)
        self._requests = Requests(self._scheduler, policy_version=policy_version)
        self._driver: asyncio.Task[None] | None = None
        self._checker: tuple[tuple[tuple[str, ...], tuple[int, ...]], StopChecker] | None = None
        blocks = weight.device.type == "cuda" if engine == "auto" else engine == "blocks"
        self._blocks: BlockDriver | None = None
        self._runner: Runner = PassRunner(model, self._passes, self._requests)
        if blocks and isinstance(self._passes, SlotPasses):
            runs = BlockEngine(
                model,
                slots=slots,
                length=self._max_context,
                vocab=self._vocab_size,
                stop_ids=sorted(self.stop_ids),
                steps=block_steps,
                compile=compile,
            )
            self._blocks = BlockDriver(runs, stop_ids=self.stop_ids)
            self._runner = BlockRunner(model, self._blocks, self._requests)

    @property
    def stats(self) -> GeneratorStats:
        """Statistics since the generator was created, or since this was last replaced."""
        return self._requests.stats

    @stats.setter
    def stats(self, stats: GeneratorStats) -> None:
        self._requests.stats = stats

    @property
    def policy_version(self) -> int:
        return self._requests.policy_version

    @property
    def max_context(self) -> int:
        return self._max_context

    @property
    def open_sessions(self) -> tuple[str, ...]:
        """Keys of the sessions that were opened and not released, oldest first."""
        return tuple(self._requests.sessions)

    @property
    def cache_bytes(self) -> int:
        """Memory that keys and values hold now."""
        return self._passes.num_bytes + (
            0 if self._blocks is None else self._blocks.engine.num_bytes
        )

    async def generate(
        self, session: Session, new_ids: Sequence[int], sampling: Sampling
    ) -> Completion:
        future = self.submit(session, new_ids, sampling)
        state = self._requests.sessions[session.key]
        try:
            return await future
        except asyncio.CancelledError:
            self._requests.withdraw(state)
            raise

    def submit(
        self, session: Session, new_ids: Sequence[int], sampling: Sampling
    ) -> "asyncio.Future[Completion]":
        """Submits a request inside a running event loop, without waiting for its completion."""
        state = self._check(session, new_ids, sampling)
        room = self._max_context - len(state.ids) - len(new_ids)
        if room < 1:
            raise ContextOverflowError(
                f"a session holds at most {self._max_context} ids, and {len(state.ids)} held plus "
                f"{len(new_ids)} new "
                "leave no room for a reply; shorten the prompt or raise max_context"
            )
        stops = self._stops(sampling)
        # Asked for once: up to Python 3.11 it costs a system call.
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Completion] = loop.create_future()
        state.ask(new_ids, sampling=sampling, chunk=self._scheduler.chunk)
        limit = min(room, sampling.max_tokens)
        self._requests.submit(
            Request(state=state, future=future, stops=stops, limit=limit, start=len(state.ids))
        )
        if self._driver is None or self._driver.done() or self._driver.get_loop() is not loop:
            self._driver = asyncio.create_task(self._drive())
            self._driver.add_done_callback(_heard)
        return future

    def _stops(self, sampling: Sampling) -> StopChecker:
        """The stop conditions of a completion. Cached, because most requests have the same ones."""
        asked = (sampling.stop, sampling.stop_ids)
        if self._checker is None or self._checker[0] != asked:
            ids = self.stop_ids.union(sampling.stop_ids)
            self._checker = asked, StopChecker(self._tokenizer, ids=ids, strings=sampling.stop)
        return self._checker[1]

    async def release(self, session: Session) -> None:
        self._requests.release(session.key)

    def weights_updated(self, version: int) -> None:
        """Call after the model's weights changed. Drops the caches of open sessions.

        Raises:
            GeneratorError: a completion is being sampled; it would mix two policies.
        """
        self._requests.refuse_while_busy("update the weights")
        self._requests.evict_all()
        for state in self._requests.sessions.values():
            state.drop_cache(rechunk=self._scheduler.chunk)
        self._requests.policy_version = version

    def free_cache(self) -> None:
        """Frees keys and values, for an update; the next request allocates them again."""
        self._requests.refuse_while_busy("free the cache")
        self._requests.evict_all()
        self._passes.free()
        if self._blocks is not None:
            self._blocks.engine.free()

    def _check(self, session: Session, new_ids: Sequence[int], sampling: Sampling) -> SessionState:
        state = self._requests.sessions.get(session.key) or SessionState(
            key=session.key, seed=session.seed
        )
        if session.key in self._requests.open:
            raise GeneratorError(
                f"a session generates once at a time, and {session.key!r} is still waiting"
            )
        if state.seed != session.seed:
            raise GeneratorError(
                f"open session {session.key!r} has seed {state.seed}, got {session.seed}; release "
                "it"
            )
        if not state.ids and not new_ids:
            raise GeneratorError(
                f"the first call of a session needs ids, and {session.key!r} got none"
            )
        if new_ids and not 0 <= min(new_ids) <= max(new_ids) < self._vocab_size:
            raise GeneratorError(
                f"ids must lie in 0..{self._vocab_size - 1}, got {min(new_ids)}..{max(new_ids)} "
                f"for {session.key!r}; "
                "does the tokenizer belong to the model?"
            )
        if sampling.max_tokens < 1 or sampling.temperature < 0.0 or not 0.0 < sampling.top_p <= 1.0:
            raise GeneratorError(
                f"max_tokens >= 1, temperature >= 0 and 0 < top_p <= 1 are needed, got {sampling}"
            )
        return state

    async def _drive(self) -> None:
        """Runs until no request is open."""
        try:
            while self._runner.busy and self._drives():
                await self._runner.run()
        except BaseException as error:
            if self._driver is asyncio.current_task():
                self._requests.fail_all(GeneratorError(f"generation stopped: {error!r}"))
            raise

    def _drives(self) -> bool:
        """True if the running task is the driver. It becomes the driver if the previous driver's
        event loop has stopped: a loop may end with its last completion while its driver waits for
        the device, and another loop may submit a request."""
        me = asyncio.current_task()
        assert self._driver is not None
        if self._driver is not me and not self._driver.get_loop().is_running():
            self._driver = me
        return self._driver is me

    def _make_passes(self, model: PreTrainedModel, *, slots: int, exact: bool) -> Passes:
        reason = unsupported(model, max_context=self._max_context)
        if reason is None:
            return SlotPasses(model, slots=slots, length=self._max_context, exact=exact)
        warnings.warn(
            f"{type(model).__name__} cannot keep its state in slots ({reason}); every token will "
            "run its whole context",
            stacklevel=3,
        )
        return RecomputePasses(model)


def _heard(driver: "asyncio.Task[None]") -> None:
    """A driver's error was already passed to all waiting requests; nothing awaits the task
    itself."""
    if not driver.cancelled():
        driver.exception()


def context_length(model: PreTrainedModel, max_context: int | None) -> int:
    """The session length: the requested one, or the model's limit."""
    own: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    length = own if max_context is None else max_context
    if length is None:
        raise ValueError(f"{type(model).__name__} names no longest context; pass max_context")
    if length < 2:
        raise ValueError(f"a context holds at least one id and one reply, got max_context={length}")
    if own is not None and length > own:
        raise ValueError(f"the model holds at most {own} positions, got max_context={length}")
    return length
