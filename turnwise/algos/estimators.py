"""compute_advantages: credit for a whole Batch, by the algorithm's estimator. Dispatch is a plain dict."""

from collections.abc import Callable

import torch
from torch import Tensor

from turnwise.algos.advantages import compute_bi_level_gae_advantage_return, token_gae, turn_gae
from turnwise.algos.algorithm import AdvantageName, Algorithm
from turnwise.algos.groups import dr_grpo, gigpo, grpo, reinforce_pp, rloo, score_episodes
from turnwise.algos.layout import build_layout
from turnwise.algos.rounding import credit_error, masked_whiten, rounding_errors
from turnwise.data.batch import Batch

Estimate = tuple[Tensor, Tensor, dict[str, float]]  # advantages, returns, metrics of this estimator alone


def compute_advantages(
    batch: Batch, algorithm: Algorithm, *, token_rewards: Tensor | None = None
) -> tuple[Batch, dict[str, float]]:
    """The batch with `advantages` and `returns` set (0 outside response_mask), and metrics (docs/algorithms.md).

    Call it on the whole batch: groups, episodes of several rows and whitening need all of it. An episode's rows are
    joined in the order of their turns. Credit flows along response_mask; statistics (group means, whitening) count
    what loss_mask trains on.

    Args:
        token_rewards: [B, T] rewards of single tokens, such as a KL penalty, added to their own token's delta.

    Raises:
        ValueError: the estimator needs what the batch lacks, or cannot use what was given.
    """
    _check_inputs(batch, algorithm, token_rewards)
    rewards = batch.rewards if token_rewards is None else batch.rewards + token_rewards
    advantages, returns, metrics = _ESTIMATORS[algorithm.advantage](batch, algorithm, rewards)
    error = _credit_error(batch, algorithm, rewards)
    if algorithm.whiten:
        # Untrained action tokens reach no loss; 0 is safer there than a number on another scale.
        advantages = masked_whiten(advantages, batch.loss_mask, error=error)
    metrics = {**_summary(batch, algorithm, advantages, returns, error=error), **metrics}
    return batch.replace(advantages=advantages, returns=returns), metrics


def _token_gae(batch: Batch, algorithm: Algorithm, rewards: Tensor) -> Estimate:
    advantages, returns = token_gae(
        rewards,
        _values(batch),
        batch.response_mask,
        gamma=algorithm.gamma,
        lam=algorithm.lam,
        bootstrap=_bootstrap(batch),
        turn_ids=batch.turn_ids,
        episode_ids=batch.episode_ids,
    )
    return advantages, returns, {}


def _bi_level_gae(batch: Batch, algorithm: Algorithm, rewards: Tensor) -> Estimate:
    advantages, returns = compute_bi_level_gae_advantage_return(
        rewards,
        _values(batch),
        batch.response_mask,
        algorithm.gamma,
        algorithm.lam,
        algorithm.high_level_gamma,
        high_level_lam=algorithm.high_level_lam,
        turn_ids=batch.turn_ids,
        bootstrap=_bootstrap(batch),
        turn_value=algorithm.turn_value,
        last_token=algorithm.last_token,
        episode_ids=batch.episode_ids,
    )
    return advantages, returns, {}


def _turn_gae(batch: Batch, algorithm: Algorithm, rewards: Tensor) -> Estimate:
    advantages, returns = turn_gae(
        rewards,
        _values(batch),
        batch.response_mask,
        gamma=algorithm.high_level_gamma,
        lam=algorithm.high_level_lam,
        turn_ids=batch.turn_ids,
        bootstrap=_bootstrap(batch),
        episode_ids=batch.episode_ids,
    )
    return advantages, returns, {}


def _group(estimator: Callable[..., tuple[Tensor, Tensor]]) -> Callable[[Batch, Algorithm, Tensor], Estimate]:
    def estimate(batch: Batch, algorithm: Algorithm, rewards: Tensor) -> Estimate:
        advantages, returns = estimator(
            rewards,
            batch.response_mask,
            group_ids=batch.group_ids,
            episode_ids=batch.episode_ids,
            counted=batch.loss_mask.any(-1),
            errors=batch.reward_errors,
            singleton=algorithm.singleton,
        )
        return advantages, returns, {}

    return estimate


def _reinforce_pp(batch: Batch, algorithm: Algorithm, rewards: Tensor) -> Estimate:
    advantages, returns = reinforce_pp(
        rewards,
        batch.response_mask,
        gamma=algorithm.gamma,
        whiten=False,
        turn_ids=batch.turn_ids,
        episode_ids=batch.episode_ids,
    )
    return advantages, returns, {}


