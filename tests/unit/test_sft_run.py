"""Runs of imitation: it learns, leaves a run directory, is resumed exactly, with adapters too, and
goes on to training."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import warm
from learn_parts import parrot_config

from turnwise.config import show_config
from turnwise.config.schema import Config, ModelConfig
from turnwise.evaluate.evaluation import EvalResult
from turnwise.inspect.report import write_report
from turnwise.log.callbacks import Callback
from turnwise.log.store import RunReader
from turnwise.models.policy import load_model
from turnwise.testing.tiny import tiny_model, tiny_tokenizer
from turnwise.train.checkpoint import CheckpointError, check_files, list_checkpoints
from turnwise.train.demonstrations import load, rows_of
from turnwise.train.run import RunResult, estimate, train
from turnwise.types import Episode

HERE = Path(__file__).parent


def small(folder: Path, *, steps: int = 0, **sections: Any) -> Config:
    """Six optimizer steps on 24 demonstrations, then `steps` of training."""
    sft = {"source": ["expert"], "episodes": 24, "epochs": 2, "lr": 0.01, "batch_tokens": 512}
    base: dict[str, Any] = {
        "sft": {**sft, "held_out": 0.2},
        "train": {"steps": steps, "lr": 1e-3, "critic_lr": 1e-3},
        "rollout": {
            "train": {"env_groups": 4, "group_size": 2},
            "max_response_tokens": 4,
            "max_context": 128,
            "slots": 8,
        },
        "eval": {"episodes": 4, "baselines": False},
        "log": {"dir": str(folder), "name": "run", "report": False},
        "checkpoint": {"every": 1},
    }
    for key, value in sections.items():
        base[key] = {**base.get(key, {}), **value}
    return parrot_config(**base)


def contents(run: Path) -> dict[str, bytes]:
    """Everything that must be equal to the byte, the first stage included."""
    names = ("metrics.jsonl", "ledger.jsonl", "demonstrations.jsonl")
    files = [path for name in names for path in run.rglob(name)]
    files += [*run.rglob("episodes/*.jsonl"), *run.rglob("credit/*.jsonl")]
    for folder in (run, run / "imitation"):
        saved = list_checkpoints(folder / "checkpoints")
        files += list(saved[-1].rglob("*.safetensors")) if saved else []
    return {path.relative_to(run).as_posix(): path.read_bytes() for path in files}


def differing(one: Path, other: Path) -> list[str]:
    """Names of the files that are not equal to the byte."""
    a, b = contents(one), contents(other)
    assert sorted(a) == sorted(b)
    return [name for name in a if a[name] != b[name]]


class At(Callback):
    """Does something once, after a step."""

    def __init__(self, step: int, what: Any) -> None:
        self._step, self._what = step, what

    def on_step(self, step: int, metrics: Any) -> None:
        if step == self._step and "sft/loss" in metrics:
            self._step = -1
            self._what()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nobody stops."""
    return train(small(tmp_path_factory.mktemp("whole")), sinks=()).path


def test_it_learns(tmp_path: Path) -> None:
    config = small(
        tmp_path,
        sft={"episodes": 200, "epochs": 3, "lr": 0.01, "held_out": 0.1},
        eval={"episodes": 64},
        rollout={"slots": 64},
        checkpoint={"every": 0},
    )
    result = train(config, sinks=())
    rows = result.metrics()
    measured = [
        (row["sft/held_out_loss"], row["sft/token_accuracy"])
        for row in rows
        if row.get("sft/token_accuracy")
    ]
    assert len(measured) == 1 + 3, "before, and after every epoch"
    assert measured[0][1] < 0.8
    assert measured[-1][1] > 0.97
    assert measured[-1][0] < 0.2 * measured[0][0]
    assert result.before.success is None or result.before.success[1] < 0.5
    assert result.after.success[1] > 0.85
    assert result.after.reward[0] > result.before.reward[2]


