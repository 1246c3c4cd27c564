"""Who runs next: sessions, slots and the order of work. Plain Python: no tensors, no clock, no
model.

A session's ids enter its slot in *spans*: a span of given ids is prefilled as one chunk, a span of
sampled ids is decoded id by id. The spans are remembered, so that a session whose slot was taken
can be brought back by the same passes of the same shapes, which is what makes its bits the same.
"""

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from turnwise.generate.base import Sampling

PATIENCE = 6
"""Decode passes for which a prefill waits to be shared."""


@dataclass(kw_only=True, slots=True)
class Span:
    """ids[start:end] of a session: one prefill chunk, or a run of decoded ids."""

    start: int
    end: int
    decode: bool


@dataclass(kw_only=True, slots=True, eq=False)
class SessionState:
    """One session: its ids, what of them is in its slot, and what it is asked for now."""

    key: str
    seed: int
    ids: list[int] = field(default_factory=list[int])
    spans: list[Span] = field(default_factory=list[Span])
    at: int = 0
    """Index of the span that runs next."""
    cached: int = 0
    """How many ids are in the slot."""
    slot: int | None = None
    sampling: Sampling | None = None
    """The pending request's sampling, None while there is no request."""
    logprobs: list[float] = field(default_factory=list[float])
    """Log-probs of the ids sampled for this request."""
    _mark: tuple[int, int] = (0, 0)

    @property
    def covered(self) -> int:
        """How many ids lie in spans, run or not."""
        return self.spans[-1].end if self.spans else 0

    @property
    def num_old_spans(self) -> int:
        """How many spans are older than the request: to run one of them is to run it again."""
        return self._mark[1]

    @property
    def prefilling(self) -> bool:
        """True where the next pass is a chunk, False where it is one decoded id."""
        return not self.spans[self.at].decode

    @property
    def next_bucket(self) -> int:
        """The bucket of the chunk that runs next."""
        span = self.spans[self.at]
        return bucket(span.end - span.start)

    def ask(self, new_ids: Sequence[int], *, sampling: Sampling, chunk: int) -> None:
        """Takes a request: the ids not yet in spans (the last sampled one too) become chunks."""
        self._mark = (len(self.ids), len(self.spans))
        self.ids.extend(new_ids)
        self.spans.extend(chunks(self.covered, len(self.ids), chunk=chunk))
        self.sampling = sampling
        self.logprobs = []

    def advance(self) -> bool:
        """Notes that the next span (or id of it) ran. True where the model's output is a token to
        sample."""
        span = self.spans[self.at]
        self.cached = self.cached + 1 if span.decode else span.end
        if self.cached == span.end:
            self.at += 1
        return self.at == len(self.spans)

    def append(self, token: int, logprob: float) -> None:
        """Adds a sampled id. It enters the slot with the next pass."""
        self.ids.append(token)
        self.logprobs.append(logprob)

    def decode_last(self) -> None:
        """Plans to decode the last id, because another is wanted after it."""
        if self.spans[-1].decode:
            self.spans[-1].end += 1
            self.at = len(self.spans) - 1
        else:
            self.spans.append(Span(start=len(self.ids) - 1, end=len(self.ids), decode=True))

    def roll_back(self) -> None:
        """Undoes the request: the session holds what it held before."""
        num_ids, num_spans = self._mark
        del self.ids[num_ids:], self.spans[num_spans:]
        self.cached = min(self.cached, self.covered)
        self.at = min(self.at, len(self.spans))

    def drop_cache(self, *, rechunk: int | None = None) -> None:
        """Starts over: nothing is cached. `rechunk`: forget how the ids came in, and prefill them
        in such chunks."""
        if rechunk is not None:
            self.spans = chunks(0, self.covered, chunk=rechunk)
        self.slot, self.cached, self.at = None, 0, 0


def chunks(start: int, end: int, *, chunk: int) -> list[Span]:
    """Spans that cover start..end in pieces of `chunk`, decided by nothing else than these numbers.

    Example:
        >>> [(span.start, span.end) for span in chunks(5, 14, chunk=4)]
        [(5, 9), (9, 13), (13, 14)]
    """
    return [
        Span(start=at, end=min(at + chunk, end), decode=False) for at in range(start, end, chunk)
    ]


