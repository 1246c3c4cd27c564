"""Group estimators, and credit on a whole Batch: closed forms, episodes of several rows, groups of
one, truncation."""

import pytest
import torch
from algo_batches import Turns, make_batch
from hypothesis import example, given
from hypothesis import strategies as st

from turnwise.algos import (
    PRESETS,
    build_algorithm,
    compute_advantages,
    dr_grpo,
    gigpo,
    grpo,
    rloo,
    token_gae,
)
from turnwise.algos.filters import filter_groups
from turnwise.algos.normalize import normalize_rewards
from turnwise.config.schema import AlgoConfig
from turnwise.data.batch import Batch

GROUPED = ["grpo", "dr_grpo", "rloo", "gigpo", "hgpo"]


def per_row(batch: Batch) -> list[float]:
    """Each row's advantage, which must be the same on all of its action tokens."""
    assert batch.advantages is not None
    found: list[float] = []
    for row, mask in zip(batch.advantages, batch.response_mask, strict=True):
        assert (row[mask] == row[mask][0]).all()
        found.append(float(row[mask][0]))
    return found


def run(batch: Batch, **algo: object) -> tuple[Batch, dict[str, float]]:
    return compute_advantages(batch, build_algorithm(AlgoConfig.model_validate(algo)))


def test_grpo_dr_grpo_and_rloo_by_hand() -> None:
    batch = make_batch(
        [[(2, 0.0), (1, 1.0)], [(3, 2.0)], [(1, 6.0)], [(2, 5.0)]], groups=[0, 0, 0, 0]
    )
    # returns 1 2 6 5, mean 3.5, unbiased variance (6.25 + 2.25 + 6.25 + 2.25) / 3
    distances = [-2.5, -1.5, 2.5, 1.5]
    std = (17 / 3) ** 0.5
    assert per_row(run(batch, name="dr_grpo")[0]) == pytest.approx(distances)
    assert per_row(run(batch, name="grpo")[0]) == pytest.approx(
        [d / std for d in distances], rel=1e-5
    )
    others = [1 - 13 / 3, 2 - 12 / 3, 6 - 8 / 3, 5 - 9 / 3]
    assert per_row(run(batch, name="rloo")[0]) == pytest.approx(others)


def test_groups_do_not_see_each_other() -> None:
    rows = [[(2, 1.0)], [(2, 3.0)], [(2, 10.0)], [(2, 30.0)]]
    together, metrics = run(make_batch(rows, groups=[4, 4, 9, 9]), name="dr_grpo")
    assert per_row(together) == pytest.approx([-1, 1, -10, 10])
    assert metrics["group/count"] == 2


@pytest.mark.parametrize("name", GROUPED)
def test_an_episode_of_several_rows_counts_once(name) -> None:
    """The first episode's two turns in one row, or in two: the same advantages for everybody."""
    whole = make_batch([[(2, 1.0), (2, 0.5)], [(3, 3.0)], [(1, 2.0)]], states=[[0, 1], [0], [0]])
    split = make_batch(
        [[(2, 1.0)], [(3, 3.0)], [(2, 0.5)], [(1, 2.0)]],
        episodes=[0, 1, 0, 2],
        first_turns=[0, 0, 1, 0],
        states=[[0], [0], [1], [0]],
    )
    one, metrics_one = run(whole, name=name)
    several, metrics_several = run(split, name=name)
    assert one.advantages is not None
    assert several.advantages is not None
    first = torch.cat(
        [
            several.advantages[0][split.response_mask[0]],
            several.advantages[2][split.response_mask[2]],
        ]
    )
    torch.testing.assert_close(first, one.advantages[0][whole.response_mask[0]])
    for row, other in ((1, 1), (2, 3)):
        torch.testing.assert_close(
            several.advantages[other][split.response_mask[other]],
            one.advantages[row][whole.response_mask[row]],
        )
    for key in ("episode/count", "episode/return_mean", "group/std_mean"):
        assert metrics_one[key] == pytest.approx(metrics_several[key])


@pytest.mark.parametrize("name", GROUPED)
def test_a_group_of_one_is_an_error_or_a_zero(name) -> None:
    batch = make_batch(
        [[(2, 1.0)], [(2, 3.0)], [(2, 7.0)]], groups=[0, 0, 1], states=[[0], [0], [1]]
    )
    with pytest.raises(ValueError, match="a group of one has no baseline"):
        run(batch, name=name)
    found, metrics = run(batch, name=name, singleton="zero")
    assert per_row(found)[2] == 0.0
    assert per_row(found)[1] > 0.0
    assert metrics["group/singletons"] == 1


