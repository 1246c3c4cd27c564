"""Plans blocks for the requests of a generator, and returns the tokens of finished blocks."""

import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

import numpy as np

from turnwise.generate.blocks.engine import BlockEngine, Copy, Start
from turnwise.generate.blocks.launched import Launched
from turnwise.generate.blocks.ops import TILE
from turnwise.generate.blocks.prefill import Prefill
from turnwise.generate.blocks.sharing import Sharing
from turnwise.generate.scheduler import SessionState, Span

Array: TypeAlias = "np.ndarray[Any, Any]"
MAX_TWINS = 63
"""Prompts that share one prefill, besides the one that is computed."""
_NEVER = 1 << 62
LONGEST_LEAD = 0.01
"""Upper limit of the estimated launch time in seconds. The first launches capture graphs and are
slower."""
FADE = 0.8
"""Decay of the estimated launch time per launch."""
MIN_SHARED = 32
"""Minimum common prefix of two prompts, in ids, for their states to be copied."""


class Driven(Protocol):
    """The state of a request that the driver needs."""

    @property
    def state(self) -> SessionState: ...
    @property
    def limit(self) -> int: ...
    @property
    def start(self) -> int: ...


@dataclass(kw_only=True, slots=True)
class Outcome:
    """New tokens of a request, in order."""

    request: Driven
    ids: list[int]
    logprobs: list[float]
    broken: bool
    """A log-prob is not finite."""