def bucket(size: int) -> int:
    """The next power of two, at least 16: the shape in which a chunk runs.

    Example:
        >>> bucket(3), bucket(17), bucket(64)
        (16, 32, 64)
    """
    return max(16, 1 << (size - 1).bit_length())


class Scheduler:
    """Gives slots to sessions, first come first served, and takes them from idle ones, least
    recently used first.

    Example: one slot, two sessions

        >>> scheduler = Scheduler(slots=1, chunk=8, prefill_tokens=16, exact=True)
        >>> a, b = SessionState(key="a", seed=1), SessionState(key="b", seed=2)
        >>> for state in (a, b):
        ...     state.ask([1, 2, 3], sampling=Sampling(max_tokens=1), chunk=8)
        ...     scheduler.submit(state)
        >>> scheduler.admit(), a.slot, b.slot
        (0, 0, None)
        >>> scheduler.finish(a)
        >>> scheduler.admit(), a.slot, b.slot
        (1, None, 0)
    """

    def __init__(self, *, slots: int, chunk: int, prefill_tokens: int, exact: bool) -> None:
        self.chunk = chunk
        self._prefill_tokens = prefill_tokens
        self._exact = exact
        self._held = 0
        self._free = list(range(slots))
        self._waiting: deque[SessionState] = deque()
        self._running: dict[str, SessionState] = {}
        self._idle: dict[str, SessionState] = {}
        self._begun: dict[str, SessionState] = {}

    @property
    def busy(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def expecting(self) -> bool:
        """Whether another request could begin at once: a slot is free, or its session's environment
        is at work."""
        return bool(self._idle or self._free)

    def take_begun(self) -> list[SessionState]:
        """The running sessions that were given their slots for a request since this was last
        asked."""
        begun, self._begun = self._begun, {}
        return list(begun.values())

    def prefill_rows(self, size: int) -> int:
        """Rows of one prefill pass in this bucket: the pass has about the same number of tokens in
        every bucket."""
        return max(1, self._prefill_tokens // size)

    def submit(self, state: SessionState) -> None:
        """Queues a session that was asked for something."""
        if state.slot is not None:
            del self._idle[state.key]
            self._run(state)
        else:
            self._waiting.append(state)

    def admit(self) -> int:
        """Gives slots to waiting sessions; returns how many idle ones lost theirs."""
        evicted = 0
        while self._waiting and (self._free or self._idle):
            if not self._free:
                self.evict(next(iter(self._idle.values())))
                evicted += 1
            state = self._waiting.popleft()
            state.slot = heapq.heappop(self._free)
            self._run(state)
        return evicted

    def _run(self, state: SessionState) -> None:
        self._running[state.key] = self._begun[state.key] = state

    def next_prefill(self) -> tuple[list[SessionState], int]:
        """The sessions of the next prefill pass and its bucket: the first in line decides the
        bucket. May be none.

        A pass costs the same with one row as with all, so a batch that is not full waits up to
        PATIENCE decode passes for others, as long as more sessions decode than wait.
        """
        waiting = [state for state in self._running.values() if state.prefilling]
        if not waiting:
            return [], 0
        size = waiting[0].next_bucket
        rows = self.prefill_rows(size)
        batch = [state for state in waiting if state.next_bucket == size][:rows]
        decoding = len(self._running) - len(waiting)
        if len(batch) < rows and len(waiting) < decoding and self._held < PATIENCE:
            self._held += 1
            return [], 0
        self._held = 0
        return batch, size

    def next_decode(self) -> list[SessionState]:
        """The sessions of the next decode pass."""
        return [state for state in self._running.values() if not state.prefilling]

    def finish(self, state: SessionState) -> None:
        """The request is over. The session keeps its slot until another session needs it."""
        state.sampling = None
        self._begun.pop(state.key, None)
        if self._running.pop(state.key, None) is not None:
            self._idle[state.key] = state
        elif state in self._waiting:
            self._waiting.remove(state)

    def evict(self, state: SessionState) -> None:
        """Takes the slot of an idle session, if it has one."""
        if state.slot is not None:
            del self._idle[state.key]
            heapq.heappush(self._free, state.slot)
        state.drop_cache(rechunk=None if self._exact else self.chunk)
