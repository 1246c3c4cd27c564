"""Baselines: what random, blind and expert players reach on the held-out tasks."""

from pathlib import Path
from random import Random

import pytest
from small_runs import small_config

from turnwise.config.schema import Config, EnvConfig, FormatConfig
from turnwise.envs.games.frozen_lake import FrozenLake
from turnwise.evaluate import baselines
from turnwise.evaluate.baselines import BlindPlan, find_baselines, play_baselines, wanted
from turnwise.log.store import RunReader
from turnwise.train.run import train

LAKE = {"size": 3, "p": 0.9, "random_goal": True}


@pytest.fixture(autouse=True)
def few_tasks_are_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "SEARCH_TASKS", 250)


def lake(**settings: object) -> Config:
    form = FormatConfig(style="raw", think=False, max_actions_per_turn=1)
    env = EnvConfig(name="frozen_lake", options=LAKE, max_turn=4, format=form).model_copy(
        update=settings
    )
    return Config(env=env)


def test_the_expert_beats_the_blind_player_and_that_one_the_random_player() -> None:
    results = {
        baseline.player.name: result for baseline, result in play_baselines(lake(), episodes=400)
    }
    shares = {name: result.success.estimate for name, result in results.items() if result.success}
    assert list(shares) == ["random", "blind", "expert"]
    assert shares["random"] < shares["blind"] < 0.5 < shares["expert"]
    tasks = [[outcome.task_id for outcome in result.outcomes] for result in results.values()]
    assert tasks[0] == tasks[1] == tasks[2]


def test_where_down_and_right_always_lead_to_the_goal_the_blind_player_wins() -> None:
    """Frozen all over, from corner to corner: the search must find one of the six ways."""
    options = {"size": 3, "p": 1.0, "random_goal": False}
    (plan,) = [
        baseline
        for baseline in find_baselines(lake(options=options))
        if baseline.player.name == "blind"
    ]
    moves = plan.detail.removeprefix("plays ").split()
    assert sorted(moves[:4]) == ["down", "down", "right", "right"]


def test_an_expert_may_play_several_actions_in_a_turn() -> None:
    form = FormatConfig(style="raw", think=False, max_actions_per_turn=4)
    *_, (expert, result) = play_baselines(lake(format=form, max_turn=1), episodes=60)
    assert expert.label == "shortest path"
    assert result.success is not None
    assert result.success.estimate > 0.9


def test_a_fixed_distribution_is_drawn_from_the_episodes_own_generator() -> None:
    plan = BlindPlan(("left", "right"), (0.25, 0.75))
    rng = Random(0)
    drawn = [plan.action(number, rng) for number in range(400)]
    assert 0.65 < drawn.count("right") / 400 < 0.85


def test_the_shortest_path_is_walked() -> None:
    env = FrozenLake(size=4, p=0.8, random_goal=True)
    for seed in range(50):
        env.reset(seed=seed)
        moves = round(-env.potential() * env.size**2)
        for move in range(1, moves + 1):
            _, reward, over, _, _ = env.step(env.expert_action())
            assert over == (move == moves)
        assert reward == 1.0


def test_only_environments_of_ones_own_have_baselines_by_default() -> None:
    assert wanted(lake())
    assert not wanted(Config(env=EnvConfig(name="somewhere.py:Mine")))


@pytest.mark.parametrize("asked", [None, False])
def test_a_run_stores_and_tells_them(tmp_path: Path, asked: bool | None) -> None:
    result = train(
        small_config(tmp_path, eval={"episodes": 8, "baselines": asked}, log={"report": True}),
        sinks=(),
    )
    reader = RunReader(result.path)
    players = [one["player"] for one in reader.summary()["baselines"]]
    assert players == (["random player"] if asked is None else [])
    first = reader.metrics()[0]
    assert ("baseline/random_success" in first) == (asked is None)
    page = (result.path / "report.html").read_text()
    assert ('"player":"random player"' in page) == (asked is None)