class BlockDriver:
    """Runs one block ahead: launches a block before the results of the running one are read.

    A request ends when the device stops it, or by `leave` if it was cancelled. Then its slot is
    disabled with the next block, and further tokens of the running block are ignored. Between two
    blocks the host's work depends on the number of requests that begin or end, not on those that
    continue.

    Common prompt prefixes are prefilled once: equal prompts sample from the same logits and read
    the first one's states (`Sharing`); others get a copy of the prefix they share with the last
    prompt that was prefilled from its start.
    """

    def __init__(self, engine: BlockEngine, *, stop_ids: Collection[int]) -> None:
        self.engine = engine
        self.shared_tokens = 0
        """Ids whose states were reused from another prompt."""
        self.decode_steps = 0
        self.prefill_seconds = 0.0
        """Device seconds spent on prompts, copies included, in the blocks that were read."""
        self.decode_seconds = 0.0
        # Indexed by id + 1: entry 0 stands for no token, the last entry for all greater ids.
        self._is_stop = np.zeros(max(stop_ids, default=0) + 3, dtype=bool)
        self._is_stop[[token + 1 for token in stop_ids]] = True
        self._live: dict[int, Driven] = {}
        self._watched: set[int] = set()
        """Slots whose requests may end by a condition that only the host checks (stop strings).
        Read after every block."""
        self._truncated: dict[int, tuple[int, float]] = {}
        self._rests: list[int] = []
        self._unread: deque[tuple[int, Launched]] = deque()
        """The blocks that were launched and not read yet, by number."""
        self._number = 0
        # By slot: the first block of its request (a large number if there is none), its token
        # limit, and the number of tokens drawn.
        self._since = np.full(engine.slots, _NEVER, dtype=np.int64)
        self._limit = np.zeros(engine.slots, dtype=np.int64)
        self._drawn = np.zeros(engine.slots, dtype=np.int64)
        self._kept: list[tuple[list[int], list[float]]] = [([], []) for _ in range(engine.slots)]
        """By slot: tokens that were drawn and not returned yet."""
        self._opening: tuple[SessionState, int, tuple[int, ...]] | None = None
        self._sharing = Sharing()
        self._step_seconds = 0.0
        """Seconds per step in the last block that was read."""
        self._lead = 0.0
        """Recent maximum of the host's launch time in seconds."""

    @property
    def running(self) -> bool:
        """True while a block's tokens are still to be read."""
        return bool(self._unread)

    @property
    def ready(self) -> bool:
        """True if `read` would not block."""
        return not self._unread or self._unread[0][1].done

    @property
    def all_done(self) -> bool:
        """True if nothing is running on the device."""
        return not self._unread or self._unread[-1][1].done

    def ending(self, *, within: float) -> bool:
        """True if the next block should be launched now: the device is in its last step, or becomes
        idle within the launch time plus `within` seconds."""
        if not self._unread:
            return True
        remaining = self._unread[-1][1].remaining(self._step_seconds)
        return remaining <= max(self._step_seconds, self._lead + within)

    def launch(self, waiting: Sequence[Driven], *, steps: int | None = None) -> None:
        """Launches the next block if any request needs tokens. `waiting` requests begin in it.

        Requests that have sessions in slots are given once, when they begin.
        """
        began = time.perf_counter()
        starts = [self._begin(request) for request in waiting]
        prefills, copies = self._prefills([request.state for request in waiting])
        if not self._live:
            return
        rests, self._rests = self._rests, []
        # The count of drawn tokens is only known up to the last block that was read, so this is an
        # upper bound.
        most = int((self._limit - self._drawn)[self._since < _NEVER].max()) - 1
        if steps is None or most <= self.engine.steps:  # short replies end within one block
            steps = self.engine.steps
        steps = max(1, min(steps, most))
        launched = self.engine.launch(
            starts=starts,
            prefills=prefills,
            copies=copies,
            moves=self._sharing.take_moves(),
            links=self._sharing.take_links(),
            rests=rests,
            truncation=self._truncated,
            steps=steps,
        )
        self._unread.append((self._number, launched))
        self._number += 1
        self.decode_steps += steps
        self._lead = max(min(time.perf_counter() - began, LONGEST_LEAD), FADE * self._lead)

    def read(self) -> list[Outcome]:
        """The tokens of the oldest block that was not read yet, once it ran: of requests that
        ended, and of those that only the host can end."""
        if not self._unread:
            return []
        number, launched = self._unread.popleft()
        ids, logprobs = launched.tokens()
        prefilling, decoding = launched.seconds
        self.prefill_seconds += prefilling
        self.decode_seconds += decoding
        self._step_seconds = decoding / max(1, len(ids) - 1)
        # The slot may already belong to a new request in a block launched since.
        live = self._since <= number
        self._keep(ids, logprobs, live=live)
        counts = (ids >= 0).sum(0) * live
        self._drawn += counts
        broken = live & ((ids >= 0) & ~np.isfinite(logprobs)).any(0)
        stopped = self._is_stop.take(ids + 1, mode="clip").any(0)
        ended = (counts > 0) & ((self._drawn >= self._limit) | stopped)
        over: list[int] = (ended | broken).nonzero()[0].tolist()
        watched = [
            slot for slot in self._watched if counts[slot] and not ended[slot] and not broken[slot]
        ]
        outcomes: list[Outcome] = []
        for slot in (*over, *watched):
            (drawn, scores), self._kept[slot] = self._kept[slot], ([], [])
            request, bad = self._live[slot], bool(broken[slot])
            outcomes.append(Outcome(request=request, ids=drawn, logprobs=scores, broken=bad))
            if ended[slot] and not bad:
                self._forget(slot)  # the device disabled it
        return outcomes

    def _keep(self, ids: Array, logprobs: Array, *, live: Array) -> None:
        """Adds what a block drew, [steps, slots] with -1 where nothing was drawn, to the slots that
        have requests."""
        columns, scores = ids.T.tolist(), logprobs.T.tolist()
        for slot in live.nonzero()[0].tolist():
            kept_ids, kept_logprobs = self._kept[slot]
            if min(columns[slot]) >= 0:
                kept_ids += columns[slot]
                kept_logprobs += scores[slot]
                continue
            for token, logprob in zip(columns[slot], scores[slot], strict=True):
                if token >= 0:
                    kept_ids.append(token)
                    kept_logprobs.append(logprob)

    def leave(self, request: Driven) -> None:
        """Cancels a request, if it is still running."""
        slot = request.state.slot
        if slot is not None and self._live.get(slot) is request:
            self._forget(slot)
            self._rests.append(slot)

    def _begin(self, request: Driven) -> Start:
        state = request.state
        slot, sampling = state.slot, state.sampling
        assert slot is not None
        assert sampling is not None
        self._live[slot] = request
        if sampling.stop or sampling.stop_ids:
            self._watched.add(slot)
        if sampling.top_k or sampling.top_p < 1.0:
            self._truncated[slot] = (sampling.top_k, sampling.top_p)
        self._since[slot] = self._number
        self._kept[slot] = ([], [])
        self._limit[slot] = request.limit
        self._drawn[slot] = 0
        return Start(
            slot=slot, seed=state.seed, temperature=sampling.temperature, limit=request.limit
        )

    def _forget(self, slot: int) -> None:
        del self._live[slot]
        self._since[slot] = _NEVER
        self._watched.discard(slot)
        self._truncated.pop(slot, None)

    def reset(self) -> None:
        """Drops all running requests."""
        for slot in list(self._live):
            self._forget(slot)
        self._unread.clear()
        self._rests = []
        self._opening = None
        self._sharing = Sharing()

    def finish(self, request: Driven) -> None:
        """Notes that a request is complete: its session holds all ids but the last in its slot."""
        state = request.state
        state.cached = len(state.ids) - 1
        state.spans = [Span(start=0, end=state.cached, decode=False)]
        state.at = 1

    def _prefills(self, states: Sequence[SessionState]) -> tuple[list[Prefill], list[Copy]]:
        """The prefills that these sessions need, and the copies to make before."""
        prefills: list[Prefill] = []
        copies: list[Copy] = []
        first: dict[tuple[int, ...], int] = {}
        newest = opening = self._valid_opening()
        for state in states:
            slot = state.slot
            assert slot is not None
            start = state.cached
            if start == 0:
                self._sharing.vacate(slot)
                ids = tuple(state.ids)
                leader = first.get(ids)
                if leader is not None and len(prefills[leader].twins) < MAX_TWINS:
                    prefills[leader] = _with_twin(prefills[leader], slot)
                    self._sharing.follow(state, prefills[leader].slot, num=prefills[leader].shared)
                    self.shared_tokens += len(ids)
                    state.cached, state.at = len(ids), len(state.spans)
                    continue
                common = 0 if opening is None else _common(ids, opening[2])
                if opening is not None and common >= MIN_SHARED:
                    copies.append(Copy(source=opening[1], target=slot, last=common))
                    self.shared_tokens += common
                    start = common
                first[ids] = len(prefills)
                newest = (state, slot, ids)
            shared = len(state.ids) // TILE * TILE if state.cached == 0 else 0
            prefills.append(
                Prefill(slot=slot, start=start, ids=state.ids[start:], final=True, shared=shared)
            )
            state.cached, state.at = len(state.ids), len(state.spans)
        self._opening = newest
        return prefills, copies

    def _valid_opening(self) -> tuple[SessionState, int, tuple[int, ...]] | None:
        """The last opening, if its states are still in its slot."""
        if self._opening is None:
            return None
        state, slot, ids = self._opening
        return self._opening if state.slot == slot and state.cached >= len(ids) else None


def _common(ids: tuple[int, ...], opening: tuple[int, ...]) -> int:
    """Length of the common prefix, without the last of `ids`: at least one id must be computed to
    get logits.

    Example:
        >>> _common((1, 2, 3), (1, 2, 9, 9)), _common((1, 2), (1, 2, 3)), _common((1, 2, 3), (1, 2))
        (2, 1, 2)
    """
    end = min(len(ids) - 1, len(opening))
    return next((at for at in range(end) if ids[at] != opening[at]), end)


def _with_twin(prefill: Prefill, slot: int) -> Prefill:
    return replace(prefill, twins=(*prefill.twins, slot))
