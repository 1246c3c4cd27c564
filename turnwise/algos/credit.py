"""compute_advantages: credit for a whole Batch, by the algorithm's estimator."""

from torch import Tensor

from turnwise.algos.algorithm import Algorithm
from turnwise.algos.critics import bootstrap_of, values_of
from turnwise.algos.groups import score_groups
from turnwise.algos.layout import build_layout
from turnwise.algos.rounding import credit_error, masked_whiten, rounding_errors
from turnwise.data.batch import Batch


def compute_advantages(
    batch: Batch, algorithm: Algorithm, *, token_rewards: Tensor | None = None
) -> tuple[Batch, dict[str, float]]:
    """The batch with `advantages` and `returns` set (0 outside response_mask), and metrics
    (docs/algorithms.md).

    Call it on the whole batch: groups, episodes of several rows and whitening need all of it. An
    episode's rows are joined in the order of their turns. Credit flows along response_mask;
    statistics (group means, whitening) count what loss_mask trains on.

    Args:
        token_rewards: [B, T] rewards of single tokens, such as a KL penalty, added to their own
            token's delta.

    Raises:
        ValueError: the estimator needs what the batch lacks, or cannot use what was given.
    """
    _check_inputs(batch, algorithm, token_rewards)
    rewards = batch.rewards if token_rewards is None else batch.rewards + token_rewards
    advantages, returns, metrics = algorithm.estimator(batch, algorithm, rewards)
    error = _credit_error(batch, algorithm, rewards)
    if algorithm.whiten:
        # Untrained action tokens are not in the loss; 0 is safer there than an unwhitened value.
        advantages = masked_whiten(advantages, batch.loss_mask, error=error)
    metrics = {**_summary(batch, algorithm, advantages, returns, error=error), **metrics}
    return batch.replace(advantages=advantages, returns=returns), metrics


def _check_inputs(batch: Batch, algorithm: Algorithm, token_rewards: Tensor | None) -> None:
    if algorithm.needs_critic and batch.values is None:
        raise ValueError(
            f"algorithm {algorithm.name!r} needs Batch.values; score the batch with the critic "
            "first"
        )
    if algorithm.needs_critic and batch.bootstrap is None and bool(batch.truncated.any()):
        number = int(batch.truncated.sum())
        raise ValueError(
            f"a truncated episode bootstraps from the value of its last state, and {number} row(s) "
            "are truncated; "
            "set Batch.bootstrap"
        )
    if token_rewards is None:
        return
    if not algorithm.uses_token_rewards:
        raise ValueError(
            f"algorithm {algorithm.name!r} cannot use rewards of single tokens; put the KL penalty "
            "into the loss "
            "(algo.kl_in: loss)"
        )
    if token_rewards.shape != batch.rewards.shape:
        raise ValueError(
            f"token_rewards must have the shape {tuple(batch.rewards.shape)}, got "
            f"{tuple(token_rewards.shape)}"
        )


def _credit_error(batch: Batch, algorithm: Algorithm, rewards: Tensor) -> Tensor:
    """A bound on the rounding error of an advantage."""
    errors = batch.reward_errors
    # Rewards of single tokens were added, and rounded.
    if errors is not None and rewards is not batch.rewards:
        errors = errors + rounding_errors(rewards)
    lay = build_layout(batch.response_mask, turn_ids=batch.turn_ids, episode_ids=batch.episode_ids)
    values, bootstrap = (
        (batch.values, bootstrap_of(batch)) if algorithm.needs_critic else (None, None)
    )
    return credit_error(lay, rewards=rewards, errors=errors, values=values, bootstrap=bootstrap)


def _summary(
    batch: Batch, algorithm: Algorithm, advantages: Tensor, returns: Tensor, *, error: Tensor
) -> dict[str, float]:
    groups = score_groups(batch)
    members, std = groups.episodes.members, groups.std
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
        errors = targets - values_of(batch)[batch.loss_mask]
        differ = targets.numel() > 1 and bool((targets.max() - targets.min()).cpu() > 2 * error)
        metrics["critic/return_mean"] = _mean(targets)
        metrics["critic/value_mean"] = _mean(targets - errors)
        if differ:
            metrics["critic/explained_variance"] = 1.0 - float(errors.var()) / float(targets.var())
    return metrics


def _mean(x: Tensor) -> float:
    return float(x.mean()) if x.numel() else 0.0
