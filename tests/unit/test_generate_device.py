"""The block engine beside a device that takes its time: blocks in time, and event loops that take turns."""

import asyncio
import time
from itertools import pairwise

import pytest
from test_generate_blocks import make, talk

from turnwise.generate.base import Sampling, Session
from turnwise.generate.blocks.launched import Launched
from turnwise.generate.hf import HFGenerator
from turnwise.procs.event_loop import EventLoop
from turnwise.types import Completion


class Late:
    """A block on a device that runs beside the host, and takes its time."""

    def __init__(self, block: Launched, *, seconds: float, after: "Late | None" = None) -> None:
        self._block = block
        self._end = max(time.perf_counter(), after._end if after else 0.0) + seconds
        self.seconds = (0.0, seconds)

    @property
    def done(self) -> bool:
        return time.perf_counter() >= self._end

    def remaining(self, step_seconds: float) -> float:
        return max(0.0, self._end - time.perf_counter())

    def tokens(self):
        assert self.done, "it was read while it ran: the host stood still"
        return self._block.tokens()


def test_a_slow_device_is_kept_busy_and_holds_nobody_up() -> None:
    expected_of, generator = make(), make()
    launch, launched = generator._blocks.engine.launch, []

    def late(**arguments) -> Late:
        # On time: the one before has not ended, or there was nothing that could have been launched.
        on_time = not launched or not launched[-1].done or len(arguments["starts"]) == len(generator._blocks._live)
        launched.append(Late(launch(**arguments), seconds=0.02))
        launched[-1].on_time = on_time
        return launched[-1]

    generator._blocks.engine.launch = late
    rounds = 0

    async def others() -> None:
        nonlocal rounds
        while True:
            rounds += 1
            await asyncio.sleep(0.001)

    async def run(generator: HFGenerator) -> list[list[Completion]]:
        beside = asyncio.create_task(others())
        sampling = Sampling(max_tokens=23)
        said = await asyncio.gather(*(talk(generator, name, turns=3, sampling=sampling) for name in range(5)))
        beside.cancel()
        return said

    expected = asyncio.run(run(expected_of))
    assert len({len(reply.ids) for replies in expected for reply in replies}) > 1  # they end at different moments
    rounds = 0
    said = asyncio.run(run(generator))
    assert [[reply.ids for reply in replies] for replies in said] == [[r.ids for r in replies] for replies in expected]
    assert len(launched) > 10
    assert rounds > 2 * len(launched)  # others had their turn several times while a block ran
    assert sum(block.on_time for block in launched) >= 0.6 * len(launched)


def test_whoever_asks_while_a_block_runs_is_in_the_next_one() -> None:
    """Somebody else plays, for less time than a block takes: the next one is launched when the running one ends."""
    generator = make()
    launch, launched, starts = generator._blocks.engine.launch, [], []

    def late(**arguments) -> Late:
        starts.append([start.slot for start in arguments["starts"]])
        launched.append(Late(launch(**arguments), seconds=0.05, after=launched[-1] if launched else None))
        return launched[-1]

    generator._blocks.engine.launch = late

    async def one(name: str, *, turns: int, tokens: int) -> None:
        for _ in range(turns):
            session = Session(key=name, seed=len(name))
            await generator.generate(session, [1, 2, 3], Sampling(max_tokens=tokens, temperature=0.0))
            await asyncio.sleep(0.01)

    async def both() -> None:
        await asyncio.gather(one("long", turns=1, tokens=90), one("short", turns=6, tokens=2))

    asyncio.run(both())
    turns = [number for number, slots in enumerate(starts) if 1 in slots]
    # A reply of two tokens is over with its block, is read while the next runs, and its answer is in the one after.
    assert len(turns) == 6
    assert [later - earlier for earlier, later in pairwise(turns)].count(2) >= 3


@pytest.mark.parametrize("wait", [0.0, 0.05])
def test_event_loops_take_turns_while_the_device_still_runs(wait: float) -> None:
    """A rollout's loop stops with its last reply, when a block that nobody waits for may still run: training and
    evaluation have a loop each."""
    expected_of, generator = make(), make()
    launch = generator._blocks.engine.launch
    generator._blocks.engine.launch = lambda **arguments: Late(launch(**arguments), seconds=0.01)
    loops = (EventLoop(), EventLoop())
    sampling = Sampling(max_tokens=14)

    async def several(generator: HFGenerator, first: int) -> list[tuple[int, ...]]:
        async with asyncio.timeout(20):
            names = range(first, first + 3)
            said = await asyncio.gather(*(talk(generator, name, turns=2, sampling=sampling) for name in names))
        return [reply.ids for replies in said for reply in replies]

    left = 0
    for number in range(6):
        expected = asyncio.run(several(expected_of, number))
        assert loops[number % 2].run(several(generator, number)) == expected
        left += generator._blocks.running
        time.sleep(wait)
        generator.free_cache()  # as before an update
    assert left > 0, "no block was ever left running, so that nothing was tried"
    for loop in loops:
        loop.close()
    assert generator._driver.done()


def test_a_request_that_outlasts_its_loops_run_is_answered_when_the_loop_goes_on() -> None:
    generator, expected_of = make(), make()
    launch = generator._blocks.engine.launch
    generator._blocks.engine.launch = lambda **arguments: Late(launch(**arguments), seconds=0.01)
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
        expected = asyncio.run(talk(expected_of, name, turns=1, sampling=sampling))
        assert [reply.ids for reply in replies] == [reply.ids for reply in expected]
    for loop in (one, other):
        loop.close()
