"""`turnwise sft` and `turnwise.sft`: which config a command line comes to, what is written, and
mistakes by name."""

import json
from pathlib import Path
from typing import Any

import pytest
from learn_parts import WORDS, Parrot, parrot_config

import turnwise
from turnwise.cli.main import main
from turnwise.cli.sft import read_words
from turnwise.config import show_config
from turnwise.config.known import remember
from turnwise.evaluate.players import Situation
from turnwise.log.store import RunReader
from turnwise.train.sft_config import NoSourceError, Words, resolve
from turnwise.train.sources import read_file

HERE = Path(__file__).parent
SMALL = [
    *("model.embedded.hidden_size=16", "model.embedded.num_layers=1"),
    *("model.embedded.num_heads=2", "model.embedded.warmstart_episodes=16"),
    *("eval.episodes=2", "log.report=false", "rollout.isolation=inline"),
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command(*words: str, code: int = 0) -> None:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    assert (ended.value.code or 0) == code


def of(*words: str) -> Any:
    return resolve(read_words(words))[0]


def row(text: str = "7", **more: Any) -> str:
    messages = [{"role": "user", "content": "3 + 4"}, {"role": "assistant", "content": text}]
    return json.dumps({"messages": messages, **more}) + "\n"


def test_words_are_sorted(folder: Path) -> None:
    (folder / "run").mkdir()
    (folder / "run/config.yaml").write_text("")
    found = read_words(
        ["run", "--best", "openai:http://h/v1?a=b#m", "bandit", "--sft.epochs", "2", "x.jsonl.gz"]
    )
    assert found.sources == ("run", "openai:http://h/v1?a=b#m", "x.jsonl.gz")
    assert found.config == "bandit"
    assert found.overrides == ("--sft.epochs", "2", "sft.keep=success")
    games = read_words(["expert", "env.options.games=real.jsonl.gz", "--env.options.games=b.jsonl"])
    assert games.sources == ("expert",)
    assert games.overrides == ("env.options.games=real.jsonl.gz", "--env.options.games=b.jsonl")
    assert read_words(["--best=3", "random"]).overrides == ("sft.keep=3",)
    assert read_words(["expert", "--best", "5", "seed=2"]).overrides == ("seed=2", "sft.keep=5")


def test_the_config_depends_on_what_is_given(folder: Path) -> None:
    assert of("expert").env.name == "frozen_lake"
    assert of("expert").train.steps == 0
    assert (of("expert").sft.lr, of("expert").eval.before) == (3e-3, True)
    (folder / "d.jsonl").write_text(row())
    alone = of("d.jsonl", "model.path=org/model")
    assert (alone.eval.before, alone.eval.after, alone.sft.lr) == (False, False, 1e-5)
    assert of("d.jsonl", "model.path=org/model", "env.name=bandit").eval.after is True
    lora = of("d.jsonl", "model.path=org/model", "model.lora.rank=8")
    assert lora.sft.lr == 1e-4
    assert of("d.jsonl", "bandit").eval.before is True
    with pytest.raises(NoSourceError, match="there is nothing to imitate"):
        resolve(Words(sources=(), config=None, overrides=()))


def test_the_config_that_lies_with_demonstrations_is_used(folder: Path) -> None:
    stored = parrot_config(log={"name": "old"}, sft={"source": ["random"], "lr": 0.5})
    (folder / "d.jsonl").write_text(row())
    (folder / "d.config.yaml").write_text(show_config(stored))
    remember(show_config(stored))
    config, file = resolve(read_words(["d.jsonl"]))
    assert file == Path("d.config.yaml")
    assert (config.env.name, config.log.name) == ("learn_parts:Parrot", None)
    assert config.sft.source == ("d.jsonl",)
    assert config.sft.lr == 3e-3, "how it was run is not taken over"
    assert resolve(read_words(["d.jsonl", "bandit"]))[0].env.name == "bandit"


def test_code_of_a_strangers_config_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "d.jsonl").write_text(row())
    (folder / "d.config.yaml").write_text(show_config(parrot_config()))
    command("sft", "d.jsonl", code=2)
    assert "names code that would be loaded" in capsys.readouterr().err


