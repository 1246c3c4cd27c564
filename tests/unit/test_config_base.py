"""Defaults that suit what a run is given, and what `turnwise train` makes of any words."""

import json
from pathlib import Path

import pytest

from turnwise.algos.table import PRESETS, build_algorithm
from turnwise.cli.main import main
from turnwise.config import Config, list_recipes, load_config, run_config, show_config
from turnwise.config.schema import GROUP_RELATIVE, WITH_CRITIC
from turnwise.config.tree import ConfigError
from turnwise.config.yaml_io import parse_yaml

HERE = Path(__file__).parent
OWN = "--env.name=coin.py:Coin"


def model(folder: Path, **shape: int) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(shape))
    return f"model.path={folder}"


def test_the_main_job_is_what_it_always_was() -> None:
    """The resolved config of the recipe, stored when its settings were last changed on purpose:
    `turnwise config show frozen_lake` writes it anew."""
    stored = parse_yaml((HERE / "frozen_lake_resolved.yaml").read_text(encoding="utf-8"))
    assert run_config() == run_config("frozen_lake") == load_config("frozen_lake")
    assert run_config() == load_config(stored)
    assert run_config(None, ["--env_cfgs.env_name", "frozen_lake"]) == run_config()


def test_an_own_environment_inherits_nothing_of_frozen_lake() -> None:
    config = run_config(None, [OWN])
    lake = run_config()
    assert (config.env.options, config.env.system_prompt, config.env.max_turn) == ({}, None, None)
    assert config.rollout.max_response_tokens > lake.rollout.max_response_tokens
    assert config.eval == Config().eval


def test_a_given_model_gets_room_and_a_small_step(tmp_path: Path) -> None:
    shape = {"hidden_size": 1536, "num_hidden_layers": 28, "vocab_size": 151936}
    large = run_config(
        None, [OWN, model(tmp_path / "large", **shape, max_position_embeddings=32768)]
    )
    assert (large.train.lr, large.rollout.max_response_tokens) == (1e-6, 256)
    assert large.rollout.max_context == 4096
    assert (large.rollout.window, large.env.format.style) == ("full", "answer")
    small = run_config(
        None,
        [
            *(OWN, "env.format.think=false", "train.max_turn=100"),
            model(
                tmp_path / "small",
                **{"hidden_size": 576, "num_hidden_layers": 30, "vocab_size": 49152},
                max_position_embeddings=8192,
            ),
        ],
    )
    assert (small.train.lr, small.rollout.max_response_tokens) == (1e-5, 64)
    assert small.rollout.max_context == 8192, "no more than the model can hold"
    adapters = run_config(None, [OWN, "model.path=org/name", "model.lora.rank=8"])
    assert (adapters.train.lr, adapters.rollout.max_context) == (2e-5, None)


