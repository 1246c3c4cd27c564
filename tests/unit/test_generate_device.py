"""The block engine beside a slow device: blocks in time, and event loops that take turns.

Time is counted and not measured, so that a busy machine changes nothing: launching a block takes
a moment, and where an event loop has nothing to do, the clock goes on to its next timer at once.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from itertools import pairwise
from typing import Any, TypeVar

import pytest
from test_generate_blocks import make, talk

from turnwise.generate.base import Sampling, Session
from turnwise.generate.blocks.launched import Launched
from turnwise.generate.blocks.runner import POLL_SECONDS
from turnwise.generate.hf import HFGenerator
from turnwise.procs.event_loop import EventLoop
from turnwise.types import Completion

T = TypeVar("T")


class Clock:
    """Takes the place of the module `time` where the generator reads it."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def new_loop(self) -> asyncio.AbstractEventLoop:
        return ClockLoop(self)

    def run(self, job: Coroutine[Any, Any, T]) -> T:
        """As asyncio.run."""
        with asyncio.Runner(loop_factory=self.new_loop) as runner:
            return runner.run(job)


class ClockSelector(selectors.SelectSelector):
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._of = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("the event loop would wait for ever: no timer is set")
        self._of.now += max(0.0, timeout)
        return super().select(0.0)


class ClockLoop(asyncio.SelectorEventLoop):
    """An event loop whose sleeping takes no time but on the clock."""

    def __init__(self, clock: Clock) -> None:
        self._of = clock
        super().__init__(ClockSelector(clock))

    def time(self) -> float:
        return self._of.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in ("blocks.driver", "blocks.runner"):
        monkeypatch.setattr(f"turnwise.generate.{module}.time", clock)
    monkeypatch.setattr(asyncio, "new_event_loop", clock.new_loop)
    return clock


class Late:
    """A block on a device that runs beside the host."""

    def __init__(self, clock: Clock, block: Launched, *, begin: float, seconds: float) -> None:
        self._clock = clock
        self._block = block
        self._end = begin + seconds
        self.seconds = (0.0, seconds)

    @property
    def done(self) -> bool:
        return self.remaining(0.0) == 0.0

    def remaining(self, step_seconds: float) -> float:
        return max(0.0, self._end - self._clock.now)

    def tokens(self) -> Any:
        assert self.done, "it was read while it ran: the host stood still"
        return self._block.tokens()


class Device:
    """Makes a generator's blocks take `seconds`, one after the other, and launching a moment."""

    def __init__(
        self,
        clock: Clock,
        generator: HFGenerator,
        *,
        seconds: float,
        launch_seconds: float = 0.001,
    ) -> None:
        assert generator._blocks is not None
        self._clock = clock
        self._seconds = seconds
        self._launch_seconds = launch_seconds
        self._blocks = generator._blocks
        self._launch = generator._blocks.engine.launch
        self._free_at = 0.0
        self.begun: list[list[int]] = []
        """Of each block, the slots whose requests begin in it."""
        self.idle: list[float] = []
        """How long it had nothing to do before each block for which somebody had been waiting."""
        generator._blocks.engine.launch = self.launch

    def launch(self, **arguments: Any) -> Late:
        self._clock.now += self._launch_seconds
        begin = max(self._clock.now, self._free_at)
        self.begun.append([start.slot for start in arguments["starts"]])
        if len(self.begun[-1]) < len(self._blocks._live):
            self.idle.append(begin - self._free_at)
        self._free_at = begin + self._seconds
        block = self._launch(**arguments)
        return Late(self._clock, block, begin=begin, seconds=self._seconds)


