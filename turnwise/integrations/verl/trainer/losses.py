# pyright: reportUnknownVariableType=false
"""Our surrogates as verl policy losses: the code that the native trainer runs, on verl's tensors
and reduction."""

from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, cast, get_args

import torch
from torch import Tensor

from turnwise.algos.algorithm import Algorithm, RatioLevel, Reduction, Surrogate
from turnwise.algos.losses import policy_loss
from turnwise.algos.ppo import PPO
from turnwise.data.batch import Batch

KL_SUM, KL_WEIGHT = "actor/kl_sum", "actor/kl_weight"
"""Metrics of a micro-batch from which a worker finds the KL per token of a whole mini-batch."""
DUAL_CLIP_OFF = 1e9
"""verl's dual clip cannot be switched off; at this bound it never acts."""
REDUCTIONS: dict[Reduction, str] = {
    "token_mean": "token-mean",
    "sequence_mean": "seq-mean-token-mean",
    "episode_mean": "seq-mean-token-mean",
    "token_sum_norm": "seq-mean-token-sum-norm",
}
"""verl's name of each of our reductions. verl counts rows, so the last two hold where an episode is
one row."""


def loss_mode(algorithm: Algorithm) -> str:
    """The name under which verl finds the algorithm's surrogate (actor.policy_loss.loss_mode).

    Example:
        >>> from turnwise.algos.table import PRESETS
        >>> loss_mode(PRESETS["gspo"])
        'turnwise_clip_sequence'
    """
    return f"turnwise_{algorithm.surrogate}_{algorithm.ratio_level}"


def register() -> None:
    """Makes every surrogate known to verl. Registering twice changes nothing."""
    from verl.trainer.ppo.core_algos import register_policy_loss

    for surrogate, level in product(get_args(Surrogate), get_args(RatioLevel)):
        register_policy_loss(f"turnwise_{surrogate}_{level}")(partial(_loss, surrogate, level))


def _loss(
    surrogate: Surrogate,
    ratio_level: RatioLevel,
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    mask = response_mask.bool()
    weights = reduction_weights(mask, loss_agg_mode, config.global_batch_info)
    if rollout_is_weights is not None:
        weights = weights * rollout_is_weights
    algorithm = replace(
        PPO,
        surrogate=surrogate,
        ratio_level=ratio_level,
        clip_low=config.clip_ratio_low,
        clip_high=config.clip_ratio_high,
        dual_clip=None if config.clip_ratio_c >= DUAL_CLIP_OFF else config.clip_ratio_c,
    )
    loss, metrics = policy_loss(
        log_prob, _batch(mask, old_log_prob, advantages, weights), algorithm
    )
    total = metrics["weight"].clamp(min=1e-12)
    return loss, {
        "actor/pg_clipfrac": (metrics["clip_fraction"] / total).item(),
        "actor/ppo_kl": (metrics["approx_kl"] / total).item(),
        "actor/ratio": (metrics["ratio"] / total).item(),
        KL_SUM: metrics["approx_kl"].item(),
        KL_WEIGHT: metrics["weight"].item(),
    }


def reduction_weights(mask: Tensor, loss_agg_mode: str, batch_info: dict[str, Any]) -> Tensor:
    """Each token's share in the loss under verl's reduction: [B, T].

    The reduction is linear in the loss matrix, so its gradient is the share in every mode.
    """
    from verl.trainer.ppo.core_algos import agg_loss

    with torch.enable_grad():
        probe = torch.zeros(mask.shape, device=mask.device, requires_grad=True)
        total = agg_loss(
            loss_mat=probe, loss_mask=mask.float(), loss_agg_mode=loss_agg_mode, **batch_info
        )
        (weights,) = torch.autograd.grad(cast(Tensor, total), probe)
    return weights


def _batch(mask: Tensor, old_logprobs: Tensor, advantages: Tensor, weights: Tensor) -> Batch:
    """The response part of a batch, as far as a loss reads it."""
    rows = torch.arange(mask.shape[0], device=mask.device)
    turn_ids = torch.where(mask, 0, -1)
    return Batch(
        input_ids=torch.zeros_like(turn_ids),
        attention_mask=torch.ones_like(turn_ids),
        response_mask=mask,
        loss_mask=mask,
        turn_ids=turn_ids,
        rewards=torch.zeros_like(advantages),
        logprobs=old_logprobs,
        state_ids=turn_ids,
        episode_ids=rows,
        group_ids=rows,
        truncated=torch.zeros_like(rows, dtype=torch.bool),
        advantages=advantages,
        weights=weights,
    )