def test_what_is_given_wins_over_what_would_suit(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("env: {name: bandit}\ntrain: {lr: 0.5, epochs: 7}\n")
    config = run_config(tmp_path / "mine.yaml", ["train.epochs=2"])
    assert (config.train.lr, config.train.epochs, config.train.mini_batches) == (0.5, 2, 4)


def test_prompts_alone_are_trained_on(tmp_path: Path) -> None:
    words = ["data.prompts=a.jsonl", "data.reward=a:b", "model.path=org/name"]
    assert run_config(None, words).train.multi_turn is False
    assert run_config(None, [*words, "env.name=bandit"]).train.multi_turn is True


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["train.steps=3"],
        ["bandit", "--algo.name", "grpo"],
        [OWN],
        [OWN, "model.path=tiny"],
        ["model.path=tiny"],
        ["smollm2_sokoban", "model.path=tiny", "algo.name=ppo"],
        ["--train_cfgs.multi_turn", "true", "--env_cfgs.env_name", "frozen_lake"],
    ],
    ids=" ".join,
)
def test_config_show_prints_what_train_runs(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    model(tmp_path / "tiny", hidden_size=8, num_hidden_layers=1, vocab_size=9)
    shown: list[str] = []
    for command in (["config", "show"], ["train", "--dry-run"]):
        with pytest.raises(SystemExit) as ended:
            main([*command, *words])
        assert ended.value.code == 0
        lines = capsys.readouterr().out.splitlines()
        shown.append("\n".join(line for line in lines if not line.startswith("#")))
    assert shown[0] == shown[1]
    assert "seed: 0" in shown[0]


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("source", [None, OWN, *list_recipes()])
def test_switching_the_algorithm_fails_on_no_key_that_nobody_set(
    name: str, source: str | None
) -> None:
    words = [f"algo.name={name}"]
    config = run_config(None, [OWN, *words]) if source == OWN else run_config(source, words)
    algorithm = build_algorithm(config.algo)
    assert algorithm.name == name
    assert config.rollout.train.group_size > 1 or not algorithm.compares_groups
    assert algorithm.needs_critic or not config.train.critic_warmup
    assert algorithm.compares_groups == (name in GROUP_RELATIVE)
    assert algorithm.needs_critic == (name in WITH_CRITIC)


def test_a_key_that_the_user_set_is_not_dropped_with_the_algorithm(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("extends: frozen_lake\nalgo: {lam: 0.7}\n")
    config = run_config(tmp_path / "mine.yaml", ["algo.name=grpo"])
    assert config.algo.lam == 0.7
    with pytest.raises(ValueError, match=r"algo.lam=0.7 means nothing to algo.name='grpo'"):
        build_algorithm(config.algo)


@pytest.mark.parametrize("key", ["train.max_turn", "env.max_turn", "agent_proxy.max_turn"])
def test_the_turn_limit_that_is_given_last_wins(key: str) -> None:
    config = run_config("frozen_lake", [f"{key}=3"])
    assert (config.env.max_turn or config.train.max_turn) == 3
    with pytest.raises(ConfigError, match="contradicts"):
        run_config("frozen_lake", [f"{key}=3", "env.max_turn=4", "train.max_turn=3"])


def test_the_turn_limit_of_the_command_line_holds_for_every_tag(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "envs: {a: {name: bandit, max_turn: 9}}\nrollout: {train: {tags: [a]}}\n"
    )
    config = run_config(tmp_path / "mine.yaml", ["train.max_turn=2"])
    assert (config.envs["a"].max_turn, config.train.max_turn) == (None, 2)


def test_a_resolved_config_resolves_to_itself(tmp_path: Path) -> None:
    for words in ([OWN], [OWN, "model.path=org/name", "algo.name=gigpo"], ["seed=3"]):
        config = run_config(None, words)
        (tmp_path / "config.yaml").write_text(show_config(config))
        assert run_config(tmp_path / "config.yaml") == config


@pytest.mark.parametrize(
    "words", [["frozen_lake"], ["bandit", "env.format.style=raw"], ["bandit", "model.path=org/m"]]
)
def test_thoughts_are_not_asked_for_where_a_reply_has_none(words: list[str]) -> None:
    """The embedded model answers with its whole reply unless it is to think"""
    raw = "env.format.style=raw"
    assert not run_config(words[0], [*words[1:], raw]).env.format.think
    with pytest.raises(ConfigError, match="the style raw has no thoughts"):
        run_config(words[0], [*words[1:], raw, "env.format.think=true"])
    thinking = run_config("bandit", ["env.format.think=true"])
    assert (thinking.env.format.style, thinking.rollout.max_response_tokens) == ("answer", 64)


def test_a_resolved_config_with_raw_replies_is_taken_again(tmp_path: Path) -> None:
    config = run_config("bandit", ["model.path=org/m", "env.format.style=raw"])
    (tmp_path / "config.yaml").write_text(show_config(config))
    assert run_config(tmp_path / "config.yaml") == config
