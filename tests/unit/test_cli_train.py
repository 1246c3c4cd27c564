"""`turnwise train` and what stands on a finished run, with a model that trains in seconds."""

import json
import subprocess
from pathlib import Path

import pytest
import warm

SMALL = [
    "bandit",
    "train.steps=2",
    "rollout.train.env_groups=4",
    "rollout.train.group_size=4",
    "rollout.max_response_tokens=24",
    "eval.episodes=8",
    "model.embedded.warmstart_episodes=64",
    "model.embedded.hidden_size=16",
    "model.embedded.num_layers=1",
    "env.format.think=false",
]


def turnwise(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*warm.turnwise(), *words], cwd=cwd, capture_output=True, text=True)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("train")
    done = turnwise("train", *SMALL, "log.name=small", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "evaluation before training" in done.stdout
    assert "step 2/2" in done.stdout
    assert "the run is in runs/small" in done.stdout
    return folder / "runs" / "small"


def test_a_run_leaves_what_the_docs_say(run: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "run-directory.md").read_text()
    for name in (
        "config.yaml", "metrics.jsonl", "timings.jsonl", "episodes/step_000001.jsonl", "episodes/eval_000000.jsonl",
        "timings/step_000002.jsonl", "ledger.jsonl", "pieces.json", "summary.json", "report.html", "checkpoints",
        "initial_model",
    ):  # fmt: skip
        assert (run / name).exists(), name
        assert name.split("/")[0] in page
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert {row["step"] for row in rows} == {0, 1, 2}


def test_every_metric_of_a_run_is_defined(run: Path) -> None:
    import re

    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    defined = [
        re.compile(re.sub(r"<\w+>", "[^/]+", name) + "$")
        for name in re.findall(r"^\| `([^`]+)`", text, re.M)
    ]
    names: set[str] = set()
    for file in ("metrics.jsonl", "timings.jsonl"):
        for line in (run / file).read_text().splitlines():
            names |= json.loads(line).keys() - {"step", "not_finite"}
    assert (
        sorted(name for name in names if not any(pattern.match(name) for pattern in defined)) == []
    )


def test_the_run_can_be_evaluated_replayed_and_diagnosed(run: Path) -> None:
    done = turnwise(
        "eval", str(run), "--against", "before", "--episodes", "8", "--json", cwd=run.parent
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["result"]["player"] == "small"
    assert found["comparison"]["tasks"] == 8
    done = turnwise("replay", str(run / "episodes" / "step_000002.jsonl"), cwd=run.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "16 of 16" in done.stdout
    done = turnwise("doctor", str(run), cwd=run.parent)
    assert done.returncode in (0, 1), done.stderr
    assert "2 steps" in done.stdout
    assert "embedded" in done.stdout


@pytest.mark.slow
def test_resume_goes_on_and_refuses_another_config(run: Path) -> None:
    done = turnwise("train", "--resume", str(run), "train.steps=3", cwd=run.parent)
    assert done.returncode == 0, done.stderr
    assert "step 3/3" in done.stdout
    done = turnwise("train", "--resume", str(run), "seed=7", cwd=run.parent)
    assert done.returncode == 2
    assert "seed" in done.stderr
    assert turnwise("train", "bandit", "--resume", str(run), cwd=run.parent).returncode == 2


def test_dry_run_prints_the_config_and_leaves_nothing(tmp_path: Path) -> None:
    import yaml

    done = turnwise(
        "train", "bandit", "--train.steps", "7", "--backend", "trl", "--dry-run", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    shown = yaml.safe_load(done.stdout)
    assert (shown["train"]["steps"], shown["backend"], shown["env"]["name"]) == (7, "trl", "bandit")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_estimate_speaks_of_the_whole_run_and_leaves_nothing(tmp_path: Path) -> None:
    done = turnwise("train", *SMALL, "train.steps=500", "--estimate", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "for 500 steps" in done.stdout
    assert "GiB of memory" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "bandits"], "did you mean bandit"),
        (["train", "--resume", "nowhere"], "not a run directory"),
        (["train", "bandit", "env.name=nothing_like_it"], "cannot be loaded"),
        (["train", "env.name=qwen_1_5b_alfworld"], "it is a recipe: give it as the config"),
        (["train", "bandit", "--backend", "trl", "--estimate"], "needs the native backend"),
        (["train", "bandit", "train.stepz=3"], "steps"),
    ],
)
def test_mistakes(words: list[str], message: str, tmp_path: Path) -> None:
    done = turnwise(*words, cwd=tmp_path)
    assert done.returncode == 2, done.stdout
    assert message in done.stderr
    assert "Traceback" not in done.stderr
