"""What tests of the verl backend share: a tiny model on disk, a config, and runs in a process of
their own."""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnwise.config.load import load_config
from turnwise.config.schema import Config
from turnwise.log.store import RunReader

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 600
"""Limit of one run. Two steps take half a minute to a minute where nobody else uses the machine."""


def tiny_folder(folder: Path) -> Path:
    """A directory with a random model of two layers and its tokenizer."""
    from turnwise.testing.tiny import tiny_model, tiny_tokenizer

    path = folder / "tiny"
    if not path.is_dir():
        tiny_model("qwen2", hidden_size=64).save_pretrained(path)
        tiny_tokenizer().save_pretrained(path)
    return path


def tiny_config(folder: Path, *overrides: str) -> Config:
    """Two steps of three turns on the walking game, 2 groups of 2, nothing evaluated or saved."""
    tree: dict[str, Any] = {
        "backend": "verl",
        "model": {"path": str(tiny_folder(folder))},
        "env": {"name": "simple_game", "max_turn": 3, "format": {"think": False}},
        "rollout": {
            "train": {"env_groups": 2, "group_size": 2},
            "max_response_tokens": 8,
            "max_context": 768,
            "isolation": "inline",
        },
        "train": {"steps": 2, "lr": 1e-3, "critic_lr": 1e-3, "device": "cpu"},
        "eval": {"before": False, "after": False, "episodes": 4},
        "checkpoint": {"every": 1000},
        "log": {"dir": str(folder / "runs"), "name": "run", "report": False},
    }
    return load_config(tree, list(overrides))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run in its own process came to."""

    code: int
    text: str
    """Everything it printed."""
    seconds: float


def run_python(
    code: str, *arguments: str, seconds: int = SECONDS, environment: dict[str, str] | None = None
) -> Outcome:
    """Runs Python code in a process of its own, killed with all its children when the time is
    up."""
    started = time.perf_counter()
    environ = os.environ | {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "integrations")]),
        "PYTHONUNBUFFERED": "1",
        # Ray gives its workers niceness 15: beside other work they would hardly run.
        "RAY_worker_niceness": "0",
        **(environment or {}),
    }
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environ,
        cwd=ROOT,
        start_new_session=True,
    )
    try:
        text, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        text, _ = process.communicate()
        raise AssertionError(
            f"the run hung for {seconds} s; its last words:\n{text[-3000:]}"
        ) from None
    return Outcome(code=process.returncode, text=text, seconds=time.perf_counter() - started)


TRAIN = """
import json, sys
from pathlib import Path
from turnwise.config.schema import Config
from turnwise.integrations.verl.trainer.run import train
config = Config.model_validate(json.loads(Path(sys.argv[1]).read_text()))
options = json.loads(sys.argv[2])
if "resume" in options:
    options["resume"] = Path(options["resume"])
print("RUN", train(config, **options))
"""


def train_apart(
    folder: Path,
    config: Config,
    *,
    seconds: int = SECONDS,
    environment: dict[str, str] | None = None,
    **options: Any,
) -> Outcome:
    """`run.train` in a process of its own."""
    path = folder / "given.json"
    path.write_text(config.model_dump_json())
    return run_python(
        TRAIN, str(path), json.dumps(options), seconds=seconds, environment=environment
    )


def trained(folder: Path, config: Config, **options: Any) -> tuple[RunReader, Outcome]:
    """The run directory of a run that must succeed."""
    outcome = train_apart(folder, config, **options)
    assert outcome.code == 0, outcome.text[-4000:]
    return RunReader(folder / "runs" / "run"), outcome


def check_two_steps(
    run: RunReader, config: Config, *, seconds: float, tokenizer: Any, gap: float
) -> None:
    """What an engine of verl's sampled over two steps with stop strings is what was trained on, and
    at step 2 it sampled with the weights of step 1's update."""
    from turnwise.envs.registry import make_env
    from turnwise.generate.stops import StopChecker, end_ids
    from turnwise.rollout.plan import plan_rollout

    ends = StopChecker(tokenizer, ids=end_ids(tokenizer, None), strings=config.rollout.stop)
    rows = [row for row in run.metrics() if "rollout/reward" in row]
    print(f"{seconds:.0f} s; largest gaps {[row['train/gap_max'] for row in rows]}")
    assert len(rows) == 2
    for row in rows:
        assert row["training/rollout_actor_probs_pearson_corr"] > 0.999
        assert row["train/gap_max"] < gap
        assert row["actor/grad_norm"] > 1e-3
        assert row["rollout/failures"] == 0
    assert rows[0]["actor/entropy"] != rows[1]["actor/entropy"]
    for step, entry in enumerate(run.ledger()):
        episodes = run.episodes(step)
        assert entry.broken == 0
        assert entry.sampled == entry.trained > 0
        plans = plan_rollout(
            config, split="train", step=step, probes={"simple_game": make_env(config.env)}
        )
        assert [episode.task for episode in episodes] == [plan.task for plan in plans]
        turns = [turn for episode in episodes for turn in episode.turns]
        assert len(turns) == 12
        assert all(len(turn.completion.logprobs) == len(turn.completion.ids) for turn in turns)
        assert all(logprob < 0 for turn in turns for logprob in turn.completion.logprobs)
        assert {turn.completion.policy_version for turn in turns} == {step}
        for turn in turns:  # the token that completes a stop string is kept, and is the last
            ids = turn.completion.ids
            assert not any(ends.reached(ids[:length]) for length in range(1, len(ids)))
            assert ends.reached(ids) == (turn.completion.finish_reason == "stop")
            assert len(ids) == 8 or ends.reached(ids)
        assert any(turn.completion.finish_reason == "stop" for turn in turns)
