"""Plans blocks for the requests of a generator, and hands out the tokens of the blocks that ran."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from turnwise.generate.blocks.engine import BlockEngine, Launched, Prefill, Start
from turnwise.generate.scheduler import SessionState, Span


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
    """What a block gave to one request: tokens, in order."""

    request: Request
    ids: list[int]
    logprobs: list[float]


class BlockDriver:
    """Keeps one block running ahead: the tokens of a block are read while the next one runs.

    A request leaves by itself when the device stops it, or early when `alive` says that nobody waits for it any more;
    its slot is then put to rest with the next block, and what the running block still draws for it is ignored.
    """

    def __init__(self, engine: BlockEngine, *, alive: Callable[[Request], bool]) -> None:
        self.engine = engine
        self._alive = alive
        self._live: dict[int, Request] = {}
        self._running: tuple[Launched, dict[int, Request]] | None = None

    @property
    def running(self) -> bool:
        """True while a block's tokens are still to be read."""
        return self._running is not None

    def step(self, waiting: Sequence[Request]) -> list[Outcome]:
        """Launches the next block, with `waiting` requests beginning in it, and returns the tokens of the one before.

        Requests that have sessions in slots are given once, when they begin.
        """
        rests: list[int] = []
        for slot, request in list(self._live.items()):
            if not self._alive(request):
                rests.append(slot)
                del self._live[slot]
        starts: list[Start] = []
        prefills: list[Prefill] = []
        for request in waiting:
            state = request.state
            assert state.slot is not None
            assert state.sampling is not None
            self._live[state.slot] = request
            temperature = state.sampling.temperature
            starts.append(Start(slot=state.slot, seed=state.seed, temperature=temperature, limit=request.limit))
            prefills.append(Prefill(slot=state.slot, start=state.cached, ids=state.ids[state.cached :], final=True))
            state.cached = len(state.ids)
            state.at = len(state.spans)
        before = self._running
        self._running = None
        if self._live:
            launched = self.engine.launch(starts=starts, prefills=prefills, rests=rests, truncation=self._truncation())
            self._running = (launched, dict(self._live))
        return [] if before is None else self._read(*before)

    def reset(self) -> list[Request]:
        """Forgets everything that runs; returns the requests that it was running for."""
        found = list(self._live.values())
        self._live = {}
        self._running = None
        return found

    def finish(self, request: Request) -> None:
        """Notes that a request is complete: its session holds all ids but the last in its slot."""
        state = request.state
        state.cached = len(state.ids) - 1
        state.spans = [Span(start=0, end=state.cached, decode=False)]
        state.at = 1

    def _read(self, launched: Launched, requests: dict[int, Request]) -> list[Outcome]:
        all_ids, all_logprobs = launched.tokens()
        columns, logprobs = all_ids.T.tolist(), all_logprobs.T.tolist()
        outcomes: list[Outcome] = []
        for slot, request in requests.items():
            if not self._alive(request):
                continue
            drawn = [(token, value) for token, value in zip(columns[slot], logprobs[slot], strict=True) if token >= 0]
            if drawn:
                ids, values = zip(*drawn, strict=True)
                outcomes.append(Outcome(request=request, ids=list(ids), logprobs=list(values)))
        return outcomes

    def _truncation(self) -> dict[int, tuple[int, float]]:
        found: dict[int, tuple[int, float]] = {}
        for slot, request in self._live.items():
            sampling = request.state.sampling
            if sampling is not None and (sampling.top_k or sampling.top_p < 1.0):
                found[slot] = (sampling.top_k, sampling.top_p)
        return found
