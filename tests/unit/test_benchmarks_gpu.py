"""The GPU benchmarks run on the CPU with a tiny model: what they print elsewhere comes out of the
same code."""

import importlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import warm
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]


def run(script: str, folder: Path, *words: str, code: int = 0) -> dict[str, Any]:
    out = folder / "out.json"
    done = subprocess.run(
        [
            *warm.python(),
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
    assert done.returncode == code, done.stderr[-2000:]
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


def test_a_recipe_goes_through_its_stages(tmp_path: Path) -> None:
    words = ["--sizes", "0", "4", "8", "--tasks", "3", "--train-from", "4", "--train-steps", "1"]
    words += ["--turns", str(tmp_path / "lock"), "--algorithms", "gigpo", "bi_level_gae"]
    words += ["--critic-set", "train.critic_warmup=1"]  # GiGPO would refuse it
    found = run("stages.py", tmp_path, "--out", str(tmp_path / "out"), *words)
    stages = found["stages"]
    assert [row["stage"] for row in stages] == [
        *("demonstrations", "none", "imitation", "imitation"),
        *("imitation, then gigpo", "imitation, then bi_level_gae"),
    ]
    assert stages[0]["episodes"] == 8
    assert stages[3]["held_out_loss"][-1] < stages[3]["held_out_loss"][0]
    for row in stages[1:]:
        assert {name: played["tasks"] for name, played in row["held_out"].items()} == {
            "0.4": 3,
            "1": 3,
        }
    assert all(row["seconds"] for row in stages)
    assert all(sum(n for _, n in played["by_kind"].values()) == 3 for played in evaluated(found))
    assert sorted(found) == ["command", "machine", "stages"]


def evaluated(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [played for row in found["stages"] for played in row.get("held_out", {}).values()]


def test_stages_of_a_recipe_without_kinds_of_tasks(tmp_path: Path) -> None:
    pytest.importorskip("bm25s")
    pytest.importorskip("rapidfuzz")
    out = ["--out", str(tmp_path / "out"), "--recipe", "qwen_1_5b_webshop"]
    few = ["--sizes", "4", "--train-from", "4", "--temperatures", "1.0", "--set", "seed=3"]
    found = run("stages.py", tmp_path, *out, "--tasks", "2", *few)
    (played,) = evaluated(found)
    assert (played["tasks"], played["by_kind"]) == (2, {})
    assert played["reward"][1] <= played["reward"][0] <= played["reward"][2]


def stages_script() -> Any:
    sys.path.insert(0, str(ROOT / "benchmarks/gpu"))
    try:
        return importlib.import_module("stages")
    finally:
        sys.path.pop(0)


FEW = ["--tasks", "2", "--temperatures", "1.0", "--train-steps", "1"]


def test_training_goes_on_from_the_adapters_of_an_earlier_run(tmp_path: Path) -> None:
    first, kept = tmp_path / "first", tmp_path / "kept"
    lora = ["--lora", "2", "--sizes", "2", "--train-from", "4", "--set", "sft.lr=0.05"]
    run("stages.py", tmp_path, "--out", str(first), "--keep", str(kept), *lora, *FEW)
    adapters = [first / "adapter-4-s0", first / "adapter-gigpo-s0"]
    for folder in adapters:
        tensors = load_file(folder / "adapter_model.safetensors").values()
        assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}
    script = stages_script()
    assert sorted(path.name for path in kept.iterdir()) == ["imitated-2-s0", "imitated-4-s0"]
    base = script.tiny_folder(tmp_path / "base")
    merged = script.begin_with(base, adapters[:1], tmp_path / "merged")
    old, imitated, again = (
        load_file(folder / "model.safetensors") for folder in (base, kept / "imitated-4-s0", merged)
    )
    moved = {name for name in old if not torch.equal(old[name], imitated[name])}
    assert moved
    for name in moved:
        change = imitated[name] - old[name]
        assert (again[name] - imitated[name]).norm() < 0.01 * change.norm()
    begun = ["--start", *map(str, adapters), "--algorithms", "grpo"]
    (row,) = run("stages.py", tmp_path, "--out", str(tmp_path / "then"), *begun, *FEW)["stages"]
    assert row["start"] == list(map(str, adapters))
    assert row["steps"] == 1


def test_a_stage_that_fails_does_not_end_the_others(tmp_path: Path) -> None:
    words = ["--sizes", "--train-from", "4", "--algorithms", "gigpo", "bi_level_gae"]
    words += ["--set", "train.critic_warmup=1", *FEW]  # GiGPO has no critic
    found = run("stages.py", tmp_path, "--out", str(tmp_path / "out"), *words, code=1)
    failed, trained = found["stages"][-2:]
    assert "critic_warmup" in failed["failed"]
    assert trained["steps"] == 1


def test_as_many_demonstrations_are_made_as_a_size_asks_for(tmp_path: Path) -> None:
    """The expert of Sokoban fails in some rooms."""
    script = stages_script()
    plan = script.Plan(
        recipe="smollm2_sokoban_imitate",
        words=(),
        last=(),
        demonstrations=tmp_path / "demos.jsonl.gz",
        tasks=1,
        keep="success",
        temperatures=(1.0,),
        out=tmp_path,
        critic=(),
        model=tmp_path,
        scratch=tmp_path,
    )
    assert script.make_demonstrations(plan, 40)["episodes"] == 40


def test_what_would_waste_a_stretch_of_time_is_refused_at_its_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main = stages_script().main
    row = json.dumps({"messages": [{"role": "user", "content": "?"}]})
    (tmp_path / "demos.jsonl").write_text(f"{row}\n{row}\n")
    (tmp_path / "old" / "runs").mkdir(parents=True)
    few = ["--demonstrations", str(tmp_path / "demos.jsonl"), "--tasks", "2", "--device", "cpu"]
    new = ["--out", str(tmp_path / "new"), "--tiny"]
    for words, said in (
        ([*new, "--sizes", "3", *few], "has 2 demonstrations, and 3 are asked for"),
        (["--out", str(tmp_path / "old"), "--tiny", "--sizes", "0"], "has runs already"),
        ([*new, "--start", str(tmp_path), "--train-steps", "1"], "neither a model nor an adapter"),
    ):
        with pytest.raises(SystemExit):
            main(words)
        assert said in capsys.readouterr().err


def test_a_rollout_is_taken_apart(tmp_path: Path) -> None:
    few = ["rollout.train.env_groups=2", "rollout.train.group_size=2", "rollout.slots=2"]
    words = ["--recipe", "smollm2_countdown", "--repeats", "1", "--every-ms", "0.5"]
    found = run("turn_profile.py", tmp_path, *words, "--set", *few)
    (row,) = found["rollouts"]
    assert (row["episodes"], row["turns"]) == (4, 4)
    assert 2 <= row["blocks_with_prompts"] <= row["blocks"]
    parts = ("prefill_seconds", "decode_seconds", "idle_seconds")
    assert sum(row[part] for part in parts) == pytest.approx(row["seconds"])
    assert any(look["ours"].startswith("generate/blocks/") for look in found["looks"])


def test_runs_that_share_a_gpu_compute_in_turn(tmp_path: Path) -> None:
    """Each step reads a file, waits and writes the next number: two at once would lose one."""
    code = """
import sys, time
from pathlib import Path
from turns import Turns
folder = Path(sys.argv[1])
turns = Turns(folder / "lock", folder / f"{sys.argv[2]}.jsonl")
counted = folder / "counted"
for _ in range(20):
    turns.begin()
    number = int(counted.read_text())
    time.sleep(0.005)
    counted.write_text(str(number + 1))
    turns.end_step()
"""
    (tmp_path / "counted").write_text("0")
    path = {**os.environ, "PYTHONPATH": str(ROOT / "benchmarks/gpu")}
    line = [sys.executable, "-c", code, str(tmp_path)]
    both = [subprocess.Popen([*line, name], env=path) for name in ("one", "two")]
    assert [process.wait() for process in both] == [0, 0]
    assert (tmp_path / "counted").read_text() == "40"
    rows = [json.loads(row) for row in (tmp_path / "one.jsonl").read_text().splitlines()]
    assert len(rows) == 20
    assert all(row["seconds"] >= 0.005 and row["waited"] >= 0 for row in rows)


def test_an_arm_is_measured_and_taken_up_again(tmp_path: Path) -> None:
    line = [*warm.python(), "benchmarks/gpu/verl_step.py", "--tiny", "--out", str(tmp_path)]
    done = subprocess.run(
        [*line, "--arms", "native"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads((tmp_path / "native.json").read_text())
    assert (found["code"], found["resumed"], len(found["seconds"])) == (0, True, 1)
    assert "| native | bi_level_gae |" in (tmp_path / "table.md").read_text()


def test_every_game_of_a_file_is_held_out_and_endless_ones_are_counted(tmp_path: Path) -> None:
    held_out_plans = stages_script().held_out_plans
    from turnwise.config import run_config
    from turnwise.envs.games.alfworld.games import save_games
    from turnwise.envs.games.alfworld.generate import GameMaker
    from turnwise.envs.games.alfworld.rooms import sample_plans

    frozen = run_config("frozen_lake", [])
    with pytest.raises(ValueError, match="--tasks N"):
        held_out_plans(frozen, None)
    plans, kinds = held_out_plans(frozen, 3)
    assert [plan.task.id for plan in plans] == [f"frozen_lake/val/{n}" for n in range(3)]
    assert kinds == {}
    maker = GameMaker(sample_plans())
    splits = ["train", "valid_unseen", "train", "valid_unseen", "valid_seen"]
    games = [replace(maker.make(n, split="train"), split=s) for n, s in enumerate(splits)]
    save_games(tmp_path / "games.jsonl", games=games)
    words = [f"env.options.games={tmp_path / 'games.jsonl'}"]
    plans, kinds = held_out_plans(run_config("qwen_1_5b_alfworld", words), None)
    assert [kinds[plan.task.id] for plan in plans] == [games[n].task_type for n in (1, 3, 4)]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["scripted", "model"])
def test_the_endpoint_is_compared_with_the_same_environment(tmp_path: Path, engine: str) -> None:
    from turnwise.testing.tiny import tiny_model, tiny_tokenizer

    words = ["--episodes", "4", "--turns", "2", "--workers", "1"]
    if engine == "model":
        tiny_model("qwen2").save_pretrained(tmp_path)
        tiny_tokenizer().save_pretrained(tmp_path)
        words += ["--model", str(tmp_path), "--device", "cpu", "--tokens", "4"]
    done = subprocess.run(
        [*warm.python(), "benchmarks/endpoint.py", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [line.split(maxsplit=1) for line in done.stdout.splitlines()]
    assert [name for name, _ in rows] == ["environment", "plain", "with_openai"]
    assert all(json.loads(figures)["share_of_environment"] > 0 for _, figures in rows[1:])
