"""GAE on tokens, on turns and on both levels: against plain loops, closed forms, and what must
change nothing."""

import pytest
import torch
from draws import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from turnwise.algos import compute_bi_level_gae_advantage_return, masked_whiten, token_gae, turn_gae
from turnwise.algos.layout import build_layout, discounted_suffix_sums
from turnwise.testing import reference as slow

RATES = st.sampled_from([0.0, 0.3, 0.9, 1.0])
DISCOUNTS = st.sampled_from([0.5, 0.97, 1.0])


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Rewards, values, mask, turn ids and bootstrap; turns may touch, rows may be empty."""
    rows, width = draw(st.integers(1, 4)), draw(st.integers(1, 40))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    mask = torch.rand(rows, width, generator=generator) < draw(
        st.sampled_from([0.0, 0.3, 0.8, 1.0])
    )
    turn_ids = (torch.rand(rows, width, generator=generator) < 0.3).long().cumsum(1)
    rewards = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    values = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    bootstrap = torch.randn(rows, generator=generator, dtype=torch.float64)
    return rewards, values, mask, torch.where(mask, turn_ids, -1), bootstrap


def same(found: tuple[Tensor, Tensor], wanted: slow.Result) -> None:
    for fast, loops in zip(found, wanted, strict=True):
        torch.testing.assert_close(
            fast, torch.tensor(loops, dtype=fast.dtype), atol=1e-9, rtol=1e-9
        )


@examples(60)
@given(
    cases(), DISCOUNTS, RATES, DISCOUNTS, RATES, st.booleans(), st.sampled_from(["last", "first"])
)
def test_bi_level_gae_equals_plain_loops(
    case, gamma, lam, high_gamma, high_lam, explicit, turn_value
) -> None:
    rewards, values, mask, turn_ids, bootstrap = case
    ids = turn_ids if explicit else None
    for last_token in ("replace", "add"):
        found = compute_bi_level_gae_advantage_return(
            rewards, values, mask, gamma, lam, high_gamma, high_level_lam=high_lam, turn_ids=ids,
            bootstrap=bootstrap, turn_value=turn_value, last_token=last_token,
        )  # fmt: skip
        wanted = slow.bi_level_gae(
            rewards.tolist(), values.tolist(), mask.tolist(), gamma=gamma, lam=lam, high_level_gamma=high_gamma,
            high_level_lam=high_lam, turn_ids=None if ids is None else ids.tolist(), bootstrap=bootstrap.tolist(),
            turn_value=turn_value, last_token=last_token,
        )  # fmt: skip
        same(found, wanted)


@examples(40)
@given(cases(), DISCOUNTS, RATES)
def test_token_and_turn_gae_equal_plain_loops(case, gamma, lam) -> None:
    rewards, values, mask, turn_ids, bootstrap = case
    lists = (rewards.tolist(), values.tolist(), mask.tolist())
    same(
        token_gae(rewards, values, mask, gamma=gamma, lam=lam, bootstrap=bootstrap),
        slow.token_gae(*lists, gamma=gamma, lam=lam, bootstrap=bootstrap.tolist()),
    )
    same(
        turn_gae(
            rewards, values, mask, gamma=gamma, lam=lam, turn_ids=turn_ids, bootstrap=bootstrap
        ),
        slow.turn_gae(
            *lists, gamma=gamma, lam=lam, turn_ids=turn_ids.tolist(), bootstrap=bootstrap.tolist()
        ),
    )


def episode(
    rewards: list[float], lengths: list[int], *, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One row in float64: rewards on turn ends, random values, mask, turn ids. Two observations
    before each turn."""
    generator = torch.Generator().manual_seed(seed)
    mask, ids, reward = [], [], []
    for turn, (length, amount) in enumerate(zip(lengths, rewards, strict=True)):
        mask += [False, False] + [True] * length
        ids += [-1, -1] + [turn] * length
        reward += [0.0] * (length + 1) + [amount]
    values = torch.randn(1, len(mask), generator=generator, dtype=torch.float64)
    return (
        torch.tensor([reward], dtype=torch.float64),
        values,
        torch.tensor([mask]),
        torch.tensor([ids]),
    )


