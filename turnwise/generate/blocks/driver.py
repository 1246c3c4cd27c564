"""Plans blocks for the requests of a generator, and hands out the tokens of the blocks that ran."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from turnwise.generate.blocks.engine import BlockEngine, Copy, Launched, Start
from turnwise.generate.blocks.prefill import Prefill
from turnwise.generate.scheduler import SessionState, Span

MAX_TWINS = 63
"""Prompts that share one prefill, besides the one that is computed."""
MIN_SHARED = 32
"""Ids that two different prompts must begin with in common for their states to be copied."""


class Request(Protocol):
    """What the driver needs to know of a request."""

    @property
    def state(self) -> SessionState: ...
    @property
    def limit(self) -> int: ...
    @property
    def start(self) -> int: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a request was given since it was last heard of: tokens, in order."""

    request: Request
    ids: list[int]
    logprobs: list[float]


@dataclass(kw_only=True, slots=True)
class _Live:
    """A request in its slot."""

    request: Request
    watched: bool
    """Something that only the host can see may end it, so its tokens are looked at block by block."""
    drawn: int = 0
    parts: list[tuple[Any, Any]] = field(default_factory=list[tuple[Any, Any]])
    """Columns of ids and log-probs that were read and not handed out yet."""


class BlockDriver:
    """Keeps one block running ahead: the tokens of a block are read while the next one runs.

    A request leaves by itself when the device stops it, or early when `alive` says that nobody waits for it any more;
    its slot is then put to rest with the next block, and what the running block still draws for it is ignored.

    Prompts that begin alike are prefilled once: equal ones draw from the same logits, and others are given a copy of
    what they share with the last prompt that was prefilled from its start.
    """

    def __init__(self, engine: BlockEngine, *, alive: Callable[[Request], bool], stop_ids: Collection[int]) -> None:
        self.engine = engine
        self.shared_tokens = 0
        """Ids whose states were copied instead of computed."""
        self._alive = alive
        self._stop_ids = np.array(sorted(stop_ids), dtype=np.int64)
        self._live: dict[int, _Live] = {}
        self._running: tuple[Launched, dict[int, _Live]] | None = None
        self._opening: tuple[SessionState, int, tuple[int, ...]] | None = None

    @property
    def running(self) -> bool:
        """True while a block's tokens are still to be read."""
        return self._running is not None

    @property
    def num_live(self) -> int:
        return len(self._live)

    def step(self, waiting: Sequence[Request], *, steps: int | None = None) -> list[Outcome]:
        """Launches the next block, with `waiting` requests beginning in it, and returns the tokens of the one before:
        of requests that ended, and of those that only the host can end.

        Requests that have sessions in slots are given once, when they begin.
        """
        rests = [slot for slot, live in self._live.items() if not self._alive(live.request)]
        for slot in rests:
            del self._live[slot]
        starts: list[Start] = []
        for request in waiting:
            state = request.state
            assert state.slot is not None
            assert state.sampling is not None
            sampling = state.sampling
            self._live[state.slot] = _Live(request=request, watched=bool(sampling.stop or sampling.stop_ids))
            starts.append(
                Start(slot=state.slot, seed=state.seed, temperature=sampling.temperature, limit=request.limit)
            )
        prefills, copies = self._prefills([request.state for request in waiting])
        before = self._running
        self._running = None
        if self._live:
            launched = self.engine.launch(
                starts=starts,
                prefills=prefills,
                copies=copies,
                rests=rests,
                truncation=self._truncation(),
                steps=steps,
            )
            self._running = (launched, dict(self._live))
        return [] if before is None else self._read(*before)

    def reset(self) -> list[Request]:
        """Forgets everything that runs; returns the requests that it was running for."""
        found = [live.request for live in self._live.values()]
        self._live = {}
        self._running = None
        self._opening = None
        return found

    def finish(self, request: Request) -> None:
        """Notes that a request is complete: its session holds all ids but the last in its slot."""
        state = request.state
        state.cached = len(state.ids) - 1
        state.spans = [Span(start=0, end=state.cached, decode=False)]
        state.at = 1

    def _prefills(self, states: Sequence[SessionState]) -> tuple[list[Prefill], list[Copy]]:
        """What must be computed for these sessions to begin, and what can be copied first."""
        prefills: list[Prefill] = []
        copies: list[Copy] = []
        first: dict[tuple[int, ...], int] = {}
        newest = opening = self._valid_opening()
        for state in states:
            slot = state.slot
            assert slot is not None
            start = state.cached
            ids = tuple(state.ids[start:])
            if start == 0:
                leader = first.get(ids)
                if leader is not None and len(prefills[leader].twins) < MAX_TWINS:
                    prefills[leader] = _with_twin(prefills[leader], slot)
                    self.shared_tokens += len(ids)
                    state.cached, state.at = len(ids), len(state.spans)
                    continue
                common = 0 if opening is None else _common(ids, opening[2])
                if opening is not None and common >= MIN_SHARED:
                    copies.append(Copy(source=opening[1], target=slot, num=common))
                    self.shared_tokens += common
                    start = common
                first[ids] = len(prefills)
                newest = (state, slot, ids)
            prefills.append(Prefill(slot=slot, start=start, ids=state.ids[start:], final=True))
            state.cached, state.at = len(state.ids), len(state.spans)
        self._opening = newest
        return prefills, copies

    def _valid_opening(self) -> tuple[SessionState, int, tuple[int, ...]] | None:
        """The last opening, if its states are still in its slot."""
        if self._opening is None:
            return None
        state, slot, ids = self._opening
        return self._opening if state.slot == slot and state.cached >= len(ids) else None

    def _read(self, launched: Launched, requests: dict[int, _Live]) -> list[Outcome]:
        ids, logprobs = launched.tokens()
        present = ids >= 0
        counts: list[int] = present.sum(0).tolist()
        stopped: list[bool] = np.any(present & np.isin(ids, self._stop_ids), axis=0).tolist()
        broken: list[bool] = np.any(present & ~np.isfinite(logprobs), axis=0).tolist()
        outcomes: list[Outcome] = []
        for slot, live in requests.items():
            if not counts[slot] or not self._alive(live.request):
                continue
            live.drawn += counts[slot]
            live.parts.append((ids[:, slot], logprobs[:, slot]))
            ended = stopped[slot] or live.drawn >= live.request.limit or broken[slot]
            if ended or live.watched:
                outcomes.append(_handed_out(live))
            if ended and not broken[slot] and self._live.get(slot) is live:
                del self._live[slot]  # the device put the slot to rest by itself
        return outcomes

    def _truncation(self) -> dict[int, tuple[int, float]]:
        found: dict[int, tuple[int, float]] = {}
        for slot, live in self._live.items():
            sampling = live.request.state.sampling
            if sampling is not None and (sampling.top_k or sampling.top_p < 1.0):
                found[slot] = (sampling.top_k, sampling.top_p)
        return found


def _common(ids: tuple[int, ...], opening: tuple[int, ...]) -> int:
    """How many ids both begin with, the last of `ids` left out: something must be computed to draw from.

    Example:
        >>> _common((1, 2, 3), (1, 2, 9, 9)), _common((1, 2), (1, 2, 3)), _common((1, 2, 3), (1, 2))
        (2, 1, 2)
    """
    end = min(len(ids) - 1, len(opening))
    return next((at for at in range(end) if ids[at] != opening[at]), end)


def _with_twin(prefill: Prefill, slot: int) -> Prefill:
    return Prefill(
        slot=prefill.slot, start=prefill.start, ids=prefill.ids, final=prefill.final, twins=(*prefill.twins, slot)
    )


def _handed_out(live: _Live) -> Outcome:
    ids = np.concatenate([part for part, _ in live.parts])
    logprobs = np.concatenate([part for _, part in live.parts])
    live.parts = []
    present = ids >= 0
    return Outcome(request=live.request, ids=ids[present].tolist(), logprobs=logprobs[present].tolist())
