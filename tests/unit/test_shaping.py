"""Shaping: costs and potentials per turn, a best policy that stays the best, and rewards on a
common scale."""

from random import Random

import numpy as np
import pytest
import torch
from draws import examples
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from turnwise.algos.normalize import RewardNormalizer, RunningStats, normalize_rewards
from turnwise.config.schema import EnvConfig, ShapingConfig
from turnwise.data.batch import Batch, collate
from turnwise.envs.base import EnvError, hint_of
from turnwise.envs.games.frozen_lake import FrozenLake
from turnwise.envs.registry import make_env
from turnwise.envs.shaping import shaping_parts
from turnwise.envs.text_turns import TextTurns
from turnwise.types import Message, Sample

Floats = NDArray[np.float64]
Table = dict[int, dict[int, list[tuple[float, int, float, bool]]]]
NONE = ShapingConfig()


def lake_table(seed: int) -> Table:
    """The transition table of slippery ice on one of our maps, as Gymnasium computes it."""
    import gymnasium

    text = FrozenLake().reset(seed=seed).replace(" ", "")
    rows = text.replace("P", "S").replace("_", "F").replace("O", "H").split("\n")
    return gymnasium.make("FrozenLake-v1", desc=rows, is_slippery=True).unwrapped.P  # pyright: ignore


def lake_potentials(seed: int) -> Floats:
    """Our environment's potential in every cell, read off the environment itself by walking
    everywhere."""
    found = np.zeros(16)
    queue: list[tuple[str, ...]] = [()]
    seen = {0}
    while queue:
        path = queue.pop()
        for action in FrozenLake.actions:
            lake = FrozenLake()
            lake.reset(seed=seed)
            ended = [lake.step(move)[2] for move in (*path, action)][-1]
            grid = lake.render().replace(" ", "").replace("\n", "")
            cell = next(index for index, sign in enumerate(grid) if sign in "PXV")
            if not ended:
                found[cell] = lake.potential()
                if cell not in seen:
                    seen.add(cell)
                    queue.append((*path, action))
    return found


def best_actions(
    table: Table, shaping: ShapingConfig, potential: Floats, *, gamma: float
) -> list[set[int]]:
    """The optimal actions of every state that is no end, by exact value iteration on the shaped
    rewards."""
    count = len(table)
    chances, rewards = np.zeros((count, 4, count)), np.zeros((count, 4))
    ends: set[int] = set()
    for state, moves in table.items():
        for action, outcomes in moves.items():
            for chance, after, reward, done in outcomes:
                value = 0.0 if done else float(potential[after])
                added = shaping_parts(
                    {}, shaping, before=float(potential[state]), after=value, name="lake"
                )
                rewards[state, action] += chance * (reward + sum(added.values()))
                if done:
                    ends.add(after)
                else:
                    chances[state, action, after] += chance
    values = np.zeros(count)
    for _ in range(20_000):
        scores = rewards + gamma * chances @ values
        if np.abs(scores.max(1) - values).max() < 1e-14:
            break
        values = scores.max(1)
    scores = rewards + gamma * chances @ values
    best = scores.max(1, keepdims=True)
    return [
        set(np.flatnonzero(scores[s] >= best[s] - 1e-9).tolist())
        for s in range(count)
        if s not in ends
    ]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("gamma", [0.95, 0.8])
def test_shaping_by_the_lakes_potential_keeps_the_best_policy(seed: int, gamma: float) -> None:
    table, potential = lake_table(seed), lake_potentials(seed)
    assert len(set(potential.tolist())) > 3
    plain = best_actions(table, NONE, potential, gamma=gamma)
    shaped = ShapingConfig(potential_coef=5.0, potential_gamma=gamma)
    assert best_actions(table, shaped, potential, gamma=gamma) == plain