def _gigpo(batch: Batch, algorithm: Algorithm, rewards: Tensor) -> Estimate:
    advantages, returns, peers = gigpo(
        rewards,
        batch.response_mask,
        group_ids=batch.group_ids,
        state_ids=batch.state_ids,
        gamma=algorithm.high_level_gamma,
        weight=algorithm.gigpo_weight,
        turn_ids=batch.turn_ids,
        episode_ids=batch.episode_ids,
        counted=batch.loss_mask.any(-1),
        errors=batch.reward_errors,
        singleton=algorithm.singleton,
    )
    return advantages, returns, {"gigpo/turns_with_peers": peers}


_ESTIMATORS: dict[AdvantageName, Callable[[Batch, Algorithm, Tensor], Estimate]] = {
    "token_gae": _token_gae,
    "bi_level_gae": _bi_level_gae,
    "turn_gae": _turn_gae,
    "grpo": _group(grpo),
    "dr_grpo": _group(dr_grpo),
    "rloo": _group(rloo),
    "reinforce_pp": _reinforce_pp,
    "gigpo": _gigpo,
}


def _values(batch: Batch) -> Tensor:
    assert batch.values is not None  # _check_inputs saw to it
    return batch.values


def _bootstrap(batch: Batch) -> Tensor | None:
    """The value after each truncated row. A terminated episode has none, whatever stands in Batch.bootstrap."""
    return None if batch.bootstrap is None else torch.where(batch.truncated, batch.bootstrap, 0.0)


def _check_inputs(batch: Batch, algorithm: Algorithm, token_rewards: Tensor | None) -> None:
    if algorithm.needs_critic and batch.values is None:
        raise ValueError(f"algorithm {algorithm.name!r} needs Batch.values; score the batch with the critic first")
    if algorithm.needs_critic and batch.bootstrap is None and bool(batch.truncated.any()):
        number = int(batch.truncated.sum())
        raise ValueError(
            f"a truncated episode bootstraps from the value of its last state, and {number} row(s) are truncated; "
            "set Batch.bootstrap"
        )
    if token_rewards is None:
        return
    if not algorithm.uses_token_rewards:
        raise ValueError(
            f"algorithm {algorithm.name!r} cannot use rewards of single tokens; put the KL penalty into the loss "
            "(algo.kl_in: loss)"
        )
    if token_rewards.shape != batch.rewards.shape:
        raise ValueError(
            f"token_rewards must have the shape {tuple(batch.rewards.shape)}, got {tuple(token_rewards.shape)}"
        )


def _credit_error(batch: Batch, algorithm: Algorithm, rewards: Tensor) -> Tensor:
    """How far rounding may have moved an advantage."""
    errors = batch.reward_errors
    if errors is not None and rewards is not batch.rewards:  # rewards of single tokens were added, and rounded
        errors = errors + rounding_errors(rewards)
    lay = build_layout(batch.response_mask, turn_ids=batch.turn_ids, episode_ids=batch.episode_ids)
    values, bootstrap = (batch.values, _bootstrap(batch)) if algorithm.needs_critic else (None, None)
    return credit_error(lay, rewards=rewards, errors=errors, values=values, bootstrap=bootstrap)


def _summary(
    batch: Batch, algorithm: Algorithm, advantages: Tensor, returns: Tensor, *, error: Tensor
) -> dict[str, float]:
    scored = score_episodes(
        batch.rewards,
        batch.response_mask,
        group_ids=batch.group_ids,
        episode_ids=batch.episode_ids,
        counted=batch.loss_mask.any(-1),
        errors=batch.reward_errors,
    )
    members = scored.members
    _, first = torch.unique(scored.groups, return_inverse=True)
    std = members.std.new_zeros(members.std.shape[0]).scatter(0, first, members.std)[: int(first.max()) + 1]
    trained = advantages[batch.loss_mask]
    metrics = {
        "episode/count": float(members.counted.sum()),
        "episode/return_mean": _mean(members.scores[members.counted]),
        "episode/truncated": float(batch.truncated.sum()),
        "group/count": float(std.shape[0]),
        "group/std_mean": _mean(std),
        "group/zero_variance": float((std == 0).sum()),
        "group/singletons": float(members.alone.sum()),
        "advantage/mean": _mean(trained),
        "advantage/std": float(trained.std()) if trained.numel() > 1 else 0.0,
        "advantage/abs_max": float(trained.abs().max()) if trained.numel() else 0.0,
    }
    if algorithm.needs_critic:
        targets = returns[batch.loss_mask]
        errors = targets - _values(batch)[batch.loss_mask]
        differ = targets.numel() > 1 and bool((targets.max() - targets.min()).cpu() > 2 * error)
        metrics["critic/return_mean"] = _mean(targets)
        metrics["critic/value_mean"] = _mean(targets - errors)
        if differ:
            metrics["critic/explained_variance"] = 1.0 - float(errors.var()) / float(targets.var())
    return metrics


def _mean(x: Tensor) -> float:
    return float(x.mean()) if x.numel() else 0.0
