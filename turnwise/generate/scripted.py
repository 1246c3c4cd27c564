"""A generator that says what a test tells it to, and holds its caller to the contract."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from turnwise.generate.base import ContextOverflowError, GeneratorError, Sampling, Session
from turnwise.types import Completion

Script = Callable[[Session, tuple[int, ...], int], "Sequence[int] | str"]
"""(session, every id it holds, index of the call within the session) -> ids to say, or text."""


class Encoder(Protocol):
    """The part of a tokenizer that a script of text needs."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...


class ScriptedGenerator:
    """Implements Generator by calling a function. Nothing is random, and misuse is an error at
    once.

    Beyond what the protocol asks, it refuses a session whose seed changed, two calls at once on one
    session, an empty opening prompt and ids that are negative. `open_sessions` shows what was never
    released.

    Args:
        script: what to say. Text is encoded with `tokenizer`, and `end_id` is added to it where
            given.
        latency: seconds before an answer, or a function of (session, call index).
        fail: an exception to raise for (session, call index), or None.
        logprob: the log-prob of every token, or a function of (session, position of the token in
            the session).

    Example:
        >>> generator = ScriptedGenerator(lambda session, ids, call: [7, 2], end_id=2)
        >>> session = Session(key="a", seed=0)
        >>> asyncio.run(generator.generate(session, [1, 5], Sampling(max_tokens=8))).ids
        (7, 2)
        >>> generator.ids(session)
        (1, 5, 7, 2)
    """

    def __init__(
        self,
        script: Script,
        *,
        tokenizer: Encoder | None = None,
        end_id: int | None = None,
        max_context: int = 1 << 20,
        latency: float | Callable[[Session, int], float] = 0.0,
        fail: Callable[[Session, int], Exception | None] | None = None,
        logprob: float | Callable[[Session, int], float] = -1.0,
        policy_version: int = 0,
    ) -> None:
        self._script = script
        self._tokenizer = tokenizer
        self._end_id = end_id
        self._max_context = max_context
        self._latency = latency
        self._fail = fail
        self._logprob = logprob
        self.policy_version = policy_version
        self.num_calls = 0
        self.num_released = 0
        self._ids: dict[str, list[int]] = {}
        self._seeds: dict[str, int] = {}
        self._calls: dict[str, int] = {}
        self._busy: set[str] = set()

    @property
    def max_context(self) -> int:
        return self._max_context

    @property
    def open_sessions(self) -> tuple[str, ...]:
        """Keys of the sessions that were opened and not released, oldest first."""
        return tuple(self._ids)

    def ids(self, session: Session) -> tuple[int, ...]:
        """Everything that the session holds."""
        return tuple(self._ids[session.key])

    def weights_updated(self, version: int) -> None:
        """Completions from now on carry this policy version."""
        self.policy_version = version

    async def generate(
        self, session: Session, new_ids: Sequence[int], sampling: Sampling
    ) -> Completion:
        self._check(session, new_ids, sampling)
        held = [*self._ids.get(session.key, ()), *new_ids]
        room = self._max_context - len(held)
        if room < 1:
            raise ContextOverflowError(
                f"a session holds at most {self._max_context} ids, and {len(held)} leave no room "
                "for a reply; "
                "shorten the prompt or raise max_context"
            )
        call = self._calls.get(session.key, 0)
        self._ids[session.key], self._seeds[session.key] = held, session.seed
        self._calls[session.key] = call + 1
        self.num_calls += 1
        self._busy.add(session.key)
        try:
            latency = (
                self._latency
                if isinstance(self._latency, float | int)
                else self._latency(session, call)
            )
            await asyncio.sleep(latency)
            error = self._fail(session, call) if self._fail else None
            if error is not None:
                raise error
            completion = self._complete(
                session, held, call=call, limit=min(room, sampling.max_tokens)
            )
        finally:
            self._busy.discard(session.key)
        held.extend(completion.ids)
        return completion

    async def release(self, session: Session) -> None:
        if session.key in self._ids:
            self.num_released += 1
        for table in (self._ids, self._seeds, self._calls):
            table.pop(session.key, None)

    def _check(self, session: Session, new_ids: Sequence[int], sampling: Sampling) -> None:
        if session.key in self._busy:
            raise GeneratorError(
                f"a session generates once at a time, and {session.key!r} is still waiting"
            )
        if self._seeds.get(session.key, session.seed) != session.seed:
            raise GeneratorError(
                f"open session {session.key!r} has seed {self._seeds[session.key]}, got "
                f"{session.seed}; "
                "release it first, or use another key"
            )
        if session.key not in self._ids and not new_ids:
            raise GeneratorError(
                f"the first call of a session needs ids, and {session.key!r} got none"
            )
        if any(token < 0 for token in new_ids):
            raise GeneratorError(f"ids are not negative, got {list(new_ids)} for {session.key!r}")
        if sampling.max_tokens < 1:
            raise GeneratorError(f"max_tokens must be at least 1, got {sampling.max_tokens}")

    def _complete(self, session: Session, held: list[int], *, call: int, limit: int) -> Completion:
        said = self._script(session, tuple(held), call)
        if isinstance(said, str):
            if self._tokenizer is None:
                raise GeneratorError(
                    "a script that returns text needs a tokenizer; pass "
                    "ScriptedGenerator(tokenizer=)"
                )
            said = self._tokenizer.encode(said, add_special_tokens=False)
            said = said if self._end_id is None else [*said, self._end_id]
        if not said:
            raise GeneratorError(
                f"a completion is never empty, but the script said nothing to {session.key!r}"
            )
        ids = tuple(said[:limit])
        logprob = self._logprob
        values = (
            logprob if isinstance(logprob, float | int) else logprob(session, len(held) + i)
            for i in range(len(ids))
        )
        return Completion(
            ids=ids,
            logprobs=tuple(float(value) for value in values),
            finish_reason="stop" if len(ids) == len(said) else "length",
            policy_version=self.policy_version,
        )
