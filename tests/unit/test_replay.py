"""Replaying stored episodes: what is recorded comes again, and the first thing that does not is
named."""

from dataclasses import replace

import pytest

from turnwise.config.schema import Config, EnvConfig, FormatConfig, TrainConfig
from turnwise.envs.base import BaseEnv, Env
from turnwise.evaluate.players import RandomPlayer, ScriptedPlayer, play_episodes
from turnwise.evaluate.replay import replay_episodes
from turnwise.types import Episode, Message, Status

LAKE = Config(
    env=EnvConfig(name="frozen_lake", options={"is_slippery": True}), train=TrainConfig(max_turn=3)
)


class Dice(BaseEnv):
    """Pays what a die shows; the die is the environment's own noise."""

    actions = ("roll",)
    sides = 6

    def reset(self, seed: int | None = None, noise_seed: int = 0, **kwargs: object) -> str:
        import random

        self.random = random.Random(noise_seed)
        return "roll"

    def step(self, action: str) -> tuple[str, float, bool, dict[str, object]]:
        shown = self.random.randint(1, self.sides)
        return f"a {shown}", float(shown), shown == 6, {}


def dice(**changes: object) -> Config:
    format = FormatConfig(think=False, max_actions_per_turn=1)
    return Config(
        env=EnvConfig(name=f"{__name__}:Dice", format=format, **changes),
        train=TrainConfig(max_turn=4),
    )  # pyright: ignore[reportArgumentType]


def test_slippery_ice_slips_the_same_way_again() -> None:
    episodes = play_episodes(LAKE, RandomPlayer(), episodes=12)
    assert replay_episodes(episodes, LAKE) == [None] * 12


def test_noise_comes_from_the_noise_seed() -> None:
    config = dice()
    episodes = play_episodes(config, RandomPlayer(), episodes=6)
    assert len({episode.reward for episode in episodes}) > 1
    assert {episode.status for episode in episodes} <= {Status.COMPLETED, Status.TRUNCATED_TURNS}
    assert replay_episodes(episodes, config) == [None] * 6
    other = replace(episodes[0], noise_seed=episodes[0].noise_seed + 1)
    found = replay_episodes([other], config)[0]
    assert found is not None
    assert found.what == "messages"


@pytest.mark.parametrize("what", ["reward", "messages", "action", "prompt", "status", "turns"])
def test_the_first_difference_is_named(what: str) -> None:
    config = dice()
    episode = next(
        one for one in play_episodes(config, RandomPlayer(), episodes=20) if len(one.turns) == 4
    )
    turns = list(episode.turns)
    lie = (Message(role="user", content="something else"),)
    changed: Episode
    match what:
        case "reward":
            turns[2] = replace(turns[2], reward=99.0)
            changed = replace(episode, turns=tuple(turns))
        case "messages":
            turns[2] = replace(turns[2], messages=lie)
            changed = replace(episode, turns=tuple(turns))
        case "action":
            turns[2] = replace(turns[2], text="<answer>fly</answer>")
            changed = replace(episode, turns=tuple(turns))
        case "prompt":
            changed = replace(episode, prompt=lie)
        case "status":
            done = episode.status is Status.COMPLETED
            changed = replace(episode, status=Status.TRUNCATED_TURNS if done else Status.COMPLETED)
        case _:
            changed = replace(episode, turns=(*episode.turns, episode.turns[-1]))
    found = replay_episodes([changed], config)[0]
    assert found is not None
    places = {"prompt": "the opening", "status": "the end", "turns": "turn 4"}
    assert found.where == places.get(what, "turn 2")
    assert str(found).startswith(f"{episode.id}, {found.where}: ")


def test_an_environment_that_now_fails_is_a_difference() -> None:
    def broken(_: object) -> str:
        return "<answer>roll</answer>"

    config = dice()
    episode = play_episodes(config, ScriptedPlayer("roller", broken), episodes=1)[0]

    class Broken(Dice):
        def step(self, action: str) -> tuple[str, float, bool, dict[str, object]]:
            raise RuntimeError("the die fell off the table")

    from turnwise.envs.adapters import as_env

    def broken() -> Env:
        return as_env(Broken(), config=config.env, name="dice")

    found = replay_episodes([episode], config, factories={episode.tag: broken})[0]
    assert found is not None
    assert "the die fell off the table" in str(found)


def test_an_unknown_tag_says_what_is_missing() -> None:
    episode = replace(play_episodes(dice(), RandomPlayer(), episodes=1)[0], tag="maze")
    with pytest.raises(ValueError, match="give the config"):
        replay_episodes([episode], dice())