def test_a_run_leaves_what_a_training_run_leaves(whole: Path) -> None:
    run = RunReader(whole)
    rows = run.metrics()
    first, last = rows[0], rows[-1]
    assert first["sft/steps"] == last["step"] == len(run.ledger())
    assert first["sft/episodes"] + first["sft/held_out_episodes"] == 24
    assert first["sft/held_out_episodes"] == 5
    assert {"sft/loss", "sft/lr", "sft/grad_norm", "sft/tokens", "sft/epoch"} <= set(last)
    tokens = [row["sft/tokens"] for row in rows[1:]]
    assert sum(tokens) == 2 * first["sft/epoch_tokens"]
    summary = run.summary()
    assert summary["sft"]["sft/token_accuracy"] == last["sft/token_accuracy"]
    assert summary["before"]["episodes"] == summary["after"]["episodes"] == 4
    assert run.config.train.steps == 0
    page = write_report(run).read_text(encoding="utf-8")
    assert "sft/held_out_loss" in page
    demonstrations = load(whole / "demonstrations.jsonl")
    ledger = sum(entry.trained for entry in run.ledger())
    learned = sum(len(row.said) for row in rows_of(demonstrations))
    assert 2 * learned > ledger > learned, "two epochs, without what is held out"
    saved = list_checkpoints(whole / "checkpoints")[-1]
    network = load_model(ModelConfig(), path=saved / "model")
    assert sum(parameter.numel() for parameter in network.parameters()) > 0


def test_a_stopped_run_goes_on_as_if_it_had_not(tmp_path: Path, whole: Path) -> None:
    stop = At(3, lambda: os.kill(os.getpid(), signal.SIGTERM))
    result = train(small(tmp_path), sinks=(), callbacks=[stop])
    assert (result.stopped, result.steps) == ("SIGTERM", 3)
    assert result.checkpoint == result.path / "checkpoints" / "step_000003"
    resumed = train(resume=result.path, sinks=())
    assert resumed.stopped is None
    assert differing(result.path, whole) == []


def test_a_crash_goes_on_from_the_last_checkpoint(tmp_path: Path, whole: Path) -> None:
    def crash() -> None:
        raise RuntimeError("a crash")

    config = small(tmp_path, checkpoint={"every": 2})
    with pytest.raises(RuntimeError, match="a crash"):
        train(config, sinks=(), callbacks=[At(3, crash)])
    assert list_checkpoints(tmp_path / "run/checkpoints")[-1].name == "step_000002"
    train(resume=tmp_path / "run", sinks=())
    assert differing(tmp_path / "run", whole) == []