@pytest.mark.parametrize("name", GROUPED)
def test_an_episode_that_is_not_trained_on_has_no_say(name) -> None:
    rows = [[(2, 1.0)], [(2, 3.0)], [(2, 0.0)]]
    batch = make_batch(rows, states=[[0], [0], [0]])
    loss_mask = batch.loss_mask.clone()
    loss_mask[2] = False
    found, metrics = run(batch.replace(loss_mask=loss_mask), name=name)
    wanted, _ = run(make_batch(rows[:2], states=[[0], [0]]), name=name)
    assert per_row(found)[:2] == pytest.approx(per_row(wanted))
    assert per_row(found)[2] == 0.0
    assert metrics["episode/count"] == 2


@pytest.mark.parametrize("reward", [0.1, 0.0, 1 / 3])
def test_equal_rewards_give_exactly_nothing(reward) -> None:
    batch = make_batch([[(2, reward)]] * 7)
    for name in ("grpo", "rloo"):
        found, metrics = run(batch, name=name)
        assert per_row(found) == [0.0] * 7
        assert metrics["group/zero_variance"] == 1


tenths = st.integers(-90, 90)


parts_of_equal_returns = st.lists(st.lists(tenths, max_size=4), min_size=2, max_size=6)
scales = st.sampled_from([1.0, 1e-3, 1e4])


def equal_episodes(total: int, parts: list[list[int]], scale: float) -> list[Turns]:
    """Episodes of different turns with one return."""
    return [[(1, scale * reward / 10) for reward in [*part, total - sum(part)]] for part in parts]


@given(
    total=tenths,
    parts=parts_of_equal_returns,
    scale=scales,
    how=st.sampled_from(["none", "state", "batch", "running"]),
)
@example(total=36, parts=[[], [], [2]], scale=1.0, how="batch")
def test_equal_returns_of_different_turns_give_exactly_nothing(total, parts, scale, how) -> None:
    """Float32 sums of different rewards differ in their last bits, and more so once they were
    normalised."""
    equal = equal_episodes(total, parts, scale)
    others: list[Turns] = [[(1, 7.0 * scale)], [(1, -3.0 * scale)]]
    batch = make_batch([*equal, *others], groups=[0] * len(equal) + [1, 1])
    batch, _ = normalize_rewards(batch, how=how)
    for name in GROUPED:
        found, metrics = run(batch, name=name)
        assert per_row(found)[: len(equal)] == [0.0] * len(equal)
        assert metrics["group/zero_variance"] == 1
    rows, _ = filter_groups(batch, build_algorithm(AlgoConfig(name="dapo")))
    assert rows.tolist() == [len(equal), len(equal) + 1]


@given(
    total=tenths,
    parts=parts_of_equal_returns,
    scale=scales,
    how=st.sampled_from(["none", "batch", "running"]),
)
def test_turns_of_one_state_and_equal_worth_give_gigpo_nothing(total, parts, scale, how) -> None:
    """Every episode passes state 0 first, and is worth the same from there on."""
    equal = equal_episodes(total, parts, scale)
    states = [
        [0, *(100 * row + turn for turn in range(1, len(turns)))] for row, turns in enumerate(equal)
    ]
    others: list[Turns] = [[(1, 7.0 * scale)], [(1, -3.0 * scale)]]
    groups = [0] * len(equal) + [1, 1]
    batch = make_batch([*equal, *others], groups=groups, states=[*states, [0], [0]])
    batch, _ = normalize_rewards(batch, how=how)
    found, _ = run(batch, name="gigpo", high_level_gamma=1.0)
    assert found.advantages is not None
    first = batch.state_ids[: len(equal)] == 0
    assert (found.advantages[: len(equal)][first] == 0).all()


@given(total=tenths, parts=parts_of_equal_returns, scale=scales, value=tenths, bootstrap=tenths)
@pytest.mark.parametrize("name", ["reinforce_pp", "ppo", "bi_level_gae", "turn_gae"])
def test_equal_advantages_are_not_whitened_into_noise(
    name, total, parts, scale, value, bootstrap
) -> None:
    """One trained token an episode, worth the same in all of them: nothing can be learned from the
    last bits."""
    equal = equal_episodes(total, parts, scale)
    batch = make_batch(equal, truncated=[True] * len(equal))
    first = batch.turn_ids == 0
    batch = batch.replace(
        loss_mask=first,
        values=torch.where(batch.response_mask, scale * value / 10, 0.0),
        bootstrap=torch.full((len(equal),), scale * bootstrap / 10),
    )
    rates = {
        "reinforce_pp": {},
        "turn_gae": {"high_level_gamma": 1.0},
        "bi_level_gae": {"high_level_gamma": 1.0},
    }
    found, _ = run(batch, name=name, whiten=True, **rates.get(name, {}))
    assert found.advantages is not None
    assert (found.advantages == 0).all()


