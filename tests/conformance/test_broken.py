"""The suite can fail: estimators that are broken in ways seen in the field fail the check that is
about it."""

import pytest
import torch

from turnwise.algos import compute_bi_level_gae_advantage_return, token_gae
from turnwise.testing.conformance import ConformanceError, Report, check_estimator


def crosses_observations(rewards, values, mask, gamma, lam):
    """GAE that walks through observation tokens as if the model had chosen them."""
    advantages = torch.zeros_like(values)
    following = running = torch.zeros(values.shape[0], dtype=values.dtype)
    for t in range(values.shape[1] - 1, -1, -1):
        running = rewards[:, t] + gamma * following - values[:, t] + gamma * lam * running
        advantages[:, t], following = running, values[:, t]
    return torch.where(mask, advantages, 0.0)


def guesses_turns_from_rewards(rewards, values, mask, gamma, lam, high_level_gamma):
    """Bi-level GAE whose turns end where a reward is not zero."""
    ends = mask & (rewards != 0)
    turn_ids = (ends.long().flip(-1).cumsum(-1).flip(-1) * -1) + mask.shape[1]
    return compute_bi_level_gae_advantage_return(
        rewards,
        values,
        mask,
        gamma,
        lam,
        high_level_gamma,
        turn_ids=torch.where(mask, turn_ids, -1),
    )


def counts_padding(rewards, values, mask, gamma, lam):
    """Discounts by the distance to the end of the padded row."""
    age = torch.arange(mask.shape[1] - 1, -1, -1, dtype=values.dtype)
    total = torch.where(mask, rewards, 0.0).sum(-1, keepdim=True)
    return torch.where(mask, total * gamma**age, 0.0)


def looks_at_the_row_before(rewards, values, mask, gamma, lam):
    """Takes another row's return as its baseline, by position in the batch."""
    total = torch.where(mask, rewards, 0.0).sum(-1, keepdim=True)
    return torch.where(mask, total - total.roll(1, 0), 0.0)


def multiplies_by_the_mask(rewards, values, mask, gamma, lam):
    """0 * NaN is NaN."""
    total = (rewards * mask).sum(-1, keepdim=True)
    return (total - values) * mask


def crashes_without_reward(rewards, values, mask, gamma, lam):
    """Indexes the last non-zero reward, as if there always were one."""
    clean = torch.where(mask, rewards, 0.0)
    for row in clean:
        row.nonzero()[-1]
    return torch.where(mask, clean.sum(-1, keepdim=True) - values, 0.0)


def ignores_the_bootstrap(rewards, values, mask, gamma, lam, *, bootstrap):
    return token_gae(rewards, values, mask, gamma=gamma, lam=lam)


def bootstraps_twice(rewards, values, mask, gamma, lam, *, bootstrap):
    return token_gae(rewards, values, mask, gamma=gamma, lam=lam, bootstrap=2 * bootstrap)


def writes_into_its_input(rewards, values, mask, gamma, lam):
    values.masked_fill_(~mask, 0.0)
    return token_gae(rewards, values, mask, gamma=gamma, lam=lam)


def ignores_turn_ids(rewards, values, mask, gamma, lam, high_level_gamma, *, turn_ids):
    return compute_bi_level_gae_advantage_return(
        rewards, values, mask, gamma, lam, high_level_gamma
    )


def forgets_the_empty_row(rewards, values, mask, gamma, lam):
    total = torch.where(mask, rewards, 0.0).sum(-1, keepdim=True)
    return torch.where(mask, total, 0.0) / mask.sum(-1, keepdim=True).min()


def divides_by_a_zero_spread(rewards, values, mask, gamma, lam):
    total = torch.where(mask, rewards, 0.0).sum(-1, keepdim=True)
    return torch.where(mask, (total - total.mean()) / total.std(), 0.0)


def needs_two_tokens(rewards, values, mask, gamma, lam):
    total = torch.where(mask, rewards, 0.0).sum(-1, keepdim=True)
    firsts = (mask & mask.roll(-1, 1)).any()
    return torch.where(mask, total if firsts else total / 0.0, 0.0)


def is_off_by_one(rewards, values, mask, gamma, lam):
    advantages, returns = token_gae(rewards, values, mask, gamma=gamma, lam=lam)
    return advantages + mask * 1e-3, returns


def returns_one_number_per_row(rewards, values, mask, gamma, lam):
    return torch.where(mask, rewards, 0.0).sum(-1)


@pytest.mark.parametrize(
    ("estimator", "check"),
    [
        (crosses_observations, "observation_insertion"),
        (guesses_turns_from_rewards, "zero_reward_turns"),
        (counts_padding, "padding"),
        (looks_at_the_row_before, "permutation"),
        (multiplies_by_the_mask, "nan_outside_mask"),
        (crashes_without_reward, "all_zero_rewards"),
        (ignores_the_bootstrap, "bootstrap"),
        (bootstraps_twice, "bootstrap"),
        (writes_into_its_input, "inputs_untouched"),
        (ignores_turn_ids, "adjacent_turns"),
        (forgets_the_empty_row, "empty_row"),
        (divides_by_a_zero_spread, "all_zero_rewards"),
        (needs_two_tokens, "single_token_turns"),
        (is_off_by_one, "brute_force"),
        (returns_one_number_per_row, "shape"),
    ],
)
def test_the_right_check_fails(estimator, check) -> None:
    report = check_estimator(estimator, reference="token_gae" if check == "brute_force" else None)
    assert check in report.failures, str(report)
    with pytest.raises(ConformanceError, match=check):
        report.raise_if_failed()


@pytest.mark.parametrize(
    "estimator", [multiplies_by_the_mask, ignores_the_bootstrap, is_off_by_one]
)
def test_and_no_other_does(estimator) -> None:
    report = check_estimator(
        estimator, reference="token_gae" if estimator is is_off_by_one else None
    )
    assert len([name for name in report.failures if name != "all_zero_rewards"]) == 1, str(report)


def test_what_does_not_apply_is_skipped_and_said() -> None:
    def bare(token_level_rewards, values, loss_mask, gamma, lam):
        return token_gae(token_level_rewards, values, loss_mask, gamma=gamma, lam=lam)

    report: Report = check_estimator(bare)
    assert report.passed
    assert report.skipped == ("adjacent_turns", "bootstrap", "brute_force")
    assert "takes no bootstrap" in str(report)
