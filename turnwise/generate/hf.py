"""HFGenerator: any causal Hugging Face model, in process, many sessions at once.

The parts: `scheduler` decides who runs, `passes` runs the model over the slot cache (`slots`), `sampling` draws, and
`stops` ends a completion. This file joins them to asyncio.
"""

import asyncio
import math
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from turnwise.generate.base import ContextOverflowError, GeneratorError, Sampling, Session
from turnwise.generate.blocks.driver import BlockDriver, Outcome
from turnwise.generate.blocks.engine import BlockEngine
from turnwise.generate.passes import Drawn, Passes, RecomputePasses, SlotPasses, inference
from turnwise.generate.scheduler import Scheduler, SessionState
from turnwise.generate.stops import StopChecker, end_ids
from turnwise.generate.support import unsupported, vocab_size
from turnwise.types import Completion

ANSWERS = 8
"""Completions that are handed out at once; what follows from them is the host's work, which the device may need to
interrupt."""
POLL_SECONDS = 0.0003
"""How often a running block is looked at while nobody has anything to do on the host."""


@dataclass(kw_only=True, slots=True)
class GeneratorStats:
    """What a generator did since it was made, or since its stats were last replaced."""

    prefilled_tokens: int = 0
    """Given ids that ran through the model, those of evicted sessions again included."""
    shared_tokens: int = 0
    """Given ids whose keys and values were copied from a session that began alike."""
    replayed_tokens: int = 0
    """Ids that ran through the model once more because their session had lost its slot."""
    decoded_tokens: int = 0
    """Sampled ids that were returned or are on their way."""
    prefill_steps: int = 0
    decode_steps: int = 0
    decode_rows: int = 0
    """Sessions that took part in decode steps, summed: divided by steps and slots it is the occupancy."""
    evictions: int = 0
    completions: int = 0
    failures: int = 0
    prefill_seconds: float = 0.0
    """What passes took; of the block engine, what the device spent on them."""
    decode_seconds: float = 0.0
    idle_seconds: float = 0.0
    """Time with nothing to generate, between the first request and now: the environments' share."""


@dataclass(kw_only=True, slots=True)
class _Request:
    """One call of generate that is not answered yet."""

    state: SessionState
    future: "asyncio.Future[Completion]"
    stops: StopChecker
    limit: int
    """Tokens that may be sampled."""
    start: int
    """How many ids the session held before the first sampled one."""