@given(base=st.floats(-1e3, 1e3), gap=st.floats(1e-2, 10.0))
@pytest.mark.parametrize("name", ["reinforce_pp", "ppo", "bi_level_gae", "turn_gae"])
def test_advantages_that_differ_are_whitened(name, base, gap) -> None:
    batch = make_batch([[(1, base)], [(1, base + gap)]])
    found, _ = run(batch.replace(values=torch.zeros_like(batch.rewards)), name=name, whiten=True)
    assert per_row(found) == pytest.approx([-(0.5**0.5), 0.5**0.5], rel=1e-2)


@given(base=st.floats(-1e3, 1e3), gap=st.floats(1e-3, 10.0))
def test_returns_that_differ_are_told_apart(base, gap) -> None:
    found, metrics = run(make_batch([[(1, base)], [(1, base + gap)]]), name="grpo")
    assert metrics["group/zero_variance"] == 0
    assert per_row(found) == pytest.approx([-(0.5**0.5), 0.5**0.5], rel=1e-2)


def test_turns_of_equal_worth_give_gigpo_nothing() -> None:
    """From one state on, 0.1 + 0.2 and 0.3 + 0.0: the same, but for the last bit."""
    batch = make_batch([[(1, 0.1), (1, 0.2)], [(1, 0.3), (1, 0.0)]], states=[[0, 1], [0, 2]])
    found, _ = run(batch, name="gigpo", high_level_gamma=1.0)
    assert per_row(found) == [0.0, 0.0]


def test_gigpo_adds_the_turn_among_its_peers() -> None:
    """Two episodes pass state 5: returns to go 2 and 0 there; state 6 and 7 are met once."""
    batch = make_batch([[(2, 0.0), (1, 2.0)], [(1, 0.0), (3, 0.0)]], states=[[5, 6], [5, 7]])
    found, metrics = run(batch, name="gigpo", high_level_gamma=0.5, gigpo_weight=2.0)
    assert found.advantages is not None
    unit = 0.5**0.5  # two numbers are 1 / sqrt(2) standard deviations from their mean
    first = found.advantages[0][batch.turn_ids[0] == 0]
    torch.testing.assert_close(first, torch.full_like(first, 3 * unit), atol=1e-4, rtol=0)
    second = found.advantages[0][batch.turn_ids[0] == 1]
    torch.testing.assert_close(second, torch.full_like(second, unit), atol=1e-4, rtol=0)
    assert metrics["gigpo/turns_with_peers"] == 0.5


def test_gigpo_without_deviations_only_subtracts_means() -> None:
    """Episodes earn 2 and 0; from state 5 on they earn 0.5 * 2 and 0."""
    batch = make_batch([[(2, 0.0), (1, 2.0)], [(1, 0.0), (3, 0.0)]], states=[[5, 6], [5, 7]])
    found, _ = run(batch, name="gigpo", high_level_gamma=0.5, gigpo_weight=2.0, gigpo_std=False)
    assert found.advantages is not None
    first = found.advantages[0][batch.turn_ids[0] == 0]
    torch.testing.assert_close(first, torch.full_like(first, 1.0 + 2.0 * 0.5))
    second = found.advantages[0][batch.turn_ids[0] == 1]
    torch.testing.assert_close(second, torch.full_like(second, 1.0))


def test_gigpo_keeps_the_states_of_groups_apart() -> None:
    rewards, mask = torch.tensor([[1.0], [2.0], [5.0], [9.0]]), torch.ones(4, 1, dtype=torch.bool)
    states = torch.zeros(4, 1, dtype=torch.int64)
    groups = torch.tensor([0, 0, 1, 1])
    found, _, peers = gigpo(rewards, mask, group_ids=groups, state_ids=states, gamma=1.0)
    plain, _ = grpo(rewards, mask, group_ids=groups)
    torch.testing.assert_close(found, 2 * plain)
    assert peers == 1.0


def test_dr_grpo_and_rloo_are_proportional() -> None:
    rewards, mask = (
        torch.randn(5, 3, generator=torch.Generator().manual_seed(0)),
        torch.ones(5, 3, dtype=torch.bool),
    )
    groups = torch.zeros(5, dtype=torch.int64)
    torch.testing.assert_close(
        rloo(rewards, mask, group_ids=groups)[0],
        dr_grpo(rewards, mask, group_ids=groups)[0] * 5 / 4,
    )


def test_rows_of_an_episode_share_a_group() -> None:
    with pytest.raises(ValueError, match="belongs to one group"):
        run(
            make_batch(
                [[(1, 1.0)], [(1, 1.0)]], groups=[0, 1], episodes=[3, 3], first_turns=[0, 1]
            ),
            name="grpo",
        )


