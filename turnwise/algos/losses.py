"""Policy and value losses over one micro-batch. Ratio level, surrogate and reduction are
independent of each other.

Every loss and every metric here is sum(Batch.weights * something per token): the weights were fixed
over the whole mini-batch (algos/reduce.py), so the sums of a mini-batch's micro-batches simply add
up, losses and metrics alike.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from turnwise.algos.algorithm import Algorithm
from turnwise.algos.kl import MAX_LOG_RATIO, kl_estimate
from turnwise.algos.own import call_loss
from turnwise.data.batch import Batch


def policy_loss(
    logprobs: Tensor,  # [B, T], with gradient
    batch: Batch,
    algorithm: Algorithm,
    *,
    entropies: Tensor | None = None,  # [B, T], with gradient
) -> tuple[Tensor, dict[str, Tensor]]:
    """This micro-batch's part of the policy loss, and its part of the metrics. Add both up over the
    micro-batches.

    loss = sum over trained tokens of weight * (surrogate + kl_coef * KL - entropy_coef * entropy).
    The old policy's log-probs are Batch.old_logprobs, or the sampler's where those are exact. With
    `tis_cap` and old_logprobs, the surrogate is weighted by min(old / sampler, tis_cap), which
    corrects for a sampler that is another engine or older. Values outside loss_mask are never read.

    Metrics are sums of weight * x, hence means where the weights sum to 1 (divide by `weight` where
    they do not): policy_loss, clip_fraction (tokens whose gradient the clip removed or bounded),
    approx_kl (k3 between the old and the present policy), ratio, weight; kl_ref, entropy,
    tis_weight where they apply.

    Raises:
        ValueError: the batch lacks advantages, weights or ref_logprobs, or entropies are missing.
    """
    mask = batch.loss_mask
    weights = _masked(
        _need(
            batch.weights, "weights", "token_weights over the whole mini-batch, before its split"
        ),
        mask,
    )
    advantages = _masked(
        _need(batch.advantages, "advantages", "compute_advantages over the whole batch"), mask
    )
    sampler = _masked(batch.logprobs, mask)
    old = sampler if batch.old_logprobs is None else _masked(batch.old_logprobs, mask)
    new = _masked(logprobs, mask)

    token_log_ratio = new - old
    log_ratio = (
        token_log_ratio if algorithm.ratio_level == "token" else _sequence_log_ratio(new, old, mask)
    )
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if algorithm.loss is None:
        per_token, clipped = _SURROGATES[algorithm.surrogate](ratio, new, advantages, algorithm)
        metrics = {"clip_fraction": clipped.to(weights.dtype)}
    else:
        known = {"logprobs": new, "old_logprobs": old, "ratio": ratio, "advantages": advantages}
        limits = {"clip_low": algorithm.clip_low, "clip_high": algorithm.clip_high}
        per_token, metrics = call_loss(algorithm.loss, {**known, "mask": mask, **limits}), {}
    if algorithm.tis_cap is not None and batch.old_logprobs is not None:
        correction = (
            (old - sampler).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().clamp(max=algorithm.tis_cap)
        )
        per_token = per_token * correction
        metrics["tis_weight"] = correction
    total = metrics["policy_loss"] = per_token
    metrics["approx_kl"] = kl_estimate(old, new, form="k3")
    metrics["ratio"] = ratio
    metrics["weight"] = torch.ones_like(weights)
    if algorithm.kl_coef > 0.0 and (algorithm.kl_in == "loss" or batch.ref_logprobs is not None):
        reference = _masked(_need(batch.ref_logprobs, "ref_logprobs", "the reference policy"), mask)
        kl = kl_estimate(new, reference, form=algorithm.kl_form)
        metrics["kl_ref"] = kl
        if algorithm.kl_in == "loss":
            total = total + algorithm.kl_coef * kl
    if entropies is not None:
        entropy = metrics["entropy"] = _masked(entropies, mask)
        if algorithm.entropy_coef != 0.0:
            total = total - algorithm.entropy_coef * entropy
    elif algorithm.entropy_coef != 0.0:
        raise ValueError(
            f"entropy_coef={algorithm.entropy_coef} needs the tokens' entropies; pass entropies="
        )
    return (weights * total).sum(), {
        name: (weights * x.detach()).sum() for name, x in metrics.items()
    }


def value_loss(
    values: Tensor, batch: Batch, algorithm: Algorithm
) -> tuple[Tensor, dict[str, Tensor]]:
    """This micro-batch's part of the critic's loss, and its part of the metrics. Add both up over
    the micro-batches.

    0.5 * max((v - R)^2, (v_clipped - R)^2) per token, where v_clipped stays within `value_clip` of
    Batch.values. `value_coef` is not applied: it weighs this loss against the policy's only where
    the two share a trunk.

    Metrics: value_loss, value_error (mean squared), value_clip_fraction.

    Raises:
        ValueError: the batch lacks returns, weights or values.
    """
    mask = batch.loss_mask
    weights = _masked(
        _need(
            batch.weights, "weights", "token_weights over the whole mini-batch, before its split"
        ),
        mask,
    )
    returns = _masked(
        _need(batch.returns, "returns", "compute_advantages over the whole batch"), mask
    )
    new = _masked(values, mask)
    error = (new - returns).square()
    worst, clipped = error, torch.zeros_like(mask)
    if algorithm.value_clip is not None:
        old = _masked(_need(batch.values, "values", "the critic before the update"), mask)
        bounded = old + (new - old).clamp(-algorithm.value_clip, algorithm.value_clip)
        bounded_error = (bounded - returns).square()
        worst, clipped = torch.maximum(error, bounded_error), bounded_error > error
    metrics = {
        "value_loss": 0.5 * worst,
        "value_error": error,
        "value_clip_fraction": clipped.to(weights.dtype),
    }
    return (weights * 0.5 * worst).sum(), {
        name: (weights * x.detach()).sum() for name, x in metrics.items()
    }


def _clip(
    ratio: Tensor, new: Tensor, advantages: Tensor, algorithm: Algorithm
) -> tuple[Tensor, Tensor]:
    """PPO's pessimistic minimum (arXiv 1707.06347), with separate bounds (DAPO) and the dual clip
    (1912.09729)."""
    free = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - algorithm.clip_low, 1.0 + algorithm.clip_high)
    loss, clipped = torch.maximum(free, bounded), bounded > free
    if algorithm.dual_clip is not None:
        floor = -advantages * algorithm.dual_clip
        low = (advantages < 0) & (floor < loss)
        loss, clipped = torch.where(low, floor, loss), clipped | low
    return loss, clipped


def _cispo(
    ratio: Tensor, new: Tensor, advantages: Tensor, algorithm: Algorithm
) -> tuple[Tensor, Tensor]:
    """CISPO (arXiv 2506.13585): the ratio is a clipped, constant weight, so that every token keeps
    its gradient."""
    frozen = ratio.detach()
    weight = frozen.clamp(1.0 - algorithm.clip_low, 1.0 + algorithm.clip_high)
    return -weight * advantages * new, weight != frozen


def _policy_gradient(
    ratio: Tensor, new: Tensor, advantages: Tensor, algorithm: Algorithm
) -> tuple[Tensor, Tensor]:
    """-ratio * A. On policy its gradient is REINFORCE's; off policy it is unbiased but has a higher
    variance."""
    return -advantages * ratio, torch.zeros_like(advantages, dtype=torch.bool)


_SURROGATES: dict[str, Callable[[Tensor, Tensor, Tensor, Algorithm], tuple[Tensor, Tensor]]] = {
    "clip": _clip,
    "cispo": _cispo,
    "policy_gradient": _policy_gradient,
}


def _sequence_log_ratio(new: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    """GSPO's log-ratio on every token (arXiv 2507.18071): the row's mean in value, the token's own
    in gradient.

    That is the paper's token form: with one advantage per row it has the gradient of the sequence
    form, and it stays right with an advantage per token.
    """
    mean = (new - old).detach().sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    return torch.where(mask, mean + new - new.detach(), 0.0)


def _masked(x: Tensor, mask: Tensor) -> Tensor:
    """x with 0 outside the mask, by selection: 0 * NaN would be NaN, and so would its gradient."""
    return torch.where(mask, x, 0.0)


def _need(tensor: Tensor | None, name: str, source: str) -> Tensor:
    if tensor is None:
        raise ValueError(f"the loss needs Batch.{name}; it comes from {source}")
    return tensor