@pytest.mark.parametrize("turn_value", ["last", "first"])
def test_with_unit_rates_it_is_the_turn_discounted_sum_minus_the_token_value(turn_value) -> None:
    rewards, values, mask, turn_ids = episode([1.0, 0.0, -2.0], [3, 1, 4])
    found, _ = compute_bi_level_gae_advantage_return(
        rewards, values, mask, 1.0, 1.0, 0.9, turn_value=turn_value
    )
    to_go = torch.tensor([1.0 + 0.9 * 0.0 + 0.81 * -2.0, 0.9 * -2.0, -2.0], dtype=torch.float64)
    torch.testing.assert_close(found[mask], to_go[turn_ids[mask]] - values[mask])


def test_without_any_discount_it_is_token_gae() -> None:
    rewards, values, mask, _ = episode([1.0, 0.5, -2.0], [3, 1, 4])
    bootstrap = torch.tensor([0.7])
    found = compute_bi_level_gae_advantage_return(
        rewards, values, mask, 1.0, 1.0, 1.0, bootstrap=bootstrap
    )
    wanted = token_gae(rewards, values, mask, gamma=1.0, lam=1.0, bootstrap=bootstrap)
    torch.testing.assert_close(found, wanted)
    other = compute_bi_level_gae_advantage_return(
        rewards, values, mask, 1.0, 1.0, 0.9, bootstrap=bootstrap
    )
    assert not torch.allclose(other[0], wanted[0])  # the turn-level discount does something


def test_one_turn_is_token_gae_with_the_reward_at_the_end() -> None:
    rewards, values, mask, _ = episode([1.5], [6])
    found = compute_bi_level_gae_advantage_return(rewards, values, mask, 0.9, 0.8, 0.5)
    torch.testing.assert_close(found, token_gae(rewards, values, mask, gamma=0.9, lam=0.8))


def test_by_hand() -> None:
    """Turns [V=.1 .2] with reward 1 and [V=.4] with reward 2; gamma .9, lambda .5, turn discount
    .8, turn lambda .5."""
    rewards, values = torch.tensor([[0.0, 1.0, 0.0, 2.0]]), torch.tensor([[0.1, 0.2, 7.0, 0.4]])
    mask = torch.tensor([[True, True, False, True]])
    last = 2.0 - 0.4
    first = 1.0 + 0.8 * 0.4 - 0.2 + 0.8 * 0.5 * last
    inner = 0.9 * 0.2 - 0.1 + 0.9 * 0.5 * first
    found, returns = compute_bi_level_gae_advantage_return(rewards, values, mask, 0.9, 0.5, 0.8)
    torch.testing.assert_close(found, torch.tensor([[inner, first, 0.0, last]]))
    torch.testing.assert_close(returns, torch.tensor([[inner + 0.1, first + 0.2, 0.0, 2.0]]))


def test_the_last_token_keeps_its_own_delta_when_asked() -> None:
    rewards, values, mask, _ = episode([1.0, 2.0], [2, 2])
    replaced, _ = compute_bi_level_gae_advantage_return(rewards, values, mask, 0.9, 0.5, 0.8)
    added, _ = compute_bi_level_gae_advantage_return(
        rewards, values, mask, 0.9, 0.5, 0.8, last_token="add"
    )
    # . . 2 3 . . 6 7: the first turn ends at 3, the second starts at 6 and ends at 7
    own = [1.0 + 0.9 * values[0, 6] - values[0, 3], 2.0 - values[0, 7]]
    torch.testing.assert_close(added[0, [3, 7]] - replaced[0, [3, 7]], torch.stack(own))


