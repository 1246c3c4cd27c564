"""No process outlives the run that started it: neither a worker, nor what an environment or a tool
started in one."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from turnwise.config.schema import EnvConfig, RolloutConfig
from turnwise.envs.base import BaseEnv, EnvError
from turnwise.envs.tools.worker import Worker
from turnwise.evaluate.check_env import check_beside
from turnwise.isolation.pools import open_pool
from turnwise.procs.event_loop import EventLoop
from turnwise.types import Message, Task

SELF = Path(__file__)
TASK = Task(id="t", seed=1)


def start_helpers(marks: str) -> None:
    """A child, one in a session of its own, and one whose parent has ended already. Each leaves its
    process id."""
    sleep = [sys.executable, "-c", "import time; time.sleep(1000)"]
    first, second = subprocess.Popen(sleep), subprocess.Popen(sleep, start_new_session=True)
    code = f"import subprocess; print(subprocess.Popen({sleep!r}, stdout=-3).pid)"
    third = subprocess.check_output([sys.executable, "-c", code], text=True)
    for pid in (first.pid, second.pid, int(third)):
        (Path(marks) / str(pid)).touch()


class Helped(BaseEnv):
    """Starts processes at its first reset, as an environment with a game server does, and never
    ends them."""

    actions = ("hang", "die", "leave")

    def __init__(self, marks: str) -> None:
        self._marks, self._started = marks, False

    def reset(self, seed: int | None = None, **kwargs: Any) -> str:
        if not self._started:
            start_helpers(self._marks)
            self._started = True
        return "Choose."

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        if action == "hang":
            time.sleep(1000)
        if action == "die":
            os._exit(3)
        return "Left.", 1.0, True, {}


def call_with_helpers(marks: str) -> None:
    start_helpers(marks)
    time.sleep(1000)


def alive(marks: Path) -> list[int]:
    """Those of the three that are still there."""
    pids = [int(path.name) for path in marks.iterdir()]
    return [pid for pid in pids if psutil.pid_exists(pid) and not is_zombie(pid)]


def is_zombie(pid: int) -> bool:
    """Dead, and nobody has asked how it ended: process 1 of some containers never does."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


def wait_for(condition: Callable[[], bool], seconds: float = 600.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


@pytest.fixture
def marks(tmp_path: Path) -> Iterator[Path]:
    """Where helpers leave their ids. None of them outlives the test, whatever happens."""
    folder = tmp_path / "marks"
    folder.mkdir()
    yield folder
    for pid in alive(folder):
        os.kill(pid, signal.SIGKILL)


def helped(marks: Path) -> EnvConfig:
    return EnvConfig(name=f"{SELF}:Helped", options={"marks": str(marks)})


def reply(action: str) -> Message:
    return Message(role="assistant", content=f"<think></think><answer>{action}</answer>")


@pytest.mark.parametrize("action", ["hang", "die", "leave"])
def test_a_worker_takes_what_its_environment_started_with_it(marks: Path, action: str) -> None:
    rollout = RolloutConfig(isolation="process", num_workers=1, step_timeout=0.5)
    loop = EventLoop()
    pool = open_pool({"e": helped(marks)}, rollout)
    handle = pool.open("e")

    async def play() -> None:
        await handle.reset(TASK, 0)
        assert len(alive(marks)) == 3
        if action == "leave":
            await handle.step(reply(action))
            await handle.close()
            await pool.close()
        else:
            with pytest.raises(
                EnvError, match=r"took longer than 0.5 s|died during step \(exit 3\)"
            ):
                await handle.step(reply(action))

    loop.run(play())
    assert alive(marks) == []
    loop.run(pool.close())
    loop.close()
    assert len(list(marks.iterdir())) == 3


def test_measuring_and_checking_leave_nothing(marks: Path) -> None:
    pool = open_pool({"e": helped(marks)}, RolloutConfig(step_timeout=1.0))
    EventLoop().run(pool.close())
    assert alive(marks) == []
    measured = len(list(marks.iterdir()))
    assert measured >= 3
    limits = RolloutConfig(step_timeout=1.0, reset_timeout=60.0)
    check_beside(f"{SELF}:Helped", seeds=1, config=helped(marks), limits=limits)
    assert alive(marks) == []
    assert len(list(marks.iterdir())) > measured


def test_a_tool_that_takes_too_long_takes_what_it_started_with_it(marks: Path) -> None:
    worker = Worker(f"{SELF.stem}:call_with_helpers")
    sys.path.insert(0, str(SELF.parent))  # the worker inherits it
    try:
        with pytest.raises(TimeoutError):
            worker.call(str(marks), timeout=8.0)
    finally:
        sys.path.remove(str(SELF.parent))
    assert len(list(marks.iterdir())) == 3
    assert alive(marks) == []


IN_A_WORKER = """
import asyncio, sys
from turnwise.config.schema import EnvConfig, RolloutConfig
from turnwise.isolation.processes import ProcessPool
from turnwise.types import Message, Task
env = EnvConfig(name=sys.argv[2] + ":Helped", options={"marks": sys.argv[1]})
async def main():
    pool = ProcessPool({"e": env}, RolloutConfig(num_workers=1, step_timeout=600))
    handle = pool.open("e")
    await handle.reset(Task(id="t", seed=1), 0)
    await handle.step(Message(role="assistant", content="<think></think><answer>hang</answer>"))
asyncio.run(main())
"""
IN_A_TOOL = """
import sys, os
sys.path.insert(0, os.path.dirname(sys.argv[2]))
from turnwise.envs.tools.worker import Worker
Worker("test_orphans:call_with_helpers").call(sys.argv[1], timeout=600)
"""


@pytest.mark.parametrize("code", [IN_A_WORKER, IN_A_TOOL], ids=["environment", "tool"])
def test_nothing_outlives_a_run_that_was_killed(marks: Path, code: str) -> None:
    run = subprocess.Popen([sys.executable, "-c", code, str(marks), str(SELF)])
    try:
        assert wait_for(lambda: len(list(marks.iterdir())) == 3)
        family = [child.pid for child in psutil.Process(run.pid).children(recursive=True)]
        assert len(family) >= 4
    finally:
        run.kill()
        run.wait()
    assert wait_for(lambda: all(is_zombie(pid) for pid in family))
    assert alive(marks) == []


def test_the_python_tool_ends_with_its_run(tmp_path: Path) -> None:
    """Its code sleeps, so neither its processor time nor a closed pipe would end it."""
    code = (
        "import sys\n"
        "from turnwise.envs.tools.python_tool import PythonLimits, run_python\n"
        "run_python('import time; time.sleep(1000)', limits=PythonLimits(seconds=1000),"
        " confinement=sys.argv[1])\n"
    )
    for confinement in ("auto", "python"):
        run = subprocess.Popen([sys.executable, "-c", code, confinement])
        try:
            # The launcher, the first process behind it and the one with the code.
            assert wait_for(lambda run=run: len(psutil.Process(run.pid).children(True)) == 3)
            family = [child.pid for child in psutil.Process(run.pid).children(recursive=True)]
        finally:
            run.kill()
            run.wait()
        assert wait_for(lambda family=family: all(is_zombie(pid) for pid in family)), confinement
