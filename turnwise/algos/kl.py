"""Estimates of the KL divergence to a reference policy: a penalty in the reward or in the loss,
fixed or adaptive."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from turnwise.algos.algorithm import KLForm
from turnwise.data.batch import Batch

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this before exp: beyond it float32 gradients are noise and soon
infinite."""


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, *, form: KLForm) -> Tensor:
    """An estimate of KL(policy || reference) per token, from tokens that the policy sampled.

    With r = log reference - log policy (Schulman, "Approximating KL divergence"): k1 = -r is
    unbiased and noisy, and as a loss its expected gradient is 0: use it in the reward. k2 = r^2 / 2
    has the right gradient as a loss. k3 = exp(r) - 1 - r is unbiased and never negative.

    Example:
        >>> policy, reference = torch.tensor([-1.0]), torch.tensor([-1.5])
        >>> found = [kl_estimate(policy, reference, form=form) for form in ("k1", "k2", "k3")]
        >>> [round(float(kl), 4) for kl in found]
        [0.5, 0.125, 0.1065]
    """
    log_ratio = ref_logprobs - logprobs
    if form == "k1":
        return -log_ratio
    if form == "k2":
        return 0.5 * log_ratio.square()
    log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(log_ratio) - log_ratio


def kl_rewards(batch: Batch, *, coef: float, form: KLForm) -> tuple[Tensor, float]:
    """The KL penalty as rewards of single tokens ([B, T], 0 outside response_mask), and the mean KL
    per token.

    Pass the first as `token_rewards` to `compute_advantages`; the second is what an adaptive
    coefficient follows.

    Raises:
        ValueError: the batch has no ref_logprobs.
    """
    if batch.ref_logprobs is None:
        raise ValueError(
            "a KL penalty needs Batch.ref_logprobs; score the batch with the reference policy first"
        )
    mask = batch.response_mask
    old = batch.logprobs if batch.old_logprobs is None else batch.old_logprobs
    zero = torch.zeros_like(old)
    kl = kl_estimate(
        torch.where(mask, old, zero), torch.where(mask, batch.ref_logprobs, zero), form=form
    )
    trained = batch.loss_mask
    mean = float(torch.where(trained, kl, zero).sum() / trained.sum().clamp(min=1))
    return torch.where(mask, -coef * kl, zero), mean


@dataclass(frozen=True, kw_only=True, slots=True)
class KLState:
    """An adaptive KL coefficient (Ziegler et al., arXiv 1909.08593).

    Example:
        >>> state = KLState(coef=0.1, target=0.02, horizon=100)
        >>> update_kl(state, kl=0.04, num_episodes=10).coef > state.coef
        True
    """

    coef: float
    """The coefficient now."""
    target: float | None
    """KL per token to hold. None: the coefficient is fixed."""
    horizon: float = 10_000.0
    """Episodes over which a KL that is off by 20 % or more changes the coefficient by 20 %."""


def update_kl(state: KLState, *, kl: float, num_episodes: int) -> KLState:
    """The state after a step whose mean KL was `kl`: the coefficient grows where the KL was above
    its target."""
    if state.target is None:
        return state
    error = min(max(kl / state.target - 1.0, -0.2), 0.2)
    return replace(state, coef=state.coef * (1.0 + error * min(num_episodes / state.horizon, 1.0)))