def test_reinforce_pp_is_the_whitened_return_to_go() -> None:
    batch = make_batch([[(2, 0.0), (1, 1.0)], [(1, 3.0)]], groups=[0, 1])
    found, _ = run(batch, name="reinforce_pp", gamma=0.5)
    assert found.advantages is not None
    assert found.returns is not None
    torch.testing.assert_close(
        found.returns[0][batch.response_mask[0]], torch.tensor([0.25, 0.5, 1.0])
    )
    raw = torch.tensor([0.25, 0.5, 1.0, 3.0])
    torch.testing.assert_close(
        found.advantages[batch.response_mask], (raw - raw.mean()) / raw.std()
    )


CRITICS = [name for name, preset in PRESETS.items() if preset.needs_critic]


@pytest.mark.parametrize("name", CRITICS)
def test_truncated_bootstraps_and_terminated_does_not(name) -> None:
    """Invariant 6. What stands in Batch.bootstrap of a terminated row is never read."""
    batch = make_batch([[(2, 0.0), (1, 1.0)], [(3, 0.0)]], truncated=[False, True])
    algo = {"name": name, "whiten": False}
    ended, _ = run(batch, **algo)
    cut, metrics = run(batch.replace(bootstrap=torch.tensor([torch.nan, 2.0])), **algo)
    assert ended.advantages is not None
    assert cut.advantages is not None
    torch.testing.assert_close(cut.advantages[0], ended.advantages[0])
    assert (
        cut.advantages[1][batch.response_mask[1]]
        > ended.advantages[1][batch.response_mask[1]] + 1.5
    ).all()
    assert metrics["episode/truncated"] == 1


@pytest.mark.parametrize("name", CRITICS)
def test_a_critic_that_is_missing_is_an_error(name) -> None:
    batch = make_batch([[(2, 1.0)]], truncated=[True])
    with pytest.raises(ValueError, match=r"needs Batch\.values"):
        run(batch.replace(values=None), name=name)
    with pytest.raises(ValueError, match=r"set Batch\.bootstrap"):
        run(batch.replace(bootstrap=None), name=name)


@pytest.mark.parametrize("name", list(PRESETS))
def test_nan_outside_the_response_reaches_nothing(name) -> None:
    """Invariant 12, on the estimators."""
    batch = make_batch([[(2, 1.0), (1, 2.0)], [(3, 3.0)]], states=[[0, 1], [0]])
    dirty = {
        field: torch.where(batch.response_mask, tensor, torch.nan)
        for field, tensor in (
            ("rewards", batch.rewards),
            ("values", batch.values),
            ("logprobs", batch.logprobs),
        )
    }
    clean, metrics = run(batch, name=name)
    found, dirty_metrics = run(batch.replace(**dirty), name=name)
    torch.testing.assert_close(found.advantages, clean.advantages)
    torch.testing.assert_close(found.returns, clean.returns)
    assert dirty_metrics == metrics


def test_token_rewards_go_to_their_own_token() -> None:
    batch = make_batch([[(3, 1.0)], [(2, 0.5)]])
    penalty = torch.where(batch.response_mask, -0.1, torch.nan)
    algorithm = build_algorithm(AlgoConfig(name="ppo", whiten=False, lam=0.5))
    found, _ = compute_advantages(batch, algorithm, token_rewards=penalty)
    wanted, _ = token_gae(
        batch.rewards + torch.where(batch.response_mask, -0.1, 0.0),
        batch.values,
        batch.response_mask,
        gamma=1.0,
        lam=0.5,
    )
    torch.testing.assert_close(found.advantages, wanted)
    with pytest.raises(ValueError, match="cannot use rewards of single tokens"):
        compute_advantages(batch, build_algorithm(AlgoConfig(name="grpo")), token_rewards=penalty)
    with pytest.raises(ValueError, match="must have the shape"):
        compute_advantages(batch, algorithm, token_rewards=penalty[:, 1:])


def test_whitening_counts_what_is_trained() -> None:
    batch = make_batch([[(4, 1.0)], [(4, 0.0)]])
    loss_mask = batch.loss_mask.clone()
    loss_mask[0, 2] = False
    found, metrics = run(batch.replace(loss_mask=loss_mask), name="ppo")
    assert found.advantages is not None
    assert metrics["advantage/mean"] == pytest.approx(0, abs=1e-6)
    assert metrics["advantage/std"] == pytest.approx(1, abs=1e-5)
    assert found.advantages[0, 2] == 0


def test_explained_variance() -> None:
    batch = make_batch([[(3, 1.0)], [(3, 5.0)]])
    _, metrics = run(
        batch.replace(values=batch.rewards.sum(-1, keepdim=True) * batch.response_mask), name="ppo"
    )
    assert metrics["critic/explained_variance"] == pytest.approx(1.0)
    _, metrics = run(batch.replace(values=torch.zeros_like(batch.rewards)), name="ppo")
    assert metrics["critic/explained_variance"] == pytest.approx(0.0)
