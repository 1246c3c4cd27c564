"""The GPU benchmarks run on the CPU with a tiny model: what they print elsewhere comes out of the
same code."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def run(script: str, folder: Path, *words: str) -> dict[str, Any]:
    out = folder / "out.json"
    done = subprocess.run(
        [
            sys.executable,
            f"benchmarks/gpu/{script}",
            "--device",
            "cpu",
            "--tiny",
            "--json",
            str(out),
            *words,
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(out.read_text())


def test_the_training_step_is_compared_on_equal_gradients(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    found = run("train_step.py", tmp_path, "--packing", "true")
    assert found["gradient_difference"] < 1e-5
    assert [row["engine"] for row in found["rows"]] == [
        "turnwise float32, layers plain",
        "trl, float32 weights",
    ]
    assert all(row["tokens_per_second"] > 0 for row in found["rows"])


def test_scaling_prefills_each_turn_once(tmp_path: Path) -> None:
    found = run("scaling.py", tmp_path)
    one, two = found["by_turns"]
    assert two["prefilled_tokens_per_turn"] < one["prefilled_tokens_per_turn"], (
        "the second turn prefills less"
    )
    assert found["by_slots"][0]["turns_played"] == 16


def test_log_probs_are_compared_on_equal_gradients(tmp_path: Path) -> None:
    found = run("logprobs.py", tmp_path)
    assert [row["engine"] for row in found["rows"]] == [
        "turnwise, entropy included",
        "plain logits",
    ]
    assert all(
        row["gradient_difference"] < 1e-5 and row["milliseconds"] > 0 for row in found["rows"]
    )


def test_alfworld_goes_through_its_stages(tmp_path: Path) -> None:
    words = ["--sizes", "0", "4", "8", "--tasks", "3", "--train-from", "4", "--train-steps", "1"]
    found = run("alfworld_stages.py", tmp_path, "--out", str(tmp_path / "out"), *words)
    stages = found["stages"]
    assert [row["stage"] for row in stages] == [
        *("demonstrations", "none", "imitation", "imitation", "imitation, then gigpo")
    ]
    assert stages[0]["episodes"] == 8
    assert stages[3]["held_out_loss"][-1] < stages[3]["held_out_loss"][0]
    for row in stages[1:]:
        assert {name: played["games"] for name, played in row["held_out"].items()} == {
            "0.4": 3,
            "1": 3,
        }
    assert all(row["seconds"] for row in stages)
    assert sorted(found) == ["command", "machine", "stages"]
