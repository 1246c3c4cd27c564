"""Open sessions and pending requests of an in-process generator."""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from turnwise.generate.base import GeneratorError
from turnwise.generate.scheduler import Scheduler, SessionState
from turnwise.generate.stops import StopChecker
from turnwise.types import Completion


@dataclass(kw_only=True, slots=True)
class GeneratorStats:
    """Statistics of a generator since it was created, or since they were last replaced."""

    prefilled_tokens: int = 0
    """Prompt ids that ran through the model, repetitions after an eviction included."""
    shared_tokens: int = 0
    """Prompt ids whose keys and values were reused from a session with the same prefix."""
    replayed_tokens: int = 0
    """Ids that ran through the model once more because their session had lost its slot."""
    decode_steps: int = 0
    evictions: int = 0
    completions: int = 0
    failures: int = 0
    prefill_seconds: float = 0.0
    """Wall time of the passes; with the block engine, time on the device."""
    decode_seconds: float = 0.0


@dataclass(kw_only=True, slots=True)
class Request:
    """A pending call of generate."""

    state: SessionState
    future: "asyncio.Future[Completion]"
    stops: StopChecker
    limit: int
    """Tokens that may be sampled."""
    start: int
    """How many ids the session held before the first sampled one."""


class Requests:
    """Sessions and their pending requests. However a request ends, its session stays usable."""

    def __init__(self, scheduler: Scheduler, *, policy_version: int) -> None:
        self.scheduler = scheduler
        self.policy_version = policy_version
        self.stats = GeneratorStats()
        self.sessions: dict[str, SessionState] = {}
        self.open: dict[str, Request] = {}
        self.answers: deque[tuple[asyncio.Future[Completion], Completion]] = deque()
        """Completions that are ready to be returned."""
        self.leave: Callable[[Request], None] = lambda request: None
        """Called for every request that ends, for any reason, while its session still has its
        slot."""

    def submit(self, request: Request) -> None:
        state = request.state
        self.sessions[state.key] = state
        self.open[state.key] = request
        self.scheduler.submit(state)

    def answer(self, request: Request, *, stopped: bool) -> None:
        """Notes the session's new ids as the request's completion, to be handed out."""
        state = request.state
        completion = Completion(
            ids=tuple(state.ids[request.start :]),
            logprobs=tuple(state.logprobs),
            finish_reason="stop" if stopped else "length",
            policy_version=self.policy_version,
        )
        self.stats.completions += 1
        self._close(request)
        self.answers.append((request.future, completion))

    def hand_out(self, most: int | None = None) -> None:
        """Returns up to `count` completions to their callers, oldest first."""
        for _ in range(len(self.answers) if most is None else min(most, len(self.answers))):
            future, completion = self.answers.popleft()
            if not future.done():
                future.set_result(completion)

    def fail(self, request: Request, error: GeneratorError) -> None:
        """Answers with an error. The session holds what it held before the call, and nothing is
        cached."""
        self.stats.failures += 1
        self._undo(request.state)
        self._close(request)
        self.scheduler.evict(request.state)
        if not request.future.done():
            request.future.set_exception(error)

    def fail_all(self, error: GeneratorError) -> None:
        for request in list(self.open.values()):
            self.fail(request, error)

    def withdraw(self, state: SessionState) -> None:
        """The caller of generate was cancelled: restores the session's state before the call."""
        self._undo(state)
        request = self.open.get(state.key)
        if request is not None and request.state is state:
            self._close(request)
        if not state.ids:
            self.scheduler.evict(state)

    def release(self, key: str) -> None:
        """Removes a session. Its pending request fails."""
        state = self.sessions.pop(key, None)
        if state is None:
            return
        request = self.open.get(key)
        if request is not None:
            self.fail(
                request, GeneratorError(f"session {key!r} was released while it was generating")
            )
        self.scheduler.evict(state)

    def evict_all(self) -> None:
        for state in self.sessions.values():
            self.scheduler.evict(state)

    def refuse_while_busy(self, what: str) -> None:
        if self.open:
            raise GeneratorError(
                f"cannot {what} while sessions {sorted(self.open)[:4]} are generating; wait for "
                "them first"
            )

    def _close(self, request: Request) -> None:
        self.leave(request)
        del self.open[request.state.key]
        self.scheduler.finish(request.state)

    def _undo(self, state: SessionState) -> None:
        state.roll_back()
        if not state.ids and self.sessions.get(state.key) is state:
            del self.sessions[state.key]


class Runner(Protocol):
    """Runs the scheduled requests."""

    @property
    def busy(self) -> bool:
        """True while there is anything to run, to read or to hand out."""
        ...

    async def run(self) -> None:
        """Makes one step, and yields to other tasks."""
        ...


def not_finite(state: SessionState) -> GeneratorError:
    """The error for a log-prob that is not finite."""
    return GeneratorError(f"the model's logits for {state.key!r} are not finite; check its weights")
