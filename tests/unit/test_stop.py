"""Ctrl-C, SIGTERM and the time limit: a checkpoint, a report, the command to go on, and a resume
that is equal to the run that nobody stopped."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from turnwise.cli.main import main
from turnwise.procs.stop import Stopped, StopRequest

ENV = """
import os, signal
from pathlib import Path
from turnwise import BaseEnv

class Coin(BaseEnv):
    instruction = "Call the coin."
    actions = ("heads", "tails")

    def reset(self, seed=None, **kwargs):
        self.side = self.actions[(seed or 0) % 2]
        plan = Path("stop_at")  # "number of the reset, signal": sent from within a rollout
        if plan.is_file():
            calls = Path("calls")
            count = int(calls.read_text()) + 1 if calls.is_file() else 1
            calls.write_text(str(count))
            at, name = plan.read_text().split()
            if count == int(at):
                plan.unlink()
                os.kill(os.getpid(), getattr(signal, name))
        return f"A bird says {self.side}."

    def step(self, action):
        won = action == self.side
        return f"It was {self.side}.", float(won), True, {"success": won}
"""
WORDS = [
    *("train", "--env.name", "coin.py:Coin", "train.steps=4", "log.name=run", "eval.every=2"),
    *("model.embedded.warmstart_episodes=64", "rollout.train={env_groups: 4, group_size: 2}"),
    *("eval.episodes=8", "rollout.isolation=inline", "train.mini_batches=1", "train.epochs=1"),
    *("model.embedded.hidden_size=24", "model.embedded.num_layers=1"),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("coin.py").write_text(ENV)
    return tmp_path


def run(*words: str) -> int | str | None:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    return ended.value.code


def traces(path: Path) -> dict[str, bytes]:
    """Everything that two equal runs have alike, to the byte."""
    files = [*path.glob("episodes/*"), *path.glob("credit/*"), path / "metrics.jsonl"]
    files += [path / "ledger.jsonl", *path.glob("checkpoints/step_000004/model/*.safetensors")]
    files += path.glob("checkpoints/step_000004/trainer.safetensors")
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nobody stops."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "coin.py").write_text(ENV)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert run(*WORDS) == 0
    return folder / "runs/run"


# Resets: 64 of the warm start, then 8 of every evaluation and of every step. After the first one in
# which no episode ended come 8 of the random player: does the environment report success at all?
@pytest.mark.parametrize(
    ("at", "name", "status", "steps"),
    [
        (70, "SIGINT", 130, 0),  # in the evaluation before training
        (93, "SIGTERM", 143, 1),  # in the second step's rollout
        (100, "SIGINT", 130, 2),  # in the evaluation after the second step
        (123, "SIGTERM", 143, 4),  # in the evaluation after training
    ],
)
def test_stopped_and_resumed_is_equal_to_never_stopped(
    folder: Path,
    whole: Path,
    capfd: pytest.CaptureFixture[str],
    at: int,
    name: str,
    status: int,
    steps: int,
) -> None:
    Path("stop_at").write_text(f"{at} {name}")
    assert run(*WORDS, "log.dir=cut") == status
    said = capfd.readouterr()
    assert not Path("stop_at").exists(), "the signal was sent"
    assert "A second Ctrl-C ends at once" in said.err
    assert "resume with: turnwise train --resume cut/run" in said.out
    assert f"cut/run/checkpoints/step_{steps:06d}" in said.out
    assert (folder / "cut/run/report.html").is_file()
    assert json.loads((folder / "cut/run/summary.json").read_text())["steps"] == steps
    assert run("train", "--resume", "cut/run") == 0
    assert traces(folder / "cut/run") == traces(whole)


def test_an_interrupted_warm_start_has_written_nothing(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("stop_at").write_text("10 SIGINT")
    assert run(*WORDS) == 130
    assert capfd.readouterr().err.endswith("nothing was written yet: start it again\n")
    assert list(Path("runs").iterdir()) == []


def test_a_second_signal_names_the_run(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    Path("twice.py").write_text(
        "import signal, turnwise\n\n\nclass Twice(turnwise.Callback):\n"
        "    def on_step(self, step, metrics):\n"
        "        signal.raise_signal(signal.SIGINT)\n        signal.raise_signal(signal.SIGINT)\n"
    )
    assert run(*WORDS, "log.callbacks=[twice.py:Twice]") == 130
    assert "with: turnwise train --resume runs/run\n" in capfd.readouterr().err


def test_ctrl_c_during_the_first_imports_ends_quietly(folder: Path) -> None:
    program = (
        "import runpy, signal, sys\n\n\nclass Interrupts:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'pydantic':\n            signal.raise_signal(signal.SIGINT)\n\n\n"
        "sys.meta_path.insert(0, Interrupts())\n"
        "runpy.run_module('turnwise', run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_time_limit_stops_with_a_checkpoint(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(*WORDS, "train.time_limit=1e-6") == 124
    assert "stopped by the time limit after step 0" in capfd.readouterr().out
    assert (folder / "runs/run/checkpoints/step_000000/manifest.json").is_file()


def test_without_checkpoints_a_stop_says_that_nothing_can_go_on(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(*WORDS, "train.time_limit=1e-6", "checkpoint.write=false") == 124
    assert "checkpoint.write is false" in capfd.readouterr().out


def test_other_backends_refuse_the_time_limit_by_name() -> None:
    from turnwise.config import run_config

    config = run_config("frozen_lake_grpo", ["train.time_limit=5"])
    trl = pytest.importorskip("turnwise.integrations.trl.mapping")
    with pytest.raises(ValueError, match=r"train.time_limit = 5.* backend trl"):
        trl.refuse(config)


def test_a_second_signal_ends_at_once() -> None:
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.reason == "Ctrl-C"
        with pytest.raises(KeyboardInterrupt) as ended:
            signal.raise_signal(signal.SIGINT)
    assert not isinstance(ended.value, Stopped)


def test_discardable_work_ends_at_once_and_other_work_does_not() -> None:
    with StopRequest() as stop:
        with pytest.raises(Stopped), stop.discardable():
            signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Stopped), stop.discardable():
            pytest.fail("what was asked before counts on entry")


def test_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with StopRequest(seconds=60):
        assert signal.getsignal(signal.SIGINT) != before[0]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_the_time_limit_wakes_a_main_thread_that_waits() -> None:
    with StopRequest(seconds=0.05) as stop, pytest.raises(Stopped), stop.discardable():
        threading.Event().wait(60)


def test_outside_the_main_thread_the_time_limit_is_a_flag() -> None:
    found: list[str | None] = []

    def work() -> None:
        with StopRequest(seconds=0.01) as stop:
            while stop.reason is None:
                time.sleep(0.01)
            found.append(stop.reason)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert found == ["the time limit"]


def test_sigterm_to_a_real_process(folder: Path) -> None:
    words = [*WORDS, "train.steps=100000", "eval.every=0"]
    program = "import sys; from turnwise.cli.main import main; main(sys.argv[1:])"
    process = subprocess.Popen(
        [sys.executable, "-c", program, *words], stdout=subprocess.PIPE, text=True, env=os.environ
    )
    metrics = folder / "runs/run/metrics.jsonl"
    while process.poll() is None and not (metrics.is_file() and '"step": 2' in metrics.read_text()):
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 143
    assert "resume with: turnwise train --resume runs/run" in out


def test_trl_ends_after_its_step_with_a_checkpoint(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("trl")
    words = [word for word in WORDS if not word.startswith("eval.every")]
    words += ["--backend", "trl", "algo.name=grpo", "eval.before=false", "eval.after=false"]
    Path("stop_at").write_text("75 SIGTERM")  # 64 of the warm start, then 8 of every step
    assert run(*words) == 143
    said = capfd.readouterr()
    assert "stopped by SIGTERM after step 2" in said.out
    assert "resume with: turnwise train --resume runs/run" in said.out
    assert run("train", "--resume", "runs/run") == 0
    assert json.loads((folder / "runs/run/summary.json").read_text())["steps"] == 4
