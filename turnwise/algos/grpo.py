"""GRPO (arXiv 2402.03300): an episode against the others of its group.

    A = (R - mean of the group) / (std of the group + 1e-6), on every action token of the episode

What we changed: the standard deviation is unbiased, equal returns give exactly 0 whatever rounding
did to them, and the loss is a mean over episodes of means over tokens.
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


def grpo(
    rewards: Tensor,  # [B, T]
    mask: Tensor,  # [B, T]
    *,
    singleton: Singleton = "error",
    normalize_std: bool = True,
    **group: Unpack[GroupInputs],
) -> tuple[Tensor, Tensor]:
    """Advantages and returns ([B, T] each): (R - group mean) / (group std + 1e-6) on every token of
    the episode.

    GRPO (arXiv 2402.03300). Without `normalize_std` it is Dr.GRPO's (arXiv 2503.20783): R - group
    mean, so that easy and hard tasks weigh the same. `returns` hold the episode's return R.

    Example:
        >>> import torch
        >>> rewards = torch.tensor([[0.0, 1.0], [0.0, 3.0]])
        >>> mask = torch.ones(2, 2, dtype=torch.bool)
        >>> grpo(rewards, mask, group_ids=torch.tensor([0, 0]), normalize_std=False)[0]
        tensor([[-1., -1.],
                [ 1.,  1.]])
    """
    scored = score_episodes(rewards, mask, **group)
    advantages = distance_from_mean(
        scored.members, singleton=singleton, normalize_std=normalize_std
    )
    return spread_over_tokens(scored, advantages, rewards=rewards, mask=mask)


def estimate(batch: Batch, algorithm: Algorithm, rewards: Tensor) -> Estimate:
    advantages, returns = grpo(
        rewards, batch.response_mask, singleton=algorithm.singleton, **group_inputs(batch)
    )
    return advantages, returns, {}


GRPO = Algorithm(
    name="grpo",
    advantage="grpo",
    estimator=estimate,
    compares_groups=True,
    reduction="episode_mean",
)
