"""RLOO (arXiv 2402.14740): an episode against the mean of the others, and a plain policy gradient.

A = R - mean of the group's other members
"""

from typing import Unpack

from torch import Tensor

from turnwise.algos.algorithm import Algorithm, Estimate
from turnwise.algos.groups import (
    GroupInputs,
    Singleton,
    distance_from_mean,
    group_inputs,
    score_episodes,
    spread_over_tokens,
)
from turnwise.data.batch import Batch


def rloo(
    rewards: Tensor,  # [B, T]
    mask: Tensor,  # [B, T]
    *,
    singleton: Singleton = "error",
    **group: Unpack[GroupInputs],
) -> tuple[Tensor, Tensor]:
    """Advantages and returns ([B, T] each): R minus the mean of the group's other members (arXiv
    2402.14740).

    Example:
        >>> import torch
        >>> rewards, mask = torch.tensor([[1.0], [3.0], [5.0]]), torch.ones(3, 1, dtype=torch.bool)
        >>> rloo(rewards, mask, group_ids=torch.tensor([0, 0, 0]))[0].squeeze(1)
        tensor([-3.,  0.,  3.])
    """
    scored = score_episodes(rewards, mask, **group)
    members = scored.members
    # R - mean of the others = n / (n - 1) * (R - mean).
    others = members.size / (members.size - 1).clamp(min=1)
    advantages = others * distance_from_mean(members, singleton=singleton, normalize_std=False)
    return spread_over_tokens(scored, advantages, rewards=rewards, mask=mask)


def estimate(batch: Batch, algorithm: Algorithm, rewards: Tensor) -> Estimate:
    advantages, returns = rloo(
        rewards, batch.response_mask, singleton=algorithm.singleton, **group_inputs(batch)
    )
    return advantages, returns, {}


RLOO = Algorithm(
    name="rloo",
    advantage="rloo",
    estimator=estimate,
    compares_groups=True,
    uses_token_rewards=True,
    surrogate="policy_gradient",
    reduction="token_sum_norm",
)