@examples(25)
@given(
    st.lists(st.floats(-3, 3), min_size=16, max_size=16),
    st.integers(0, 20),
    st.sampled_from([0.9, 0.99]),
)
def test_shaping_by_any_potential_keeps_the_best_policy(
    potential: list[float], seed: int, gamma: float
) -> None:
    table, potentials = lake_table(seed), np.array(potential)
    shaped = ShapingConfig(potential_coef=1.0, potential_gamma=gamma)
    assert best_actions(table, shaped, potentials, gamma=gamma) == best_actions(
        table, NONE, potentials, gamma=gamma
    )


def test_another_discount_than_the_algorithms_changes_the_best_policy() -> None:
    table, potential = lake_table(0), lake_potentials(0)
    wrong = ShapingConfig(potential_coef=5.0, potential_gamma=1.0)
    assert best_actions(table, wrong, potential, gamma=0.8) != best_actions(
        table, NONE, potential, gamma=0.8
    )


@pytest.mark.parametrize("seed", range(3))
def test_the_potential_of_an_episode_telescopes_in_the_environment(seed: int) -> None:
    shaping = ShapingConfig(potential_coef=2.0, turn_cost=-0.25)
    env = make_env(EnvConfig(name="frozen_lake", options={"max_steps": 10_000}, shaping=shaping))
    assert isinstance(env, TextTurns)
    env.reset(env.make_task(seed, "train"))
    start = FrozenLake()
    start.reset(seed=env.make_task(seed, "train").seed)
    rng, total, terminated = Random(seed), 0.0, False
    while not terminated:
        result = env.step(
            Message(role="assistant", content=hint_of(env, "random", rng.getrandbits(32)))
        )
        assert result.reward_parts["turn_cost"] == -0.25
        total += result.reward_parts["potential"]
        terminated = result.terminated
    assert total == pytest.approx(-2.0 * start.potential())


def test_costs_potential_and_clip_add_up() -> None:
    shaping = ShapingConfig(turn_cost=-0.5, potential_coef=1.0, potential_gamma=0.5, clip=0.4)
    parts = {"env": 1.0, "format": -0.1}
    added = shaping_parts(parts, shaping, before=1.0, after=4.0, name="x")
    assert added["potential"] == 0.5 * 4.0 - 1.0
    assert sum(parts.values()) + sum(added.values()) == pytest.approx(0.4)


def test_an_environment_without_a_potential_is_told() -> None:
    env = make_env(EnvConfig(name="bandit", shaping=ShapingConfig(potential_coef=1.0)))
    env.reset(env.make_task(0, "train"))
    with pytest.raises(EnvError, match="needs a potential"):
        env.step(Message(role="assistant", content="<think></think><answer>x</answer>"))


def rows_of(episodes: list[tuple[int, list[float]]]) -> Batch:
    """(group, turn rewards) per episode; every turn is one token after one prompt token."""
    samples: list[Sample] = []
    for number, (group, rewards) in enumerate(episodes):
        mask = (False, True) * len(rewards)
        samples.append(
            Sample(
                ids=(1,) * len(mask),
                response_mask=mask,
                loss_mask=mask,
                logprobs=(0.0,) * len(mask),
                turn_ids=tuple(
                    t if odd else -1 for t in range(len(rewards)) for odd in (False, True)
                ),
                rewards=tuple(r if odd else 0.0 for r in rewards for odd in (False, True)),
                state_keys={turn: "s" for turn in range(len(rewards))},
                episode_id=str(number),
                group_id=group,
                truncated=False,
            )
        )
    return collate(samples)


EPISODES = [(0, [0.5, 0.5]), (0, [3.0]), (1, [0.0, 0.0, 0.0]), (1, [10.0])]


def returns(batch: Batch) -> list[float]:
    return batch.rewards.sum(-1).tolist()


def test_by_state_each_group_has_mean_zero_and_std_one() -> None:
    batch, _ = normalize_rewards(rows_of(EPISODES), how="state")
    assert returns(batch.validate()) == pytest.approx(
        [-(0.5**0.5), 0.5**0.5, -(0.5**0.5), 0.5**0.5], abs=1e-5
    )


