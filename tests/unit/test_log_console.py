"""The console: plain lines into a pipe, live progress in a terminal, a summary that says before,
after and where."""

import io
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from turnwise.config.schema import Config, TrainConfig
from turnwise.log.console import ConsoleSink, sparkline
from turnwise.log.events import Evaluated, Notice, RunEnded, RunStarted, StepDone

BEFORE = Evaluated(
    step=0, label="before", episodes=256, success=(0.10, 0.14, 0.19), reward=(0.0, 0.1, 0.2)
)
AFTER = Evaluated(
    step=3, label="after", episodes=256, success=(0.60, 0.66, 0.72), reward=(0.5, 0.6, 0.7)
)


def show(sink: ConsoleSink) -> None:
    sink.handle(
        RunStarted(
            path=Path("runs/lake"),
            config=Config(train=TrainConfig(steps=3)),
            facts={"device": "cpu"},
        )
    )
    sink.handle(BEFORE)
    for step in (1, 2, 3):
        numbers = {
            "rollout/success": step / 4,
            "rollout/reward": -0.5,
            "time/generated_tokens_per_second": 200.0,
        }
        sink.handle(StepDone(step=step, metrics=numbers))
    sink.handle(Notice(kind="fallback", message="[red]no environment[/red]"))
    sink.handle(AFTER)
    sink.handle(RunEnded(path=Path("runs/lake"), seconds=63.0, before=BEFORE, after=AFTER))
    sink.close()


def test_plain_lines_into_a_pipe() -> None:
    out = io.StringIO()
    show(ConsoleSink(out))
    text = out.getvalue()
    assert "step 3/3  success 75.0 %  reward -0.500  200 tokens/s  0 s left" in text
    assert "WARNING (fallback): [red]no environment[/red]" in text
    assert "14.0 % [10.0 %, 19.0 %]" in text
    assert "66.0 % [60.0 %, 72.0 %]" in text
    assert "done after 1 min 3 s; the run is in runs/lake" in text
    assert "\x1b" not in text


def test_lines_are_not_printed_for_every_quick_step() -> None:
    out = io.StringIO()
    sink = ConsoleSink(out)
    sink.handle(RunStarted(path=Path("r"), config=Config(train=TrainConfig(steps=500))))
    for step in range(1, 501):
        sink.handle(StepDone(step=step, metrics={"rollout/reward": 0.0}))
    assert out.getvalue().count("step ") < 20
    assert "step 500/500" in out.getvalue()


def test_live_progress_in_a_terminal_and_the_cursor_comes_back() -> None:
    leader, follower = pty.openpty()
    code = "import test_log_console as t; t.show(t.ConsoleSink())"
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=Path(__file__).parent, stdout=follower, stderr=subprocess.PIPE,
        env={**os.environ, "TERM": "xterm"},
    )  # fmt: skip
    os.close(follower)
    seen = b""
    while True:
        try:
            part = os.read(leader, 65536)
        except OSError:  # the terminal is gone with its last user
            break
        if not part:
            break
        seen += part
    _, errors = process.communicate()
    os.close(leader)
    assert process.returncode == 0, errors
    assert b"\x1b[?25l" in seen
    assert seen.rfind(b"\x1b[?25h") > seen.rfind(b"\x1b[?25l")
    assert "the run is in runs/lake" in seen.decode()


def test_a_run_that_stops_early_is_not_called_done() -> None:
    out = io.StringIO()
    sink = ConsoleSink(out)
    sink.handle(RunStarted(path=Path("r"), config=Config(train=TrainConfig(steps=5))))
    sink.handle(StepDone(step=1, metrics={}))
    sink.handle(RunEnded(path=Path("r"), seconds=1.0))
    assert "stopped after 1 s" in out.getvalue()


@pytest.mark.parametrize("values", [[1.0], [2.0] * 7, [float(i) for i in range(1000)]])
def test_sparklines_of_any_length(values: list[float]) -> None:
    assert 1 <= len(sparkline(values)) <= 50


def test_the_table_at_the_end_fits_eighty_columns() -> None:
    out = io.StringIO()
    worst = Evaluated(
        step=0, label="baseline", episodes=256, success=(0.9, 1.0, 1.0), reward=(-0.5, -0.4, -0.3),
        player="best blind player",
    )  # fmt: skip
    sink = ConsoleSink(out)
    sink.handle(
        RunEnded(path=Path("r"), seconds=1.0, before=BEFORE, after=AFTER, baselines=(worst,))
    )
    assert "best blind player" in out.getvalue()
    assert "-0.400 [-0.500, -0.300]" in out.getvalue()