def test_rows_of_one_episode_are_one_episode() -> None:
    """Three turns in one row, or in three rows in any order: the same numbers on the same
    tokens."""
    rewards, values, mask, turn_ids = episode([1.0, -1.0, 2.0], [3, 2, 4])
    bootstrap = torch.tensor([0.6], dtype=torch.float64)
    whole = {
        "bi": compute_bi_level_gae_advantage_return(
            rewards, values, mask, 0.9, 0.8, 0.7, turn_ids=turn_ids, bootstrap=bootstrap
        ),
        "token": token_gae(rewards, values, mask, gamma=0.9, lam=0.8, bootstrap=bootstrap),
        "turn": turn_gae(
            rewards, values, mask, gamma=0.9, lam=0.8, turn_ids=turn_ids, bootstrap=bootstrap
        ),
    }
    order = [1, 2, 0]
    rows = torch.cat([mask & (turn_ids == turn) for turn in order])
    tile = [tensor.expand(3, -1) for tensor in (rewards, values, turn_ids)]
    ids = torch.where(rows, tile[2], -1)
    last = torch.tensor([0.0, 0.6, 0.0], dtype=torch.float64)
    shared = {"turn_ids": ids, "episode_ids": torch.tensor([5, 5, 5]), "bootstrap": last}
    split = {
        "bi": compute_bi_level_gae_advantage_return(
            tile[0], tile[1], rows, 0.9, 0.8, 0.7, **shared
        ),
        "token": token_gae(tile[0], tile[1], rows, gamma=0.9, lam=0.8, **shared),
        "turn": turn_gae(tile[0], tile[1], rows, gamma=0.9, lam=0.8, **shared),
    }
    for name, outputs in whole.items():
        for one, several in zip(outputs, split[name], strict=True):
            torch.testing.assert_close(several.sum(0, keepdim=True), one)


def test_whitening_reads_action_tokens_only_and_leaves_returns_alone() -> None:
    rewards, values, mask, _ = episode([1.0, 2.0], [3, 4])
    plain = compute_bi_level_gae_advantage_return(rewards, values, mask, 0.9, 0.8, 0.7)
    white = compute_bi_level_gae_advantage_return(rewards, values, mask, 0.9, 0.8, 0.7, whiten=True)
    torch.testing.assert_close(white[1], plain[1])
    var, mean = torch.var_mean(white[0][mask])
    assert mean.abs() < 1e-9
    assert (var - 1).abs() < 1e-6
    assert white[0][~mask].abs().max() == 0
    assert (
        masked_whiten(torch.full((2, 3), 0.1), torch.ones(2, 3, dtype=torch.bool)).abs().max() == 0
    )


def test_bad_shapes_and_turn_ids_are_refused() -> None:
    good = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="share one shape"):
        token_gae(good, torch.zeros(2, 4), good.bool(), gamma=1.0, lam=1.0)
    with pytest.raises(ValueError, match=r"never go down.*\(1, 2\)"):
        build_layout(torch.ones(2, 3), turn_ids=torch.tensor([[0, 0, 1], [1, 1, 0]]))
    with pytest.raises(ValueError, match="one id per row"):
        build_layout(torch.ones(2, 3), episode_ids=torch.tensor([0]))


@examples(40)
@given(st.lists(st.integers(1, 70), max_size=5), st.sampled_from([0.0, 0.5, 0.99, 1.0]))
def test_suffix_sums_equal_the_recurrence(lengths, decay) -> None:
    x = torch.randn(sum(lengths), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    wanted = x.clone()
    start = 0
    for length in lengths:
        for j in range(start + length - 2, start - 1, -1):
            wanted[j] += decay * wanted[j + 1]
        start += length
    found = discounted_suffix_sums(x, lengths=torch.tensor(lengths, dtype=torch.int64), decay=decay)
    torch.testing.assert_close(found, wanted, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_precision_follows_the_values_and_is_float32_at_least(dtype) -> None:
    rewards, values, mask, _ = episode([1.0], [4])
    found, _ = token_gae(rewards.to(dtype), values.to(dtype), mask, gamma=1.0, lam=1.0)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_a_nan_that_was_given_to_one_episode_stays_there() -> None:
    rewards, values = torch.zeros(3, 4), torch.zeros(3, 4)
    rewards[1, 3] = torch.nan
    found, _ = token_gae(rewards, values, torch.ones(3, 4, dtype=torch.bool), gamma=1.0, lam=1.0)
    assert found[[0, 2]].isfinite().all()
    assert found[1].isnan().all()
