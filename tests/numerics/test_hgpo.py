"""HGPO: by hand, against plain loops, and what changes nothing."""

import math
import random

import pytest
import torch
from algo_batches import make_batch
from hypothesis import given
from hypothesis import strategies as st

from turnwise.algos import build_algorithm, compute_advantages, hgpo
from turnwise.config.schema import AlgoConfig
from turnwise.data.batch import Batch

Episode = list[tuple[int, float]]  # (state, reward) of each turn


def run(batch: Batch, **algo: object) -> tuple[list[list[float]], dict[str, float]]:
    """One advantage per turn of each row, the same on all of its tokens, and the metrics."""
    algorithm = build_algorithm(AlgoConfig.model_validate({"name": "hgpo", **algo}))
    found, metrics = compute_advantages(batch, algorithm)
    assert found.advantages is not None
    rows: list[list[float]] = []
    for row, turns in zip(found.advantages, batch.turn_ids, strict=True):
        rows.append([])
        for turn in sorted(set(turns[turns >= 0].tolist())):
            numbers = row[turns == turn]
            assert (numbers == numbers[0]).all()
            rows[-1].append(float(numbers[0]))
    return rows, metrics


def batch_of(episodes: list[Episode], groups: list[int] | None = None, **extra: int) -> Batch:
    return make_batch(
        [[(1 + turn % 3, reward) for turn, (_, reward) in enumerate(e)] for e in episodes],
        states=[[state for state, _ in e] for e in episodes],
        groups=groups,
        **extra,
    )


def plain_loops(
    episodes: list[Episode],
    groups: list[int],
    *,
    gamma: float,
    history: int,
    alpha: float,
    std: bool,
    with_episode: bool,
) -> list[list[float]]:
    """The formula of turnwise/algos/hgpo.py, turn by turn."""
    returns = [
        [
            sum(gamma**ahead * reward for ahead, (_, reward) in enumerate(e[turn:]))
            for turn in range(len(e))
        ]
        for e in episodes
    ]
    totals = [sum(reward for _, reward in e) for e in episodes]
    advantages: list[list[float]] = []
    for number, episode in enumerate(episodes):
        group = [other for other in range(len(episodes)) if groups[other] == groups[number]]
        advantages.append([])
        for turn in range(len(episode)):
            items: list[tuple[float, float]] = []
            if with_episode:
                items.append((1.0, distance(totals[number], [totals[i] for i in group], std, 1)))
            for shared in range(1, history + 2):
                if shared > turn + 1:
                    break
                wanted = [state for state, _ in episode[turn - shared + 1 : turn + 1]]
                peers = [
                    returns[other][at]
                    for other in group
                    for at in range(shared - 1, len(episodes[other]))
                    if [s for s, _ in episodes[other][at - shared + 1 : at + 1]] == wanted
                ]
                weight = float(shared + 1) ** alpha
                items.append((weight, distance(returns[number][turn], peers, std, 0)))
            items = [(weight, far) for weight, far in items if abs(far) > 1e-6]
            total = sum(weight for weight, _ in items)
            advantages[-1].append(sum(w * far for w, far in items) / total if items else 0.0)
    return advantages


def distance(score: float, scores: list[float], std: bool, less: int) -> float:
    if len(scores) < 2:
        return 0.0
    mean = sum(scores) / len(scores)
    if not std:
        return score - mean
    spread = math.sqrt(sum((s - mean) ** 2 for s in scores) / (len(scores) - less))
    return (score - mean) / (spread + 1e-6)