KILLER = """
import os, signal, sys
import turnwise

class Kill(turnwise.Callback):
    def on_step(self, step, metrics):
        if step == 3 and "sft/loss" in metrics:
            os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_run_goes_on_by_command(tmp_path: Path, whole: Path) -> None:
    (tmp_path / "killer.py").write_text(KILLER)
    (tmp_path / "run.yaml").write_text(show_config(small(tmp_path)))
    words = ["sft", "run.yaml", "log.callbacks=[killer.py:Kill]"]
    path = os.pathsep.join([str(HERE), *sys.path])
    done = subprocess.run(
        [*warm.turnwise(), *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    config = RunReader(tmp_path / "run").config
    plain = config.model_copy(update={"log": config.log.model_copy(update={"callbacks": ()})})
    train(plain, resume=tmp_path / "run", sinks=())
    assert differing(tmp_path / "run", whole) == []


def test_other_demonstrations_are_refused_at_a_resume(tmp_path: Path) -> None:
    stop = At(2, lambda: os.kill(os.getpid(), signal.SIGTERM))
    run = train(small(tmp_path), sinks=(), callbacks=[stop]).path
    config = RunReader(run).config
    other = config.model_copy(update={"sft": config.sft.model_copy(update={"lr": 0.5})})
    with pytest.raises(ValueError, match=r"was started with sft.lr = 0.01"):
        train(other, resume=run, sinks=())
    file = run / "demonstrations.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-3]))
    with pytest.raises(CheckpointError, match="trained on other demonstrations"):
        train(resume=run, sinks=())


def test_without_an_environment_nothing_is_played(tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "7"}]}
        for n in range(20)
    ]
    file = tmp_path / "demos.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = tiny_folder(tmp_path)
    config = small(
        tmp_path,
        env={"name": "no:Such"},
        model={"path": model},
        sft={"source": [str(file)], "lr": 0.003, "epochs": 20, "batch_tokens": 200},
        eval={"before": False, "after": False},
        checkpoint={"every": 0},
    )
    result = train(config, sinks=())
    assert result.metrics()[-1]["sft/token_accuracy"] == 1.0
    assert (result.before, result.after) == (None, None)


def tiny_folder(path: Path) -> str:
    folder = path / "model"
    tiny_model("qwen2").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def test_adapters_learn_and_are_saved_apart(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    path = tiny_folder(tmp_path)
    lora = {"path": path, "lora": {"rank": 2, "dropout": 0.1}}
    config = small(
        tmp_path,
        model=lora,
        sft={"lr": 0.05, "batch_tokens": 4096, "observations": 0.5},
        eval={"before": False, "after": False},
        rollout={"max_context": 512},
    )
    whole_run = train(config, sinks=())
    first, last = whole_run.metrics()[0], whole_run.metrics()[-1]
    assert last["sft/held_out_loss"] < first["sft/held_out_loss"]
    saved = whole_run.checkpoint
    assert saved is not None
    assert (saved / "adapter/adapter_model.safetensors").stat().st_size < 20_000
    check_files(saved)
    apart = load_model(ModelConfig(path=path, adapter=str(saved / "adapter")))
    merged = load_model(ModelConfig(), path=saved / "model")
    base = load_model(ModelConfig(path=path))
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        torch.testing.assert_close(apart(ids).logits, merged(ids).logits, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(apart(ids).logits, base(ids).logits, atol=1e-2)
    with pytest.raises(ValueError, match=r"model.adapter: .* has no adapter_config.json"):
        load_model(ModelConfig(path=path, adapter=path))
    # Dropout draws from torch's generator, which is seeded by the step.
    stopped = small(
        tmp_path / "cut",
        model=lora,
        sft={"lr": 0.05, "batch_tokens": 4096, "observations": 0.5},
        eval={"before": False, "after": False},
        rollout={"max_context": 512},
    )
    stop = At(1, lambda: os.kill(os.getpid(), signal.SIGTERM))
    run = train(stopped, sinks=(), callbacks=[stop]).path
    train(resume=run, sinks=())
    assert differing(run, whole_run.path) == []


# Demonstrations, then training


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    return train(staged_config(tmp_path_factory.mktemp("staged")), sinks=())


def staged_config(folder: Path, **sections: Any) -> Config:
    return small(
        folder, steps=2, algo={"name": "grpo", "kl_coef": 0.01, "singleton": "zero"}, **sections
    )


def test_training_begins_with_the_imitated_model(staged: RunResult) -> None:
    stage = RunReader(staged.path / "imitation")
    last = list_checkpoints(stage.path / "checkpoints")[-1]
    imitated = (last / "model/model.safetensors").read_bytes()
    assert (staged.path / "initial_model/model.safetensors").read_bytes() == imitated
    first = staged.path / "checkpoints/step_000000/model/model.safetensors"
    assert first.is_file() is False or first.read_bytes() == imitated
    assert [row["step"] for row in staged.metrics()] == [0, 1, 2]
    assert staged.metrics()[1]["train/kl_ref"] == pytest.approx(0.0, abs=1e-5), "the reference"
    assert stage.summary()["before"] is not None
    assert stage.summary()["after"] is None, "the run evaluates before its own first step"
    assert staged.before is not None
    held_out = EvalResult.of("before", staged.reader.episodes(0, split="eval"))
    assert held_out.reward.estimate == staged.before.reward[1]


@pytest.mark.parametrize("moment", ["imitation", "boundary", "training"])
def test_stopped_anywhere_it_goes_on_over_the_boundary(
    tmp_path: Path, staged: RunResult, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = staged_config(tmp_path)
    if moment == "imitation":
        _stop_stage(monkeypatch, after=2)
        result = train(config, sinks=())
        assert (result.stopped, result.steps) == ("SIGTERM", 0)
        assert result.path == tmp_path / "run"
        assert result.checkpoint == tmp_path / "run/imitation/checkpoints/step_000002"
        monkeypatch.undo()
    elif moment == "boundary":
        from turnwise.train import stages

        def crash(*_: Any) -> None:
            raise RuntimeError("a crash")

        monkeypatch.setattr(stages, "write_folder", crash)
        with pytest.raises(RuntimeError, match="a crash"):
            train(config, sinks=())
        assert not (tmp_path / "run/initial_model").exists()
        monkeypatch.undo()
    else:
        stop = AtTraining(1, lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert train(config, sinks=(), callbacks=[stop]).steps == 1
    train(resume=tmp_path / "run", sinks=())
    assert differing(tmp_path / "run", staged.path) == []


class AtTraining(At):
    def on_step(self, step: int, metrics: Any) -> None:
        assert "rollout/reward" in metrics, "callbacks hear of training, not of its first stage"
        super().on_step(step, {**metrics, "sft/loss": 0.0})


def _stop_stage(monkeypatch: pytest.MonkeyPatch, *, after: int) -> None:
    """Sends SIGTERM to this process after an optimizer step of the imitation."""
    from turnwise.train.imitation import Imitator

    plain, count = Imitator.step, [0]

    def step(self: Imitator, *args: Any, **keywords: Any) -> Any:
        found = plain(self, *args, **keywords)
        count[0] += "warm start" not in keywords["where"]
        if count[0] == after and "warm start" not in keywords["where"]:
            os.kill(os.getpid(), signal.SIGTERM)
        return found

    monkeypatch.setattr(Imitator, "step", step)


def test_without_checkpoints_the_model_is_handed_over_in_memory(
    tmp_path: Path, staged: RunResult
) -> None:
    result = train(staged_config(tmp_path, checkpoint={"write": False}), sinks=())
    assert result.checkpoint is None
    assert not (result.path / "initial_model").exists()
    assert not (result.path / "imitation/demonstrations.jsonl").exists()
    assert (result.path / "metrics.jsonl").read_bytes() == (
        staged.path / "metrics.jsonl"
    ).read_bytes()


def test_adapters_are_merged_before_training_and_others_added(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    config = staged_config(
        tmp_path,
        model={"path": tiny_folder(tmp_path), "lora": {"rank": 2}},
        sft={"lr": 0.05, "batch_tokens": 4096},
        rollout={"max_context": 512, "max_response_tokens": 8},
        eval={"before": False, "after": False},
        train={"max_idle_steps": 10},
    )
    result = train(config, sinks=())
    stage = list_checkpoints(result.path / "imitation/checkpoints")[-1]
    first, initial = (
        load_model(ModelConfig(), path=folder)
        for folder in (stage / "model", result.path / "initial_model")
    )
    for name, tensor in first.state_dict().items():
        torch.testing.assert_close(initial.state_dict()[name], tensor, rtol=1e-5, atol=1e-6)
    assert (list_checkpoints(result.path / "checkpoints")[-1] / "adapter").is_dir()


def test_estimates_leave_the_imitation_out(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"train.steps is 0"):
        estimate(small(tmp_path))


def test_a_wrong_source_leaves_no_run_behind(tmp_path: Path) -> None:
    for steps in (0, 2):
        config = small(tmp_path, steps=steps, sft={"source": ["nothing.jsonl"]})
        with pytest.raises(ValueError, match="neither a player"):
            train(config, sinks=())
        assert not (tmp_path / "run").exists()


def episodes_of(path: Path) -> list[Episode]:
    reader = RunReader(path)
    return [episode for step in reader.steps() for episode in reader.episodes(step)]


def test_a_runs_own_episodes_are_learned_by_their_stored_ids(
    tmp_path: Path, staged: RunResult
) -> None:
    played = episodes_of(staged.path)
    assert len(played) > 0
    again = small(
        tmp_path,
        sft={"source": [str(staged.path)], "keep": "all", "held_out": 0.0, "epochs": 1},
    )
    result = train(again, sinks=())
    stored = load(result.path / "demonstrations.jsonl")
    assert [[turn.completion.ids for turn in episode.turns] for episode in stored] == [
        [turn.completion.ids for turn in episode.turns] for episode in played
    ]
    assert "sft/held_out_loss" not in result.metrics()[-1]
