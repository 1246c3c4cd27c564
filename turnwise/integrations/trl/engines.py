"""Generators of a TRL run: in-process, in-process on a copy of the weights, or TRL's own engine."""

import asyncio
import copy
import inspect
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from turnwise.generate.base import (
    ContextOverflowError,
    Generator,
    GeneratorError,
    Sampling,
    Session,
)
from turnwise.generate.hf import HFGenerator
from turnwise.types import Completion

ROUND_SECONDS = 0.01
"""Seconds that a round of TRL's engine waits for further requests."""


class Budgeted:
    """A generator that limits the growth of a context after its first prompt.

    This implements TRL's `max_completion_length` for an episode: replies and observations together.
    With `halve`, a reply gets half of what is left, so that no single one ends an episode of
    several turns.
    """

    def __init__(self, generator: Generator, *, budget: int, halve: bool = False) -> None:
        self._generator = generator
        self._budget = budget
        self._halve = halve
        self._used: dict[str, int] = {}

    @property
    def policy_version(self) -> int:
        return self._generator.policy_version

    @property
    def max_context(self) -> int:
        return self._generator.max_context

    async def generate(
        self, session: Session, new_ids: Sequence[int], sampling: Sampling
    ) -> Completion:
        used = self._used[session.key] + len(new_ids) if session.key in self._used else 0
        room = self._budget - used
        if room < 1:
            raise ContextOverflowError(
                f"{session.key}: max_completion_length = {self._budget} tokens are used up"
            )
        if self._halve:
            room = max(room // 2, 1)
        completion = await self._generator.generate(
            session, new_ids, replace(sampling, max_tokens=min(room, sampling.max_tokens))
        )
        self._used[session.key] = used + len(completion.ids)
        return completion

    async def release(self, session: Session) -> None:
        self._used.pop(session.key, None)
        await self._generator.release(session)


class Gate:
    """Allows weight updates only while no reply is being sampled; they happen between the turns of
    running episodes.

    So rollouts ahead of training use the newest possible weights, and every token's log-prob is
    that of the distribution it was sampled from.
    """

    def __init__(self, generator: HFGenerator) -> None:
        self._generator = generator
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._running = 0

    @property
    def policy_version(self) -> int:
        return self._generator.policy_version

    @property
    def max_context(self) -> int:
        return self._generator.max_context

    async def generate(
        self, session: Session, new_ids: Sequence[int], sampling: Sampling
    ) -> Completion:
        await self._open.wait()
        self._running += 1
        self._idle.clear()
        try:
            return await self._generator.generate(session, new_ids, sampling)
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    async def release(self, session: Session) -> None:
        await self._generator.release(session)

    async def update(self, copy_weights: Any, version: int) -> None:
        """Waits for the replies that are being sampled, then changes the weights."""
        self._open.clear()
        try:
            await self._idle.wait()
            copy_weights()
            self._generator.weights_updated(version)
        finally:
            self._open.set()


def snapshot(model: Any) -> Any:
    """A copy of the model that samples beside training."""
    twin = copy.deepcopy(model)
    # accelerate sets a wrapped forward on the instance, which refers to the original model and its
    # weights.
    for name in ("forward", "_original_forward"):
        twin.__dict__.pop(name, None)
    return twin.eval().requires_grad_(False)


@torch.no_grad()
def copy_weights(source: Any, target: Any) -> None:
    """Copies the current weights into a snapshot."""
    for ours, theirs in zip(target.parameters(), source.parameters(), strict=True):
        ours.copy_(theirs)
    for ours, theirs in zip(target.buffers(), source.buffers(), strict=True):
        ours.copy_(theirs)


def base_model(trainer: Any) -> Any:
    """The trainer's causal model, without the wrappers of accelerate and peft."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    return model.get_base_model() if type(model).__module__.startswith("peft.") else model


@dataclass(kw_only=True, slots=True)
class _Request:
    ids: list[int]
    sampling: Sampling
    future: "asyncio.Future[tuple[list[int], list[float] | None]]"


class TRLGenerator:
    """TRL's own engine (transformers, vLLM colocated or as a server) as a generator, in rounds.

    A round serves all waiting requests. All processes take part in every round with the same number
    of prompts, because the engine gathers across processes; a process without requests sends a
    dummy prompt.
    """

    def __init__(self, trainer: Any, *, stop_ids: frozenset[int], max_context: int) -> None:
        self._trainer = trainer
        self._stop_ids = stop_ids
        self._max_context = max_context
        self._held: dict[str, list[int]] = {}
        self._waiting: list[_Request] = []
        self.exact_logprobs = True
        """False once the engine returned no log-probs."""
        self.rounds: list[int] = []
        """How many prompts each round served."""

    @property
    def policy_version(self) -> int:
        return self._trainer.state.global_step

    @property
    def max_context(self) -> int:
        return self._max_context

    async def generate(
        self, session: Session, new_ids: Sequence[int], sampling: Sampling
    ) -> Completion:
        held = [*self._held.get(session.key, []), *new_ids]
        if len(held) >= self._max_context:
            raise ContextOverflowError(
                f"{session.key}: {len(held)} ids leave no room in {self._max_context}"
            )
        sampling = replace(
            sampling, max_tokens=min(sampling.max_tokens, self._max_context - len(held))
        )
        future: asyncio.Future[tuple[list[int], list[float] | None]] = (
            asyncio.get_running_loop().create_future()
        )
        self._waiting.append(_Request(ids=held, sampling=sampling, future=future))
        version = self.policy_version
        ids, logprobs = await future
        # A round has one length limit for all, and stops at the model's own end of sequence only,
        # which need not be the chat template's end of a turn. A reply is cut where its own limit,
        # or its turn, ends.
        ends = self._stop_ids | set(sampling.stop_ids)
        ids = ids[: sampling.max_tokens]
        end = next((place for place, token in enumerate(ids) if token in ends), None)
        if end is not None:
            ids = ids[: end + 1]
        if not ids:
            raise GeneratorError(f"{session.key}: the engine returned an empty completion")
        if logprobs is None:
            self.exact_logprobs = False
        self._held[session.key] = [*held, *ids]
        return Completion(
            ids=tuple(ids),
            logprobs=(0.0,) * len(ids) if logprobs is None else tuple(logprobs[: len(ids)]),
            finish_reason="length" if end is None else "stop",
            policy_version=version,
        )

    async def release(self, session: Session) -> None:
        self._held.pop(session.key, None)

    async def serve(self, job: "asyncio.Task[Any]") -> None:
        """Serves rounds until the job is done, on every process."""
        while True:
            await self._collect(job)
            self._waiting = [request for request in self._waiting if not request.future.done()]
            longest = max((request.sampling.max_tokens for request in self._waiting), default=0)
            longest, alive = self._agree(longest, int(not job.done()))
            if longest:
                self._round(longest)
                await asyncio.sleep(0)
            elif not alive:
                return

    async def _collect(self, job: "asyncio.Task[Any]") -> None:
        """Waits briefly so that almost simultaneous requests share a round."""
        known = -1
        while not job.done() and known != len(self._waiting):
            known = len(self._waiting)
            await asyncio.sleep(ROUND_SECONDS)

    def _agree(self, *mine: int) -> list[int]:
        """The largest of each number over the processes."""
        accelerator = self._trainer.accelerator
        if accelerator.num_processes == 1:
            return list(mine)
        return accelerator.gather(torch.tensor([mine], device=accelerator.device)).amax(0).tolist()

    def _round(self, max_tokens: int) -> None:
        # vLLM's server refuses a prompt without room for that many tokens; it waits for a round
        # that asks for less.
        room = self._max_context - max_tokens
        requests = [one for one in self._waiting if len(one.ids) <= room]
        self._waiting = [one for one in self._waiting if len(one.ids) > room]
        (size,) = self._agree(len(requests))
        dummy = requests[0].ids if requests else [next(iter(self._stop_ids))]
        prompts = [request.ids for request in requests] + [dummy] * (size - len(requests))
        self.rounds.append(size)
        with _at_most(self._trainer, max_tokens):
            ids, logprobs = generate_single_turn(self._trainer, prompts)
        for index, request in enumerate(requests):
            if not request.future.done():
                request.future.set_result(
                    (list(ids[index]), None if logprobs is None else list(logprobs[index]))
                )


def generate_single_turn(
    trainer: Any, prompts: list[list[int]]
) -> tuple[list[list[int]], list[list[float]] | None]:
    """(ids, log-probs or None) from TRL's `_generate_single_turn`, whose signature differs between
    releases."""
    function = trainer._generate_single_turn
    if "num_generations" in inspect.signature(function).parameters:
        return function(prompts, None, {}, num_generations=1)
    with _one_generation(trainer):
        return function(prompts, None, {})


@contextmanager
def _one_generation(trainer: Any) -> Any:
    """Older releases treat equal adjacent prompts as generations of one prompt; here every prompt
    is separate."""
    names = [
        name for name in ("num_generations", "num_generations_eval") if name in trainer.__dict__
    ]
    before = {name: trainer.__dict__[name] for name in names}
    trainer.__dict__.update(dict.fromkeys(names, 1))
    try:
        yield
    finally:
        trainer.__dict__.update(before)


@contextmanager
def _at_most(trainer: Any, tokens: int) -> Any:
    """TRL's engine samples whole episodes' worth of tokens, `max_completion_length`; a turn needs
    no more than this."""
    if trainer.use_vllm:
        holder, name = trainer.vllm_generation, "max_completion_length"
    else:
        holder, name = trainer.generation_config, "max_new_tokens"
    before = getattr(holder, name)
    setattr(holder, name, tokens)
    try:
        yield
    finally:
        setattr(holder, name, before)
