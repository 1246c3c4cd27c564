"""Signals to a run whose environments are in worker processes and have processes of their own: it
ends and leaves nothing behind, or goes on as if nothing had been."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "learning"))

from kill_runs import contents
from small_runs import TINY, small_config

from turnwise.config import show_config
from turnwise.config.schema import Config


def config_for(folder: Path, *, steps: int) -> Config:
    return small_config(
        folder,
        env={"name": f"{Path(__file__).with_name('served_env.py')}:Served", "options": {}},
        rollout={"isolation": "process", "num_workers": 2},
        train={"steps": steps, "max_turn": 1},
        eval={"episodes": 4},
        checkpoint={"every": 1, "keep": 2},
        log={"dir": str(folder), "name": "run", "report": False},
        model={"embedded": TINY | {"warmstart_episodes": 32}},
    )


def start(folder: Path, *, steps: int) -> "subprocess.Popen[bytes]":
    """A run as a user starts it, in a group of its own as a shell gives it one."""
    file = folder / "config.yaml"
    file.write_text(show_config(config_for(folder, steps=steps)))
    command = [sys.executable, "-m", "turnwise", "train", str(file)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, process_group=0, env=env)


def wait_for(condition: Callable[[], bool], seconds: float = 600.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def trained(folder: Path) -> int:
    """Steps that are written, by all runs of the folder."""
    return sum(path.read_bytes().count(b"\n") for path in folder.glob("*/metrics.jsonl"))


def gone(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE  # nobody asked how it ended
    except psutil.NoSuchProcess:
        return True


def family_of(pid: int) -> list[psutil.Process]:
    """Workers, their guards, and what environments started."""
    found = psutil.Process(pid).children(recursive=True)
    assert len(found) >= 4
    return found


@pytest.mark.parametrize(
    "signals", [(signal.SIGTERM,), (signal.SIGINT, signal.SIGINT), (signal.SIGKILL,)]
)
def test_a_run_that_is_ended_leaves_no_process(
    tmp_path: Path, signals: tuple[signal.Signals, ...]
) -> None:
    run = start(tmp_path, steps=100_000)
    family: list[psutil.Process] = []
    try:
        assert wait_for(lambda: trained(tmp_path) >= 2 or run.poll() is not None)
        family = family_of(run.pid)
        for number in signals:
            os.killpg(run.pid, number)  # as Ctrl-C in a terminal does
            time.sleep(0.2)
        run.wait(600)
        assert wait_for(lambda: all(gone(process) for process in family))
    finally:
        for process in (run, *family):
            if not (isinstance(process, psutil.Process) and gone(process)):
                process.kill()
        run.wait()


def test_a_run_that_was_stopped_goes_on_to_the_same_result(tmp_path: Path) -> None:
    run = start(tmp_path, steps=4)
    family: list[psutil.Process] = []
    try:
        assert wait_for(lambda: trained(tmp_path) >= 1 or run.poll() is not None)
        run.send_signal(signal.SIGSTOP)
        if run.poll() is None:
            family = psutil.Process(run.pid).children(recursive=True)
        time.sleep(1.0)
        run.send_signal(signal.SIGCONT)
        assert run.wait(600) == 0
    finally:
        run.kill()
        run.wait()
    assert wait_for(lambda: all(gone(process) for process in family))
    other = tmp_path / "other"
    other.mkdir()
    assert start(other, steps=4).wait(600) == 0
    assert contents(tmp_path / "run") == contents(other / "run")


def test_a_sweep_that_is_ended_stops_its_run(tmp_path: Path) -> None:
    config = config_for(tmp_path, steps=100_000)
    file = tmp_path / "config.yaml"
    file.write_text(show_config(config))
    command = [sys.executable, "-m", "turnwise", "sweep", str(file), "--dir", str(tmp_path / "all")]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    sweep = subprocess.Popen(command, stdout=subprocess.DEVNULL, process_group=0, env=env)
    runs = tmp_path / "all"
    family: list[psutil.Process] = []
    try:
        assert wait_for(lambda: trained(runs) >= 2 or sweep.poll() is not None)
        family = family_of(sweep.pid)
        sweep.terminate()
        assert sweep.wait(600) == 128 + signal.SIGTERM
        assert wait_for(lambda: all(gone(process) for process in family))
    finally:
        for process in (sweep, *family):
            if not (isinstance(process, psutil.Process) and gone(process)):
                process.kill()
        sweep.wait()
    assert [path.name for path in runs.glob("*/summary.json")] == ["summary.json"]
    assert len(list(runs.iterdir())) == 1, "the next run was started"
