"""Evaluation: the same tasks for every player, failures apart from losses, and paired
comparisons."""

import dataclasses
import re

import pytest
from run_fixtures import make_episode

from turnwise.config.schema import Config, EnvConfig, TrainConfig
from turnwise.envs.base import BaseEnv
from turnwise.envs.registry import make_env
from turnwise.evaluate.evaluation import (
    EvalResult,
    EvaluationError,
    PolicyPlayer,
    compare,
    evaluate,
)
from turnwise.evaluate.players import RandomPlayer, ScriptedPlayer, Situation, play_episodes
from turnwise.generate.scripted import ScriptedGenerator
from turnwise.rollout.speakers import PlayerError
from turnwise.testing.tiny import tiny_tokenizer
from turnwise.types import Episode, Status

CONFIG = Config(
    env=EnvConfig(name="simple_game", options={"size": 6}), train=TrainConfig(max_turn=3)
)


def walk(text: str) -> str:
    """The reply that walks straight to the target."""
    place, target = map(int, re.findall(r"You are at (\d+), the target is at (\d+)", text)[-1])
    moves = ["right" if target > place else "left"] * min(abs(target - place), 5)
    return f"<think></think><answer>{' || '.join(moves)}</answer>"


def untimed(episodes: list[Episode]) -> list[Episode]:
    """The episodes without what a clock measured."""
    return [
        dataclasses.replace(
            one,
            turns=tuple(
                dataclasses.replace(turn, generate_seconds=0.0, env_seconds=0.0)
                for turn in one.turns
            ),
        )
        for one in episodes
    ]


def walker(situation: Situation) -> str:
    return walk(situation.messages[-1].content)


def test_players_meet_the_same_tasks_and_the_better_one_wins() -> None:
    good = evaluate(CONFIG, ScriptedPlayer("walker", walker), episodes=40)
    poor = evaluate(CONFIG, RandomPlayer(), episodes=40)
    assert [one.task_id for one in good.outcomes] == [one.task_id for one in poor.outcomes]
    assert all(episode.task.split == "val" for episode in good.episodes)
    assert good.success is not None
    assert good.success.estimate == 1.0
    result = compare(good, poor)
    assert result.tasks == 40
    assert result.only_a > 0 == result.only_b
    assert result.more == 0
    assert result.verdict().startswith("walker is better than random on 40 tasks")


def test_the_random_player_plays_the_same_game_again() -> None:
    first, second = (play_episodes(CONFIG, RandomPlayer(), episodes=5) for _ in range(2))
    assert untimed(first) == untimed(second)
    assert all(turn.generate_start is not None for one in first for turn in one.turns)
    assert len({episode.turns[0].text for episode in first}) > 1


def test_a_policy_plays_the_tasks_of_the_message_players() -> None:
    tokenizer = tiny_tokenizer()

    def script(_: object, ids: tuple[int, ...], __: int) -> str:
        return walk(tokenizer.decode(ids))

    generator = ScriptedGenerator(script, tokenizer=tokenizer, end_id=tokenizer.eos_token_id)
    policy = evaluate(CONFIG, PolicyPlayer(generator=generator, tokenizer=tokenizer), episodes=6)
    messages = evaluate(CONFIG, ScriptedPlayer("walker", walker), episodes=6)
    assert policy.success == messages.success
    same = compare(policy, messages)
    assert (same.tasks, same.more, same.p) == (6, None, 1.0)
    assert [e.turns[-1].messages for e in policy.episodes] == [
        e.turns[-1].messages for e in messages.episodes
    ]


def test_a_cut_episode_is_truncated_and_gets_its_last_reward() -> None:
    slow = evaluate(CONFIG, ScriptedPlayer("silent", lambda _: "hm"), episodes=3)
    assert {one.status for one in slow.outcomes} == {Status.TRUNCATED_TURNS.value}
    assert {one.turns for one in slow.outcomes} == {3}
    assert slow.reward.estimate == pytest.approx(-0.3)


class Flaky(BaseEnv):
    actions = ("go",)

    def reset(self, seed: int | None = None, **kwargs: object) -> str:
        self.broken = (seed or 0) // 2 % 2 == 0
        return "go"

    def step(self, action: str) -> tuple[str, float, bool, dict[str, bool]]:
        if self.broken:
            raise RuntimeError("the game fell over")
        return "done", 1.0, True, {"success": True}


def test_failures_are_counted_and_lower_no_rate() -> None:
    config = Config(env=EnvConfig(name=f"{__name__}:Flaky"))
    result = evaluate(config, RandomPlayer(), episodes=24)
    assert 0 < result.failures < 24
    assert result.success is not None
    assert result.success.estimate == 1.0
    assert len(result.outcomes) == 24 - result.failures


def test_a_player_that_fails_every_time_is_an_error() -> None:
    def broken(_: Situation) -> str:
        raise ConnectionError("nobody there")

    with pytest.raises(EvaluationError, match="nobody there"):
        evaluate(CONFIG, ScriptedPlayer("broken", broken), episodes=2)


def test_random_needs_legal_actions() -> None:
    env = EnvConfig(
        name="turnwise.envs.messages:SingleTurnEnv", options={"dataset": [{"question": "1 + 1"}]}
    )
    with pytest.raises(PlayerError, match="legal actions"):
        evaluate(Config(env=env), RandomPlayer(), episodes=1, split="train")


def test_comparisons_by_hand() -> None:
    def result(name: str, wins: str) -> EvalResult:
        episodes = [
            make_episode(f"e{n}", group_id=n, success=win == "1") for n, win in enumerate(wins)
        ]
        return EvalResult.of(name, episodes)

    undecided = compare(result("a", "1110000000"), result("b", "0010000000"))
    assert (undecided.only_a, undecided.only_b, undecided.success_p) == (2, 0, 0.5)
    assert undecided.more is not None
    assert undecided.more > 10
    assert "may be chance" in undecided.verdict()
    settled = compare(result("a", "0" * 12), result("b", "1" * 12))
    assert settled.more == 0
    assert settled.verdict().startswith("b is better than a on 12 tasks (difference in success 1.0")
    mirrored = compare(result("b", "1" * 12), result("a", "0" * 12))
    assert mirrored.verdict() == settled.verdict()


def test_nothing_to_pair_is_refused() -> None:
    one = EvalResult.of("a", [make_episode(group_id=1, success=True)])
    with pytest.raises(ValueError, match="share no task"):
        compare(one, EvalResult.of("b", [make_episode(group_id=2, success=True)]))


def test_rewards_alone_can_be_compared() -> None:
    def result(name: str, rewards: list[float]) -> EvalResult:
        env = make_env(EnvConfig(name="bandit"))
        tasks = [env.make_task(n, "val") for n in range(len(rewards))]
        turn = make_episode().turns[0]
        return EvalResult.of(
            name,
            [
                make_episode(
                    group_id=n, task=task, turns=(dataclasses.replace(turn, reward=reward),)
                )
                for n, (task, reward) in enumerate(zip(tasks, rewards, strict=True))
            ],
        )

    found = compare(result("a", [0.5] * 10 + [0.0] * 10), result("b", [0.0] * 20))
    assert found.success is None
    assert found.more == 0
    assert found.reward.estimate == 0.25