@pytest.mark.parametrize(("seconds", "launch_seconds"), [(0.02, 0.001), (0.012, 0.008)])
def test_a_slow_device_is_kept_busy_and_holds_nobody_up(
    clock: Clock,
    seconds: float,
    launch_seconds: float,
) -> None:
    expected_of, generator = make(), make()
    device = Device(clock, generator, seconds=seconds, launch_seconds=launch_seconds)
    rounds = 0

    async def others() -> None:
        nonlocal rounds
        while True:
            rounds += 1
            await asyncio.sleep(0.001)

    async def run(generator: HFGenerator) -> list[list[tuple[int, ...]]]:
        beside = asyncio.create_task(others())
        sampling = Sampling(max_tokens=23)
        jobs = (talk(generator, name, turns=3, sampling=sampling) for name in range(5))
        said = await asyncio.gather(*jobs)
        beside.cancel()
        return [[reply.ids for reply in replies] for replies in said]

    expected = clock.run(run(expected_of))
    # They end at different moments.
    assert len({len(ids) for replies in expected for ids in replies}) > 1
    began, rounds = clock.now, 0
    assert clock.run(run(generator)) == expected
    assert len(device.begun) > 10
    assert len(device.idle) > 0.9 * len(device.begun)
    assert max(device.idle) < 1.01 * POLL_SECONDS
    # Whenever no block was being launched, others had their turn: every millisecond.
    free = clock.now - began - launch_seconds * len(device.begun)
    assert rounds > 0.9 * free / 0.001


def test_whoever_asks_while_a_block_runs_is_in_the_next_one(clock: Clock) -> None:
    """Somebody else plays, for less time than a block takes: the next one is launched when the
    running one ends."""
    generator = make()
    device = Device(clock, generator, seconds=0.05)

    async def one(name: str, *, turns: int, tokens: int) -> None:
        for _ in range(turns):
            session = Session(key=name, seed=len(name))
            sampling = Sampling(max_tokens=tokens, temperature=0.0)
            await generator.generate(session, [1, 2, 3], sampling)
            await asyncio.sleep(0.01)

    async def both() -> None:
        await asyncio.gather(one("long", turns=1, tokens=90), one("short", turns=6, tokens=2))

    clock.run(both())
    turns = [number for number, slots in enumerate(device.begun) if 1 in slots]
    # A reply of two tokens is over with its block, is read while the next runs, and its answer is
    # in the one after.
    assert [later - earlier for earlier, later in pairwise(turns)] == [2] * 5


@pytest.mark.parametrize("wait", [0.0, 0.05])
def test_event_loops_take_turns_while_the_device_still_runs(clock: Clock, wait: float) -> None:
    """A rollout's loop stops with its last reply, when a block that nobody waits for may still run:
    training and evaluation have a loop each."""
    expected_of, generator = make(), make()
    Device(clock, generator, seconds=0.01)
    loops = (EventLoop(), EventLoop())
    sampling = Sampling(max_tokens=14)

    async def several(generator: HFGenerator, first: int) -> list[tuple[int, ...]]:
        async with asyncio.timeout(20):
            names = range(first, first + 3)
            jobs = (talk(generator, name, turns=2, sampling=sampling) for name in names)
            said = await asyncio.gather(*jobs)
        return [reply.ids for replies in said for reply in replies]

    left = 0
    for number in range(6):
        expected = clock.run(several(expected_of, number))
        assert loops[number % 2].run(several(generator, number)) == expected
        left += generator._blocks.running
        clock.now += wait
        generator.free_cache()  # as before an update
    assert left > 0, "no block was ever left running, so that nothing was tried"
    for loop in loops:
        loop.close()
    assert generator._driver.done()


def test_a_request_that_outlasts_its_loops_run_is_answered_when_the_loop_goes_on(
    clock: Clock,
) -> None:
    generator, expected_of = make(), make()
    Device(clock, generator, seconds=0.01)
    one, other = EventLoop(), EventLoop()
    long, short = Sampling(max_tokens=90, temperature=0.0), Sampling(max_tokens=3)
    begun: list[asyncio.Task[list[Completion]]] = []

    async def begin() -> None:
        begun.append(asyncio.create_task(talk(generator, 1, turns=1, sampling=long)))
        await asyncio.sleep(0.015)

    async def end() -> list[Completion]:
        async with asyncio.timeout(20):
            return await begun[0]

    one.run(begin())
    said = other.run(talk(generator, 2, turns=1, sampling=short))
    assert not begun[0].done()
    for name, sampling, replies in ((1, long, one.run(end())), (2, short, said)):
        expected = clock.run(talk(expected_of, name, turns=1, sampling=sampling))
        assert [reply.ids for reply in replies] == [reply.ids for reply in expected]
    for loop in (one, other):
        loop.close()