class HFGenerator:
    """Generates with a transformers model that lives in this process, continuously batched over slots.

    The model is the caller's own object: nothing is copied, so after an update `weights_updated(version)` is all it
    takes. Sessions beyond the number of slots wait for one; a session that waits for its environment may lose its
    slot and is then brought back when it asks again.

    Args:
        slots: sequences decoded at once.
        max_context: ids that a session can hold. None: what the model can hold.
        deterministic: passes of fixed shape, so that a session's bits do not depend on the others (see
            docs/generation.md). None: on for float32 on the CPU.
        prefill_chunk: the longest piece of a prompt that one pass takes.
        prefill_tokens: tokens of one prefill pass, over all its rows.
        stop_ids: ids that end a completion, besides those that tokenizer, model and chat template name.
        end_of_turn: False: nothing but `stop_ids` ends a completion, so that all have the same length (benchmarks).
        engine: "slots" runs one pass at a time, exact on the CPU; "blocks" keeps sampling and stopping on the device
            and reads tokens a block at a time, for CUDA. "auto": blocks where the model is on CUDA.
        compile: compile the decode step of the block engine (half a minute, then about twice as fast).
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
        self._max_context = _context(model, max_context)
        self._vocab_size = vocab_size(model)
        weight = next(model.parameters())
        exact = deterministic
        if exact is None:
            exact = weight.device.type == "cpu" and weight.dtype == torch.float32
        self.deterministic = exact
        self._passes: Passes = self._make_passes(model, slots=slots, exact=exact)
        self._scheduler = Scheduler(slots=slots, chunk=prefill_chunk, prefill_tokens=prefill_tokens, exact=exact)
        own = end_ids(tokenizer, model.generation_config) if end_of_turn else frozenset[int]()
        self.stop_ids = own | frozenset(stop_ids)
        self.stats = GeneratorStats()
        self._policy_version = policy_version
        self._sessions: dict[str, SessionState] = {}
        self._requests: dict[str, _Request] = {}
        self._driver: asyncio.Task[None] | None = None
        self._idle_since: float | None = None
        blocks = weight.device.type == "cuda" if engine == "auto" else engine == "blocks"
        self._blocks: BlockDriver | None = None
        self._answers: deque[tuple[asyncio.Future[Completion], Completion]] = deque()
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

    @property
    def policy_version(self) -> int:
        return self._policy_version

    @property
    def max_context(self) -> int:
        return self._max_context

    @property
    def open_sessions(self) -> tuple[str, ...]:
        """Keys of the sessions that were opened and not released, oldest first."""
        return tuple(self._sessions)

    @property
    def cache_bytes(self) -> int:
        """Memory that keys and values hold now."""
        return self._passes.num_bytes + (0 if self._blocks is None else self._blocks.engine.num_bytes)

    async def generate(self, session: Session, new_ids: Sequence[int], sampling: Sampling) -> Completion:
        state = self._check(session, new_ids, sampling)
        room = self._max_context - len(state.ids) - len(new_ids)
        if room < 1:
            raise ContextOverflowError(
                f"a session holds at most {self._max_context} ids, and {len(state.ids)} held plus {len(new_ids)} new "
                "leave no room for a reply; shorten the prompt or raise max_context"
            )
        stop_ids = self.stop_ids.union(sampling.stop_ids) if sampling.stop_ids else self.stop_ids
        stops = StopChecker(self._tokenizer, ids=stop_ids, strings=sampling.stop)
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._sessions[session.key] = state
        state.ask(new_ids, sampling=sampling, chunk=self._scheduler.chunk)
        self._requests[session.key] = _Request(
            state=state, future=future, stops=stops, limit=min(room, sampling.max_tokens), start=len(state.ids)
        )
        self._scheduler.submit(state)
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._drive())
        try:
            return await future
        except asyncio.CancelledError:
            self._withdraw(state)
            raise

    async def release(self, session: Session) -> None:
        state = self._sessions.pop(session.key, None)
        if state is None:
            return
        request = self._requests.get(session.key)
        if request is not None:
            self._fail(request, GeneratorError(f"session {session.key!r} was released while it was generating"))
        self._scheduler.evict(state)

    def weights_updated(self, version: int) -> None:
        """Notes that the model's weights changed: what open sessions have cached belongs to the old ones.

        Raises:
            GeneratorError: a completion is being sampled; it would mix two policies.
        """
        self._refuse_while_busy("update the weights")
        for state in self._sessions.values():
            self._scheduler.evict(state)
            state.drop_cache(rechunk=self._scheduler.chunk)
        self._policy_version = version

    def free_cache(self) -> None:
        """Gives the memory of keys and values back, for an update; the next request allocates it again."""
        self._refuse_while_busy("free the cache")
        for state in self._sessions.values():
            self._scheduler.evict(state)
        self._passes.free()
        if self._blocks is not None:
            self._blocks.engine.free()

    def _check(self, session: Session, new_ids: Sequence[int], sampling: Sampling) -> SessionState:
        state = self._sessions.get(session.key) or SessionState(key=session.key, seed=session.seed)
        if session.key in self._requests:
            raise GeneratorError(f"a session generates once at a time, and {session.key!r} is still waiting")
        if state.seed != session.seed:
            raise GeneratorError(f"open session {session.key!r} has seed {state.seed}, got {session.seed}; release it")
        if not state.ids and not new_ids:
            raise GeneratorError(f"the first call of a session needs ids, and {session.key!r} got none")
        if new_ids and not 0 <= min(new_ids) <= max(new_ids) < self._vocab_size:
            raise GeneratorError(
                f"ids must lie in 0..{self._vocab_size - 1}, got {min(new_ids)}..{max(new_ids)} for {session.key!r}; "
                "does the tokenizer belong to the model?"
            )
        if sampling.max_tokens < 1 or sampling.temperature < 0.0 or not 0.0 < sampling.top_p <= 1.0:
            raise GeneratorError(f"max_tokens >= 1, temperature >= 0 and 0 < top_p <= 1 are needed, got {sampling}")
        return state

    def _refuse_while_busy(self, what: str) -> None:
        if self._requests:
            raise GeneratorError(
                f"cannot {what} while sessions {sorted(self._requests)[:4]} are generating; wait for them first"
            )

    async def _drive(self) -> None:
        """Runs passes until nobody waits, letting every other task have its turn between two of them."""
        if self._idle_since is not None:
            self.stats.idle_seconds += time.perf_counter() - self._idle_since
        blocks = self._blocks
        try:
            while self._scheduler.busy or self._answers or (blocks is not None and blocks.running):
                if blocks is None:
                    self._step()
                    await asyncio.sleep(0)
                else:
                    await self._run_block(blocks)
        except BaseException as error:
            for request in list(self._requests.values()):
                self._fail(request, GeneratorError(f"generation stopped: {error!r}"))
            raise
        finally:
            self._idle_since = time.perf_counter()

    def _step(self) -> None:
        """One pass of the model: a prefill where somebody has ids to read, else one token of everybody."""
        self.stats.evictions += self._scheduler.admit()
        batch, size = self._scheduler.next_prefill()
        start = time.perf_counter()
        if batch:
            rows = self._scheduler.prefill_rows(size)
            self._count_prefill(batch)
            self._run(batch, lambda: self._passes.prefill(batch, size=size, num_rows=rows))
            self.stats.prefill_steps += 1
            self.stats.prefill_seconds += time.perf_counter() - start
        elif batch := self._scheduler.next_decode():
            self.stats.replayed_tokens += sum(state.at < state.num_old_spans for state in batch)
            self._run(batch, lambda: self._passes.decode(batch))
            self.stats.decode_steps += 1
            self.stats.decode_rows += len(batch)
            self.stats.decode_seconds += time.perf_counter() - start

    async def _run_block(self, blocks: BlockDriver) -> None:
        """Launches one block and takes the tokens of the one before. All the while completions are handed out, and the
        host works on their environments and templates, but never so long that the device has nothing to do."""
        before = blocks.running
        self._on_device(blocks, lambda: self._launch(blocks))
        if before:
            while not blocks.ready:
                if self._answers:
                    await self._hand_out()
                else:  # not a moment's sleep would keep the interpreter from threads that play environments
                    await asyncio.sleep(POLL_SECONDS)
            self._on_device(blocks, lambda: self._take(blocks))
        await self._hand_out()
        while self._answers and not blocks.ending:
            await self._hand_out()

    async def _hand_out(self) -> None:
        """Answers a few requests, and lets every other task have its turn."""
        for _ in range(min(ANSWERS, len(self._answers))):
            future, completion = self._answers.popleft()
            if not future.done():
                future.set_result(completion)
        await asyncio.sleep(0)

    def _on_device(self, blocks: BlockDriver, call: Callable[[], None]) -> None:
        try:
            with inference(self._model):
                call()
        except Exception as error:  # whatever a model raises, nothing that was running can be trusted
            failure = GeneratorError(f"the model failed on a block: {error!r}")
            failure.__cause__ = error
            blocks.reset()
            blocks.engine.free()
            for request in list(self._requests.values()):
                self._fail(request, failure)
            for state in self._sessions.values():
                self._scheduler.evict(state)

    def _launch(self, blocks: BlockDriver) -> None:
        self.stats.evictions += self._scheduler.admit()
        fresh = [state for state in self._scheduler.running if state.at < len(state.spans)]
        given = sum(len(state.ids) - state.cached for state in fresh)
        shared, decoded = blocks.shared_tokens, blocks.decode_steps
        # Half a block at a time: a slot that ends waits for the end of this one and for the next. While slots fill up,
        # at a rollout's start above all, even less, so that those who come next begin sooner.
        filling = bool(fresh) and 4 * (blocks.num_live + len(fresh)) < 3 * blocks.engine.slots
        steps = max(1, blocks.engine.steps // (8 if filling else 2))
        blocks.launch([self._requests[state.key] for state in fresh], steps=steps)
        shared = blocks.shared_tokens - shared
        self.stats.shared_tokens += shared
        self.stats.prefilled_tokens += given - shared
        self.stats.decode_steps += blocks.decode_steps - decoded
        self.stats.prefill_steps += bool(fresh)

    def _take(self, blocks: BlockDriver) -> None:
        spent = (blocks.prefill_seconds, blocks.decode_seconds)
        outcomes = blocks.read()
        self.stats.decode_rows += sum(len(outcome.ids) for outcome in outcomes)
        self.stats.prefill_seconds += blocks.prefill_seconds - spent[0]
        self.stats.decode_seconds += blocks.decode_seconds - spent[1]
        for outcome in outcomes:
            self._accept_block(blocks, self._requests[outcome.request.state.key], outcome)

    def _accept_block(self, blocks: BlockDriver, request: _Request, outcome: Outcome) -> None:
        """Adds the tokens of a block, and answers the request if they end it. What was drawn past the end of a
        completion that only the host can see (a stop string) is forgotten."""
        state = request.state
        sampling = state.sampling
        assert sampling is not None
        if outcome.broken:
            self._fail(
                request, GeneratorError(f"the model's logits for {state.key!r} are not finite; check its weights")
            )
            return
        stopped = False
        if sampling.stop or sampling.stop_ids:
            for token, logprob in zip(outcome.ids, outcome.logprobs, strict=True):
                state.append(token, logprob)
                self.stats.decoded_tokens += 1
                stopped = request.stops.reached(state.ids[request.start :])
                if stopped:
                    break
        else:  # the device knows all there is to know: only the last token can be a stop
            state.ids.extend(outcome.ids)
            state.logprobs.extend(outcome.logprobs)
            self.stats.decoded_tokens += len(outcome.ids)
            stopped = outcome.ids[-1] in self.stop_ids
        if stopped or len(state.logprobs) >= request.limit:
            blocks.finish(request)
            self._answer(request, stopped=stopped)

    def _count_prefill(self, batch: Sequence[SessionState]) -> None:
        for state in batch:
            span = state.spans[state.at]
            self.stats.prefilled_tokens += span.end - span.start
            if state.at < state.num_old_spans:
                self.stats.replayed_tokens += span.end - span.start

    def _run(self, batch: Sequence[SessionState], call: Callable[[], Drawn]) -> None:
        try:
            with inference(self._model):
                ids, logprobs = call()
        except Exception as error:  # whatever a model raises, only the sessions of this pass are concerned
            for state in batch:
                failure = GeneratorError(f"the model failed on a pass of {len(batch)} sessions: {error!r}")
                failure.__cause__ = error
                self._fail(self._requests[state.key], failure)
            return
        for state, token, logprob in zip(batch, ids, logprobs, strict=True):
            if state.advance():
                self._accept(self._requests[state.key], token, logprob)

    def _accept(self, request: _Request, token: int, logprob: float) -> None:
        """Adds a sampled token, and answers the request if it was the last."""
        state = request.state
        if not math.isfinite(logprob):
            if state.slot is not None:
                self._passes.clear_row(state.slot)
            self._fail(
                request, GeneratorError(f"the model's logits for {state.key!r} are not finite; check its weights")
            )
            return
        state.append(token, logprob)
        self.stats.decoded_tokens += 1
        stopped = request.stops.reached(state.ids[request.start :])
        if not stopped and len(state.logprobs) < request.limit:
            state.decode_last()
            return
        self._answer(request, stopped=stopped)

    def _answer(self, request: _Request, *, stopped: bool) -> None:
        state = request.state
        completion = Completion(
            ids=tuple(state.ids[request.start :]),
            logprobs=tuple(state.logprobs),
            finish_reason="stop" if stopped else "length",
            policy_version=self._policy_version,
        )
        self.stats.completions += 1
        self._close(request)
        if self._blocks is not None:
            self._answers.append((request.future, completion))
        elif not request.future.done():
            request.future.set_result(completion)

    def _fail(self, request: _Request, error: GeneratorError) -> None:
        """Answers with an error. The session holds what it held before the call, and nothing is cached."""
        self.stats.failures += 1
        self._undo(request.state)
        self._close(request)
        self._scheduler.evict(request.state)
        if not request.future.done():
            request.future.set_exception(error)

    def _close(self, request: _Request) -> None:
        if self._blocks is not None:
            self._blocks.leave(request)
        del self._requests[request.state.key]
        self._scheduler.finish(request.state)

    def _withdraw(self, state: SessionState) -> None:
        """The caller of generate went away: the session is as it was before the call."""
        self._undo(state)
        request = self._requests.get(state.key)
        if request is not None and request.state is state:
            self._close(request)
        if not state.ids:
            self._scheduler.evict(state)

    def _undo(self, state: SessionState) -> None:
        state.roll_back()
        if not state.ids and self._sessions.get(state.key) is state:
            del self._sessions[state.key]

    def _make_passes(self, model: PreTrainedModel, *, slots: int, exact: bool) -> Passes:
        reason = unsupported(model, max_context=self._max_context)
        if reason is None:
            return SlotPasses(model, slots=slots, length=self._max_context, exact=exact)
        warnings.warn(
            f"{type(model).__name__} cannot keep its state in slots ({reason}); every token will run its whole context",
            stacklevel=3,
        )
        return RecomputePasses(model)


def _context(model: PreTrainedModel, max_context: int | None) -> int:
    """The session length to use: the model's own where none is asked for, and never more."""
    own: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    length = own if max_context is None else max_context
    if length is None:
        raise ValueError(f"{type(model).__name__} names no longest context; pass max_context")
    if length < 2:
        raise ValueError(f"a context holds at least one id and one reply, got max_context={length}")
    if own is not None and length > own:
        raise ValueError(f"the model holds at most {own} positions, got max_context={length}")
    return length
