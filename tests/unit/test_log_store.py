"""The run directory: one writer, nothing torn, cut back to a checkpoint, equal to the byte between
equal runs."""

import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from turnwise.config.schema import Config, LogConfig
from turnwise.log.store import (
    CreditRow,
    RunDirectory,
    RunDirectoryError,
    RunReader,
    ledger_entry,
    read_lines,
)
from turnwise.types import Completion, Episode, Message, Status, Task, Turn


def episode(name: str = "step0/g0/m0", *, reward: float = 1.0, seconds: float = 0.25) -> Episode:
    turn = Turn(
        prompt_ids=(1, 2),
        completion=Completion(ids=(7, 2), logprobs=(-1.0, -0.5), finish_reason="stop"),
        text="up",
        restart=True,
        reward=reward,
        info={"success": reward > 0},
        generate_seconds=seconds,
        env_seconds=seconds / 2,
        generate_start=1e9 + 4 * seconds,
        env_start=1e9 + 5 * seconds,
    )
    prompt = (Message(role="user", content="go"),)
    return Episode(
        id=name,
        task=Task(id="t", seed=1),
        group_id=0,
        index=0,
        tag="x",
        seed=1,
        noise_seed=2,
        prompt=prompt,
        turns=(turn,),
        status=Status.COMPLETED,
        reset_start=1e9 + 2 * seconds,
        reset_seconds=seconds,
    )


def new_run(tmp_path: Path, name: str | None = "run") -> RunDirectory:
    return RunDirectory.create(LogConfig(dir=str(tmp_path), name=name), Config(seed=3))


@pytest.mark.parametrize("name", ["metrics.jsonl", "ledger.jsonl"])
def test_a_pipe_in_the_place_of_a_file_is_refused(tmp_path: Path, name: str) -> None:
    with new_run(tmp_path) as run:
        path = run.path
    (path / name).unlink()
    os.mkfifo(path / name)
    with pytest.raises(RunDirectoryError, match=f"{name} is a pipe"):
        RunDirectory.open(path)


def write_step(run: RunDirectory, step: int, *, seconds: float = 0.25) -> None:
    run.write_episodes(step, [episode(f"step{step}/g0/m0", seconds=seconds)])
    run.write_credit(
        step, [CreditRow(episode_id="e", sample=0, turn_ids=(0, 0), advantages=(0.1, 0.2))]
    )
    run.write_ledger(ledger_entry(step, [((7, 2), (7, 2))]))
    run.write_metrics(step, {"rollout/reward": step / 3, "time/step": seconds})


def contents(path: Path, *, timed: bool = False) -> dict[str, bytes]:
    names = [p for p in path.rglob("*") if p.is_file() and p.name not in ("lock", "events.jsonl")]
    return {
        str(p.relative_to(path)): p.read_bytes() for p in names if timed or "timings" not in str(p)
    }


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    with new_run(tmp_path) as run:
        write_step(run, 0)
        run.write_event("fallback", "no environment", step=0, reason="missing")
        run.write_summary({"seconds": 0.5, "gap": math.inf})
        run.write_pieces(lambda token: f"<{token}>")
    reader = RunReader(tmp_path / "run")
    assert reader.config == Config(seed=3)
    assert reader.metrics() == [{"step": 0, "rollout/reward": 0.0}]
    assert reader.timings() == [{"step": 0, "time/step": 0.25}]
    assert reader.episodes(0) == [episode("step0/g0/m0")]
    assert reader.credit(0)[0].advantages == (0.1, 0.2)
    assert reader.ledger()[0].broken == 0
    assert reader.events()[0]["reason"] == "missing"
    assert reader.summary() == {"seconds": 0.5, "gap": None}
    assert reader.pieces() == {2: "<2>", 7: "<7>"}


@pytest.mark.parametrize("text", ["{: [garbage", "rollout: 5", "unknown: 1"])
def test_a_config_that_cannot_be_read_is_an_error_that_says_so(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(
        RunDirectoryError, match=r"is not a run directory: the config has 1 problem"
    ):
        assert RunReader(tmp_path).config


def test_no_clock_in_what_must_be_equal(tmp_path: Path) -> None:
    for name, seconds in (("a", 0.25), ("b", 0.75)):
        with new_run(tmp_path, name) as run:
            write_step(run, 0, seconds=seconds)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert contents(tmp_path / "a", timed=True) != contents(tmp_path / "b", timed=True)


def test_starts_count_from_the_first_episode_of_the_step(tmp_path: Path) -> None:
    first, late = episode("first", seconds=0.25), episode("late", seconds=0.5)
    old = replace(episode("old"), turns=(replace(late.turns[0], env_start=None),))
    with new_run(tmp_path) as run:
        run.write_episodes(1, [first, late, old])
        text = (run.path / "episodes" / "step_000001.jsonl").read_text()
        assert 'start"' not in text.replace("restart", "")
        assert "reset_seconds" not in text
        lines = (run.path / "timings" / "step_000001.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines[1:]] == [
            {
                "id": "late",
                "generate": [0.5],
                "env": [0.25],
                "reset_start": 0.5,
                "reset": 0.5,
                "generate_start": [1.5],
                "env_start": [2.0],
            },
            {"id": "old", "generate": [0.5], "env": [0.25]},
        ]
        again = run.episodes(1)
    assert [(one.reset_start, one.reset_seconds) for one in again] == [
        (0.0, 0.25),
        (0.5, 0.5),
        (None, 0.0),
    ]
    turns = [one.turns[0] for one in again]
    assert [(turn.generate_start, turn.env_start) for turn in turns] == [
        (0.5, 0.75),
        (1.5, 2.0),
        (None, None),
    ]


@pytest.mark.parametrize("starts", [[], [0.5, 0.6], ["soon"], [None]])
def test_starts_of_other_turns_are_refused(tmp_path: Path, starts: list[object]) -> None:
    with new_run(tmp_path) as run:
        run.write_episodes(1, [episode()])
    file = tmp_path / "run" / "timings" / "step_000001.jsonl"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"env_start": starts}) + "\n")
    with pytest.raises(RunDirectoryError, match="timings"):
        RunReader(tmp_path / "run").episodes(1)


