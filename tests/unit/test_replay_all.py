"""Every environment that is registered and installed keeps its contract, and its stored episodes
replay exactly."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from turnwise.config.schema import Config, EnvConfig, RolloutConfig, TrainConfig
from turnwise.envs.base import hint_of
from turnwise.envs.registry import find_env, list_envs
from turnwise.envs.text_turns import TextTurns
from turnwise.evaluate.check_env import check_env
from turnwise.evaluate.players import ScriptedPlayer, Situation, play_episodes
from turnwise.evaluate.replay import read_episodes, replay_episodes
from turnwise.serve.server import EnvServer

EXAMPLES = {
    "gymnasium": (
        "gymnasium:Taxi",
        "gymnasium:FrozenLake",
        "gymnasium:Blackjack",
        "gymnasium:CartPole",
    ),
    "textarena": ("textarena:Mastermind-v0", "textarena:Sudoku-v0"),
    "reasoning_gym": ("reasoning_gym:chain_sum", "reasoning_gym:word_sorting"),
    "gem": ("gem:game:GuessTheNumber-v0-easy", "gem:game:Minesweeper-v0-easy"),
    "openenv": (),  # its server is started in test_envs_libraries.py
    "remote": ("remote",),
    "agent": (),  # tests/endpoint
    "command": (),
}
VARIANTS = {
    "frozen_lake/slippery": EnvConfig(name="frozen_lake", options={"is_slippery": True}),
    "countdown/tries": EnvConfig(name="countdown", options={"tries": 3}),
    "sokoban/both": EnvConfig(name="sokoban", max_actions_per_episode=12),
}


def every_env() -> list[str]:
    found: list[str] = []
    for spec in list_envs():
        if spec.available:
            found += EXAMPLES[spec.name] if spec.selects is not None else (spec.name,)
    return [*found, *VARIANTS]


def test_every_library_has_its_examples_here() -> None:
    assert {spec.name for spec in list_envs() if spec.selects is not None} == set(EXAMPLES)
    for module in ("bm25s", "Stemmer", "rapidfuzz"):
        assert importlib.util.find_spec(module), (
            f"{module} belongs to the suite's extras; webshop would go untested"
        )


@pytest.fixture(scope="module")
def served() -> Iterator[str]:
    with EnvServer(VARIANTS["frozen_lake/slippery"], RolloutConfig(isolation="inline")) as server:
        yield server.url


def config_of(name: str, served: str) -> EnvConfig:
    if name == "remote":
        return EnvConfig(name=served)
    return VARIANTS.get(name) or EnvConfig(name=name)


def say(situation: Situation) -> str:
    """Mostly legal, sometimes not: both must replay."""
    if isinstance(situation.env, TextTurns) and situation.rng.random() < 0.85:
        return hint_of(situation.env, "random", situation.rng.getrandbits(32)) or "nothing"
    word = situation.rng.choice(
        ("7", "yes", "", "<answer>", "<think></think><answer>right</answer>")
    )
    return f"<think></think><answer>{word}</answer>" if situation.rng.random() < 0.5 else word


@pytest.mark.parametrize("name", every_env())
def test_it_keeps_the_contract(name: str, served: str) -> None:
    config = config_of(name, served)
    report = check_env(config.name, seeds=10, config=config)
    assert report.ok, report


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", every_env())
def test_it_keeps_the_contract_over_200_seeds(name: str, served: str) -> None:
    config = config_of(name, served)
    report = check_env(config.name, seeds=200, config=config)
    print(report)
    assert report.ok, report
    assert report.seeds == 200


@pytest.mark.parametrize("name", every_env())
def test_stored_episodes_replay_exactly(name: str, served: str, tmp_path: Path) -> None:
    config = Config(env=config_of(name, served), train=TrainConfig(max_turn=6))
    episodes = play_episodes(config, ScriptedPlayer("mixed", say), episodes=10)
    file = tmp_path / "episodes.jsonl"
    file.write_text("".join(episode.to_line() + "\n" for episode in episodes), encoding="utf-8")
    stored = read_episodes(file)
    assert stored == episodes
    assert not [episode.error for episode in stored if episode.status.failed]
    assert [str(found) for found in replay_episodes(stored, config) if found] == []


@pytest.mark.parametrize("name", [spec.name for spec in list_envs()])
def test_it_says_in_one_line_what_it_is(name: str) -> None:
    spec = find_env(name)
    assert spec.summary.endswith(".")
    assert len(spec.summary) <= 100
    assert "\n" not in spec.summary