def random_episodes(seed: int) -> tuple[list[Episode], list[int]]:
    draw = random.Random(seed)
    episodes = [
        [(draw.randrange(3), draw.choice([0.0, 0.0, 1.0, -0.5])) for _ in range(draw.randint(1, 6))]
        for _ in range(10)
    ]
    return episodes, [number // 5 for number in range(10)]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("with_episode", [False, True])
@pytest.mark.parametrize("std", [True, False])
@pytest.mark.parametrize(("history", "alpha"), [(2, 1.0), (0, 1.0), (1, 0.0), (9, 2.0)])
def test_equal_to_plain_loops(history, alpha, std, with_episode, seed) -> None:
    episodes, groups = random_episodes(seed)
    rates = {"gamma": 0.9, "history": history, "alpha": alpha}
    wanted = plain_loops(episodes, groups, std=std, with_episode=with_episode, **rates)
    found, _ = run(
        batch_of(episodes, groups, pad=3),
        high_level_gamma=0.9,
        hgpo_history=history,
        hgpo_alpha=alpha,
        hgpo_std=std,
        hgpo_episode=with_episode,
    )
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours == pytest.approx(theirs, abs=2e-5)


TREE: list[Episode] = [
    [(5, 0.0), (6, 4.0)],  # worth 4 from both turns on
    [(5, 0.0), (6, 2.0)],
    [(7, 0.0), (6, 0.0)],  # another way to state 6
]


def test_longer_histories_weigh_more() -> None:
    """State 6 is met three times (returns 4 2 0, mean 2), by way of state 5 twice (4 2, mean 3)."""
    found, metrics = run(batch_of(TREE), high_level_gamma=1.0, hgpo_std=False)
    # first turn: 4 and 2 from state 5. Last turn: (2 * (4 - 2) + 3 * (4 - 3)) / 5; in the second
    # episode the return is the mean of the three, so the comparison of two counts alone.
    assert found == [pytest.approx([1.0, 1.4]), pytest.approx([-1.0, -1.0]), pytest.approx([0, -2])]
    assert metrics["hgpo/turns_with_peers"] == pytest.approx(5 / 6)
    # Informative: one for both first turns from 5, then two, one and one; none for state 7.
    assert metrics["hgpo/comparisons"] == pytest.approx((1 + 2 + 1 + 1 + 0 + 1) / 6)


def test_settings_by_hand() -> None:
    batch = batch_of(TREE)
    alike, _ = run(batch, high_level_gamma=1.0, hgpo_std=False, hgpo_alpha=0.0)
    assert alike[0] == pytest.approx([1.0, 1.5])
    short, _ = run(batch, high_level_gamma=1.0, hgpo_std=False, hgpo_history=0)
    assert short == [pytest.approx([1, 2]), pytest.approx([-1, 0]), pytest.approx([0, -2])]
    # The episodes are worth 4 2 0 as well: 2, 0 and -2 with weight 1, and 0 says nothing.
    whole, _ = run(batch, high_level_gamma=1.0, hgpo_std=False, hgpo_episode=True)
    assert whole[0] == pytest.approx([(1 * 2 + 2 * 1) / 3, (1 * 2 + 2 * 2 + 3 * 1) / 6])
    assert whole[1] == pytest.approx([-1.0, -1.0])
    assert whole[2] == pytest.approx([-2.0, -2.0])
    # Two returns are one standard deviation of the population from their mean.
    divided, _ = run(batch, high_level_gamma=1.0, hgpo_history=0)
    assert divided[0][0] == pytest.approx(1.0, abs=1e-5)
    assert divided[0][1] == pytest.approx(1.5**0.5, abs=1e-5)


@pytest.mark.parametrize("with_episode", [False, True])
def test_observations_padding_and_rows_change_nothing(with_episode) -> None:
    episodes, groups = random_episodes(7)
    wanted, _ = run(batch_of(episodes, groups), hgpo_episode=with_episode)
    wide, _ = run(batch_of(episodes, groups, gap=5, pad=4), hgpo_episode=with_episode)
    assert wide == wanted
    rows = [(number, turn) for number, e in enumerate(episodes) for turn in range(len(e))]
    random.Random(0).shuffle(rows)
    split = make_batch(
        [[(2, episodes[number][turn][1])] for number, turn in rows],
        states=[[episodes[number][turn][0]] for number, turn in rows],
        episodes=[number for number, _ in rows],
        first_turns=[turn for _, turn in rows],
        groups=[groups[number] for number, _ in rows],
    )
    found, _ = run(split, hgpo_episode=with_episode)
    for (number, turn), (advantage,) in zip(rows, found, strict=True):
        assert advantage == pytest.approx(wanted[number][turn], abs=1e-6)


@given(
    rewards=st.lists(st.integers(-9, 9), min_size=2, max_size=5), scale=st.sampled_from([1, 1e4])
)
def test_equal_returns_give_exactly_nothing(rewards, scale) -> None:
    """Two episodes pass state 0 first and are worth the same from there on, by sums of different
    rewards, which are rounded differently."""
    parts = [scale * reward / 10 for reward in rewards]
    first: Episode = [(turn, part) for turn, part in enumerate(parts)]
    second: Episode = [(0, sum(parts)), (90, 0.0)]
    found, metrics = run(batch_of([first, second]), high_level_gamma=1.0, hgpo_episode=True)
    assert found == [[0.0] * len(first), [0.0, 0.0]]
    assert metrics["hgpo/comparisons"] == 0.0
    assert metrics["group/zero_variance"] == 1


def test_a_return_within_rounding_of_the_mean_has_no_weight() -> None:
    """0.1, 0.2 and 0.3 in float32: the middle is the mean but for its last bit."""
    middle: list[Episode] = [[(0, 0.1)], [(0, 0.2)], [(0, 0.3)]]
    longer: list[Episode] = [[(1, 0.0), *episode] for episode in middle]
    longer[2] = [(2, 0.0), (0, 0.3)]
    found, metrics = run(batch_of(longer), high_level_gamma=1.0, hgpo_std=False)
    # By way of state 1: 0.1 and 0.2, so +0.05; the comparison of all three says nothing.
    assert found[1][1] == pytest.approx(0.05, abs=1e-6)
    assert metrics["hgpo/comparisons"] == pytest.approx((1 + 1 + 0 + 2 + 1 + 1) / 6)


def test_groups_do_not_see_each_other() -> None:
    rewards, mask = torch.tensor([[1.0], [2.0], [5.0], [9.0]]), torch.ones(4, 1, dtype=torch.bool)
    states = torch.zeros(4, 1, dtype=torch.int64)
    found, _, metrics = hgpo(
        rewards,
        mask,
        group_ids=torch.tensor([0, 0, 1, 1]),
        state_ids=states,
        gamma=1.0,
        normalize_std=False,
    )
    assert found.squeeze(-1).tolist() == [-0.5, 0.5, -2.0, 2.0]
    assert metrics["hgpo/turns_with_peers"] == 1.0
