"""Forked commands behave as started ones: arguments, folder, environment, input and output, status,
signals."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import warm

SHOW = """
import os, sys
print(sys.argv, os.getcwd(), os.environ.get("MINE"), sys.path[0], __name__, sys.stdin.read())
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("status", [0, 3])
def test_it_is_what_python_would_be(status: int, tmp_path: Path) -> None:
    (tmp_path / "show.py").write_text(SHOW)
    forked, said = warm.python(), list[str]()
    env = {**os.environ, "MINE": "1"}
    for words in (["show.py"], ["-c", SHOW], ["-m", "show"]):
        both = [
            subprocess.run(
                [*python, *words, str(status)],
                cwd=tmp_path,
                env=env,
                input="typed",
                capture_output=True,
                text=True,
            )
            for python in ([sys.executable], forked)
        ]
        assert [done.returncode for done in both] == [status] * 2, both
        said += [done.stdout.replace(str(tmp_path / "show.py"), "show.py") for done in both]
    assert said[::2] == said[1::2]


def test_errors_and_commands_end_as_usual() -> None:
    failed = subprocess.run([*warm.python(), "-c", "1 / 0"], capture_output=True, text=True)
    assert (failed.returncode, "ZeroDivisionError" in failed.stderr) == (1, True)
    wrong = subprocess.run([*warm.turnwise(), "trian"], capture_output=True, text=True)
    assert (wrong.returncode, "No such command 'trian'" in wrong.stderr) == (2, True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signals_end_the_forked_process_too(number: signal.Signals) -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(1000)"
    process = subprocess.Popen(
        [*warm.python(), "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    forked = int(process.stdout.readline())
    assert forked != process.pid
    process.send_signal(number)
    process.communicate()
    assert process.returncode == -number
    while psutil.pid_exists(forked):  # the server has yet to wait for it
        time.sleep(0.05)
