"""SIGKILL at any moment: a run that is resumed ends with the weights, metrics and episodes of one never killed."""

import multiprocessing
import random
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from kill_runs import config_for, contents, run_to_the_end

server = multiprocessing.get_context("forkserver")
server.set_forkserver_preload(["kill_runs"])  # torch is imported once, not once per kill


def start(folder: Path) -> BaseProcess:
    process = server.Process(target=run_to_the_end, args=(str(folder),))
    process.start()
    return process


def kill_after(process: BaseProcess, seconds: float) -> bool:
    """True where the process was still running when it was killed."""
    process.join(seconds)
    alive = process.is_alive()
    process.kill()
    process.join()
    return alive


def kill_inside_a_checkpoint_write(process: BaseProcess, run: Path) -> bool:
    """True where the process was killed while a checkpoint lay half-written beside the others."""
    while process.is_alive():
        if any(run.glob("checkpoints/.writing_*")):
            process.kill()
            process.join()
            return any(run.glob("checkpoints/.writing_*"))
        time.sleep(0.0002)
    return False


@pytest.fixture(scope="module")
def never_killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, bytes], float]:
    folder = tmp_path_factory.mktemp("whole")
    process = start(folder)
    while not (folder / config_for(folder).log.name / "metrics.jsonl").exists():
        time.sleep(0.01)
        assert process.is_alive()
    started = time.perf_counter()
    process.join()
    assert process.exitcode == 0
    return contents(folder / "run"), time.perf_counter() - started


def check(folder: Path, whole: dict[str, bytes], seconds: float, *, kills: int, rng: random.Random) -> None:
    run = folder / "run"
    done = inside = 0
    for attempt in range(20 * kills):
        if done == kills:
            break
        process = start(folder)
        if attempt % 3 == 0:
            hit = kill_inside_a_checkpoint_write(process, run)
            inside += hit
        else:
            hit = kill_after(process, rng.uniform(0.0, seconds))
        done += hit
        if not hit:
            break  # it came to its end before the moment was there
    process = start(folder)
    process.join()
    assert process.exitcode == 0
    assert inside >= 1, "no kill fell into a checkpoint write"
    found = contents(run)
    assert sorted(found) == sorted(whole)
    assert [name for name in whole if found[name] != whole[name]] == []


def test_a_few_kills_change_nothing(tmp_path: Path, never_killed: tuple[dict[str, bytes], float]) -> None:
    check(tmp_path, *never_killed, kills=4, rng=random.Random(0))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(5))
def test_twenty_kills_change_nothing(tmp_path: Path, never_killed: tuple[dict[str, bytes], float], seed: int) -> None:
    check(tmp_path, *never_killed, kills=4, rng=random.Random(seed + 1))
