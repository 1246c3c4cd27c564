"""SIGKILL at any moment: a run that is resumed ends with the same bytes as one never killed."""

import multiprocessing
import os
import random
import signal
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from kill_runs import config_for, contents, run_to_the_end

STEPS = config_for(Path()).train.steps
MILESTONES = (*(f"step_{step:06d}" for step in range(STEPS + 1)), "summary.json")
"""What a run puts in its place by renaming it, in this order: checkpoints, then the summary."""
USES = 60
"""How often the files of a run are used between two milestones, about."""
USES_OF_A_CHECKPOINT = 25
server = multiprocessing.get_context("forkserver")
server.set_forkserver_preload(["turnwise.train.run"])  # torch is imported once, not at every kill


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """When a run is killed: by what it has done, not by a clock, as machines are slow or quick."""

    milestone: int
    """The one before is in its place, this one is not."""
    uses: int
    """How often a file of the run was used since, or, with `inside`, one of the next checkpoint."""
    inside: bool
    """While a checkpoint lies half-written beside the others."""


def run_until(folder: str, moment: Moment, told: Connection) -> None:
    """Goes on with the run and tells when it is at the moment. Inside a checkpoint it waits there
    to be killed. Elsewhere it works on, so that the kill falls anywhere, and waits where it would
    put the milestone in its place."""
    run = os.path.join(folder, "run", "")
    before, milestone = ("", *MILESTONES)[moment.milestone : moment.milestone + 2]
    begun, uses = not before, 0

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        """Is called before every use of a file."""
        nonlocal begun, uses
        if not event.startswith(("open", "os.", "shutil.")):
            return
        paths = [os.fspath(one) for one in arguments if isinstance(one, str | Path)]
        if not paths or not paths[0].startswith(run):
            return
        placed = os.path.basename(paths[-1]) if event == "os.rename" else None
        begun = begun or placed == before
        written = event == "open" and milestone.replace("step", ".writing") in paths[0]
        uses += written if moment.inside else begun
        if uses > moment.uses or placed == milestone:
            told.send_bytes(b"here")
            while moment.inside or placed == milestone:
                time.sleep(60.0)

    sys.addaudithook(watch)
    run_to_the_end(folder)


def kill_at(moment: Moment, folder: Path) -> bool:
    """True where the run came to the moment, and ended by being killed."""
    reader, told = server.Pipe(duplex=False)
    process = server.Process(target=run_until, args=(str(folder), moment, told))
    process.start()
    told.close()
    try:
        reader.recv_bytes()
    except EOFError:
        process.join()
        return False  # it ended before
    process.kill()
    process.join()
    return process.exitcode == -signal.SIGKILL


def finish(folder: Path) -> dict[str, bytes]:
    process = server.Process(target=run_to_the_end, args=(str(folder),))
    process.start()
    process.join()
    assert process.exitcode == 0
    return contents(folder / "run")


@pytest.fixture(scope="module")
def never_killed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return finish(tmp_path_factory.mktemp("whole"))


def moments(rng: random.Random, *, kills: int) -> list[Moment]:
    """One after the other, each before a milestone of its own; every third inside a checkpoint."""
    found: list[Moment] = []
    for number, milestone in enumerate(sorted(rng.sample(range(len(MILESTONES)), kills))):
        inside = number % 3 == 0 and milestone <= STEPS
        uses = rng.randrange(USES_OF_A_CHECKPOINT if inside else USES)
        found.append(Moment(milestone=milestone, uses=uses, inside=inside))
    return found


def check(folder: Path, whole: dict[str, bytes], *, kills: int, rng: random.Random) -> None:
    done = inside = 0
    for moment in moments(rng, kills=kills):
        done += kill_at(moment, folder)
        inside += any((folder / "run").glob("checkpoints/.writing_*"))
    assert done == kills
    assert inside >= 1, "no kill fell into a checkpoint write"
    found = finish(folder)
    assert sorted(found) == sorted(whole)
    assert [name for name in whole if found[name] != whole[name]] == []


def test_a_few_kills_change_nothing(tmp_path: Path, never_killed: dict[str, bytes]) -> None:
    check(tmp_path, never_killed, kills=4, rng=random.Random(0))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(5))
def test_twenty_kills_change_nothing(
    tmp_path: Path,
    never_killed: dict[str, bytes],
    seed: int,
) -> None:
    check(tmp_path, never_killed, kills=4, rng=random.Random(seed + 1))