def test_not_finite_is_null_with_a_note(tmp_path: Path) -> None:
    with new_run(tmp_path) as run:
        run.write_metrics(0, {"train/loss": math.nan, "train/kl": 0.5})
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    assert row == {
        "step": 0,
        "train/loss": None,
        "train/kl": 0.5,
        "not_finite": {"train/loss": "nan"},
    }
    assert RunReader(tmp_path / "run").curve("train/loss") == ([], [])


@pytest.mark.parametrize("by_step", [False, True])
def test_resume_cuts_what_came_after_the_checkpoint(tmp_path: Path, by_step: bool) -> None:
    with new_run(tmp_path, "straight") as run:
        for step in range(4):
            write_step(run, step)
    with new_run(tmp_path, "killed") as run:
        write_step(run, 0)
        write_step(run, 1)
        positions = run.positions()
        write_step(run, 2)
        run.write_episodes(3, [episode("half of step 3")])
    with RunDirectory.open(tmp_path / "killed") as run:
        run.truncate_to(1 if by_step else positions)
        assert run.steps() == [0, 1]
        for step in (2, 3):
            write_step(run, step)
    assert contents(tmp_path / "killed", timed=True) == contents(tmp_path / "straight", timed=True)


def test_a_file_shorter_than_the_checkpoint_is_refused(tmp_path: Path) -> None:
    with new_run(tmp_path) as run:
        write_step(run, 0)
        positions = run.positions()
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    with (
        RunDirectory.open(tmp_path / "run") as run,
        pytest.raises(RunDirectoryError, match="edited or lost"),
    ):
        run.truncate_to(positions)


def test_torn_last_line_is_ignored_and_then_cut(tmp_path: Path) -> None:
    with new_run(tmp_path) as run:
        write_step(run, 0)
    path = tmp_path / "run" / "metrics.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"step": 1, "rollout/rew')
    assert len(RunReader(tmp_path / "run").metrics()) == 1
    RunDirectory.open(tmp_path / "run").close()
    assert path.read_bytes() == whole


def test_a_broken_line_in_the_middle_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"a": 1}\n{"b"\n{"c": 2}\n')
    with pytest.raises(RunDirectoryError, match="line 2"):
        read_lines(tmp_path / "x.jsonl", lambda row: row)


HOLD = """
import os, sys
from turnwise.config.schema import Config, LogConfig
from turnwise.log.store import RunDirectory
run = RunDirectory.create(LogConfig(dir=sys.argv[1], name="run"), Config())
if os.fork() == 0:  # a worker that outlives its parent
    print("held", flush=True); os.close(1); sys.stdin.read(); os._exit(0)
sys.stdin.read()
"""


def test_one_writer_and_the_lock_dies_with_it(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(RunDirectoryError, match=f"in use by process {process.pid}"):
            RunDirectory.open(tmp_path / "run")
        RunReader(tmp_path / "run").metrics()  # reading is always allowed
        process.send_signal(signal.SIGKILL)
        process.wait()
        RunDirectory.open(tmp_path / "run").close()
    finally:
        process.kill()
        process.communicate()


def test_a_run_never_writes_over_another(tmp_path: Path) -> None:
    new_run(tmp_path).close()
    with pytest.raises(RunDirectoryError, match="--resume"):
        new_run(tmp_path)
    names = []
    for _ in range(2):
        with RunDirectory.create(
            LogConfig(dir=str(tmp_path)), Config(), default_name="lake"
        ) as run:
            names.append(run.path.name)
    assert names == ["lake", "lake-2"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_full_disk_says_so(tmp_path: Path) -> None:
    new_run(tmp_path).close()
    path = tmp_path / "run" / "metrics.jsonl"
    path.unlink()
    path.symlink_to("/dev/full")
    with (
        RunDirectory.open(tmp_path / "run") as run,
        pytest.raises(RunDirectoryError, match=r"no room left.*--resume"),
    ):
        run.write_metrics(0, {"a": 1.0})


def test_not_a_run_directory(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match=r"config\.yaml"):
        RunReader(tmp_path)
    with pytest.raises(RunDirectoryError, match="no run directory"):
        RunDirectory.open(tmp_path / "none")


def test_entropies_are_stored_with_the_credit_and_old_runs_have_none(tmp_path: Path) -> None:
    row = CreditRow(
        episode_id="e",
        sample=0,
        turn_ids=(0, 0),
        advantages=(0.1, 0.2),
        entropies=(1.23456789, math.nan),
    )
    with new_run(tmp_path) as run:
        run.write_credit(1, [row])
        (found,) = run.credit(1)
        assert found.entropies[0] == 1.23457
        assert math.isnan(found.entropies[1])
        old = row.to_json()
        del old["entropies"]
        (run.path / "credit" / "step_000002.jsonl").write_text(json.dumps(old) + "\n")
        assert run.credit(2) == [replace(row, entropies=())]


def test_credit_lengths_must_agree() -> None:
    row = CreditRow(episode_id="e", sample=0, turn_ids=(0, 0), advantages=(1.0, 2.0))
    with pytest.raises(ValueError, match="one entry per token"):
        replace(row, values=(1.0,))