def test_demonstrations_are_written_without_a_model_and_learned_from(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["random", "bandit", "sft.episodes=6", "--best", "1", "--write", "demos.jsonl.gz"]
    command("sft", *words)
    said = capsys.readouterr().out
    assert "random: 6 episodes" in said
    written = read_file(folder / "demos.jsonl.gz")
    assert 0 < len(written) <= 6, "those that did not succeed are dropped"
    assert f"{len(written)} conversations in demos.jsonl.gz" in said
    command("sft", "demos.jsonl.gz", *SMALL, "log.name=run", "sft.epochs=1")
    said = capsys.readouterr().out
    assert f"demos.jsonl.gz: {len(written)} episodes" in said
    assert "evaluation after training" in said
    run = RunReader(folder / "runs/run")
    assert run.config.env.name == "bandit"
    command("sft", "--resume", "runs/run")
    command("train", "--resume", "runs/run")
    command("sft", "--write", "demos.txt", "expert", code=2)
    assert "--write names a file .jsonl or .jsonl.gz" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["sft"], "there is nothing to imitate"),
        (["sft", "empty.jsonl", "--best"], "empty.jsonl has no episode to learn from"),
        (["sft", "torn.jsonl"], "torn.jsonl, line 2 cannot be read"),
        (["sft", "lost.jsonl", "--best"], "none of the 1 episodes succeeded"),
        (["sft", "good.jsonl", "--best"], "none of the 1 episodes says whether it succeeded"),
        (["sft", "none.jsonl"], "'none.jsonl' is neither a player"),
        (["sft", "folder"], "folder is no run directory"),
        (["sft", "--resume", "folder"], "folder is not a run directory"),
        (["sft", "expert", "bandit"], "'bandit' has no expert_action"),
        (["sft", "exprt", "bandit"], "did you mean expert?"),
        (["sft", "good.jsonl", "sft.epoch=2"], "Did you mean sft.epochs?"),
        (["sft", "good.jsonl", "--best", "0"], "sft.keep"),
        (["sft", "good.jsonl", "backend=trl"], "sft.source is for backend native"),
        (["train", "bandit", "sft.source=good.jsonl", "--estimate", "train.steps=0"], "estimate"),
    ],
)
def test_mistakes_are_named(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    (folder / "folder").mkdir()
    (folder / "good.jsonl").write_text(row())
    (folder / "lost.jsonl").write_text(row(success=False))
    (folder / "empty.jsonl").write_text("")
    (folder / "torn.jsonl").write_text(row() + row()[:30])
    command(*words, *(SMALL if words != ["sft"] and "--resume" not in words else []), code=2)
    assert says in capsys.readouterr().err
    assert not (folder / "runs").exists() or not list((folder / "runs").iterdir())


def test_a_run_of_training_is_not_resumed_as_imitation(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "run").mkdir()
    (folder / "run/config.yaml").write_text(show_config(parrot_config()))
    command("sft", "--resume", "run", code=2)
    assert "write turnwise train --resume run" in capsys.readouterr().err


def test_from_python_with_a_player_of_ones_own(folder: Path) -> None:
    def repeats(situation: Situation) -> str:
        last = situation.messages[-1].content
        return next(word for word in WORDS if word in last)

    settings = {
        "model.embedded.hidden_size": 16,
        "model.embedded.num_layers": 1,
        "model.embedded.warmstart_episodes": 16,
        "rollout.isolation": "inline",
        "sft.episodes": 12,
        "eval.episodes": 4,
        "log.report": False,
    }
    run = turnwise.sft([repeats, "random"], Parrot, best=True, overrides=settings, quiet=True)
    assert run.steps > 0
    events = [event["message"] for event in run.reader.events()]
    assert any("12 episodes, 12 of them succeeded" in message for message in events)
    assert any(message.startswith("kept ") for message in events)
    assert run.metrics()[-1]["sft/loss"] > 0.0