def test_by_batch_without_std_only_the_mean_goes_and_only_at_the_end() -> None:
    before = rows_of(EPISODES)
    batch, _ = normalize_rewards(before, how="batch", std=False)
    assert returns(batch) == pytest.approx([1.0 - 3.5, 3.0 - 3.5, -3.5, 6.5])
    assert batch.rewards[0, 1] == 0.5  # the first turn keeps its reward
    assert torch.equal(before.rewards, rows_of(EPISODES).rewards)  # nothing was changed in place


def test_running_statistics_are_those_of_all_batches_so_far() -> None:
    first, second = rows_of(EPISODES[:2]), rows_of(EPISODES[2:])
    _, stats = normalize_rewards(first, how="running")
    batch, stats = normalize_rewards(second, how="running", running=stats)
    every = np.array([1.0, 3.0, 0.0, 10.0])
    assert (stats.count, stats.mean, stats.std) == (
        4,
        pytest.approx(every.mean()),
        pytest.approx(every.std(ddof=1)),
    )
    assert returns(batch) == pytest.approx(
        ((every - every.mean()) / every.std(ddof=1))[2:].tolist(), abs=1e-5
    )


@examples(25)
@given(st.lists(st.lists(st.floats(-1e3, 1e3), max_size=5), max_size=5))
def test_running_statistics_do_not_depend_on_the_batches(batches: list[list[float]]) -> None:
    stats = RunningStats()
    for values in batches:
        stats = stats.update(values)
    whole = RunningStats().update([value for values in batches for value in values])
    assert (stats.count, stats.mean, stats.std) == (
        whole.count,
        pytest.approx(whole.mean, abs=1e-7),
        pytest.approx(whole.std, abs=1e-6),
    )


def test_equal_rewards_become_zero_and_a_group_of_one_is_refused() -> None:
    batch, _ = normalize_rewards(rows_of([(0, [0.1, 0.2]), (0, [0.1, 0.2])]), how="state")
    assert returns(batch) == pytest.approx([0.0, 0.0], abs=1e-6)
    with pytest.raises(ValueError, match="1 groups have one member"):
        normalize_rewards(rows_of([(0, [1.0]), (0, [2.0]), (1, [5.0])]), how="state")
    batch, _ = normalize_rewards(
        rows_of([(0, [1.0]), (0, [2.0]), (1, [5.0])]), how="state", singleton="zero"
    )
    assert returns(batch)[2] == 0.0


def test_every_environment_is_normalised_by_its_own_config() -> None:
    shaping = {
        "a": ShapingConfig(normalize="batch", normalize_std=False),
        "b": ShapingConfig(normalize="running"),
    }
    normalizer = RewardNormalizer(shaping)
    batch = normalizer(rows_of(EPISODES), ["a", "a", "c", "b"])
    assert returns(batch) == pytest.approx([-1.0, 1.0, 0.0, 0.0])
    state = normalizer.state_dict()
    assert state == {"b": {"count": 1, "mean": 10.0, "squares": 0.0}}
    other = RewardNormalizer(shaping)
    other.load_state_dict(state)
    assert other.state_dict() == state
    with pytest.raises(ValueError, match="resume with the config"):
        RewardNormalizer({}).load_state_dict(state)


def test_an_episode_of_several_rows_counts_once() -> None:
    batch = rows_of([(0, [1.0, 1.0]), (0, [2.0]), (0, [6.0])])
    # The second row continues the first one's episode.
    turn_ids = batch.turn_ids.clone()
    turn_ids[1, 1] = 2
    batch = batch.replace(episode_ids=torch.tensor([0, 0, 1]), turn_ids=turn_ids)
    changed, _ = normalize_rewards(batch, how="batch", std=False)
    assert changed.rewards[0].sum() + changed.rewards[1].sum() == pytest.approx(4.0 - 5.0)
    assert changed.rewards[1, 1] == pytest.approx(2.0 - 5.0)
