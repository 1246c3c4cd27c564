"""Dr.GRPO (arXiv 2503.20783): GRPO without the two biases that its authors found.

    A = R - mean of the group

Nothing is divided by the group's standard deviation, so easy and hard tasks weigh the same, and the
loss is a sum over tokens divided by a constant (`algo.norm_tokens`), so long episodes are not
favoured.
"""

from typing import Unpack

from torch import Tensor

from turnwise.algos.algorithm import Algorithm, Estimate
from turnwise.algos.groups import GroupInputs, Singleton, group_inputs
from turnwise.algos.grpo import grpo
from turnwise.data.batch import Batch


def dr_grpo(
    rewards: Tensor,  # [B, T]
    mask: Tensor,  # [B, T]
    *,
    singleton: Singleton = "error",
    **group: Unpack[GroupInputs],
) -> tuple[Tensor, Tensor]:
    """Advantages and returns ([B, T] each): R - group mean (arXiv 2503.20783). See `grpo`."""
    return grpo(rewards, mask, singleton=singleton, normalize_std=False, **group)


def estimate(batch: Batch, algorithm: Algorithm, rewards: Tensor) -> Estimate:
    advantages, returns = dr_grpo(
        rewards, batch.response_mask, singleton=algorithm.singleton, **group_inputs(batch)
    )
    return advantages, returns, {}


DR_GRPO = Algorithm(
    name="dr_grpo",
    advantage="dr_grpo",
    estimator=estimate,
    compares_groups=True,
    reduction="token_sum_norm",
)
