"""Shared by estimators that compare an episode with its group. None of them has a critic.

An episode counts once in every statistic, however many rows it became, and an episode that the
caller does not count (none of its tokens is trained on) is left out of all statistics: a failure is
never a reward of zero.
"""

from dataclasses import dataclass
from typing import Literal, NotRequired, TypedDict

import torch
from torch import Tensor

from turnwise.algos.layout import float_dtype, numbered
from turnwise.algos.rounding import rounding_errors
from turnwise.data.batch import Batch

Singleton = Literal["error", "zero"]
EPS = 1e-6
"""Added to a standard deviation before dividing by it, as GRPO has it."""


class GroupInputs(TypedDict):
    """Keyword arguments that group estimators pass on to `score_episodes`."""

    group_ids: Tensor  # [B]
    """Rows with equal ids are compared."""
    episode_ids: NotRequired[Tensor | None]  # [B]
    """Rows with equal ids are one episode. Without them, a row is an episode."""
    counted: NotRequired[Tensor | None]  # [B] bool
    """Rows that count in statistics. An episode counts where one of its rows does. Without them,
    the rows that have a token in the mask."""
    errors: NotRequired[Tensor | None]  # [B, T]
    """A bound on the rounding error of each reward."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Members:
    """Scores of group members, with the statistics of each member's group. All tensors are float64
    or bool, [E]."""

    scores: Tensor
    errors: Tensor
    """A bound on the rounding error of each score."""
    counted: Tensor
    """False: not part of any statistic."""
    size: Tensor
    """Number of counted members of the group."""
    mean: Tensor
    std: Tensor
    """Unbiased; exactly 0 where all members are equal or there is only one."""
    error: Tensor
    """The largest rounding error in the member's group."""

    @property
    def alone(self) -> Tensor:
        """Counted, and the only counted member of its group."""
        return self.counted & (self.size == 1)


def group_statistics(
    scores: Tensor, groups: Tensor, *, counted: Tensor | None = None, errors: Tensor | None = None
) -> Members:
    """Each number with the statistics of its group. In float64, so that equal rewards have a
    variance of exactly 0.

    Args:
        errors: how far rounding may have moved each number. Equal sums of different float32 numbers
            differ in their last bits; a group whose members differ by no more than that has a
            standard deviation of 0, because dividing by the noise would make an advantage of it.
            None: as if the numbers themselves were rounded.

    Example:
        >>> group_statistics(torch.tensor([1.0, 3.0, 5.0]), torch.tensor([7, 7, 8])).mean
        tensor([2., 2., 5.], dtype=torch.float64)
    """
    group = numbered(groups)
    counted = torch.ones_like(group, dtype=torch.bool) if counted is None else counted
    scores = torch.where(counted, scores.double(), 0.0)
    errors = torch.where(
        counted, rounding_errors(scores) if errors is None else errors.double(), 0.0
    )
    # One slot per group; there are never more groups than members.
    zeros = scores.new_zeros(scores.shape[0])
    size = zeros.index_add(0, group, counted.double())[group]
    mean = zeros.index_add(0, group, scores)[group] / size.clamp(min=1)
    squares = torch.where(counted, (scores - mean).square(), 0.0)
    std = (zeros.index_add(0, group, squares)[group] / (size - 1).clamp(min=1)).sqrt()
    low = zeros.scatter_reduce(
        0, group, torch.where(counted, scores, torch.inf), "amin", include_self=False
    )[group]
    high = zeros.scatter_reduce(
        0, group, torch.where(counted, scores, -torch.inf), "amax", include_self=False
    )[group]
    error = zeros.scatter_reduce(0, group, errors, "amax", include_self=False)[group]
    std = torch.where(high - low > 2 * error, std, 0.0)
    return Members(
        scores=scores, errors=errors, counted=counted, size=size, mean=mean, std=std, error=error
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeScores:
    """The episodes of a batch with their returns."""

    members: Members
    groups: Tensor  # [E] int64
    episode_of_row: Tensor  # [B] int64

    def spread(self, episodes: Tensor, mask: Tensor) -> Tensor:
        """One number per episode, on all of its masked tokens: [B, T]."""
        return torch.where(mask, episodes[self.episode_of_row][:, None], 0.0)


def score_episodes(
    rewards: Tensor,  # [B, T]
    mask: Tensor,  # [B, T]
    *,
    group_ids: Tensor,  # [B]
    episode_ids: Tensor | None = None,  # [B]
    counted: Tensor | None = None,  # [B] bool
    errors: Tensor | None = None,  # [B, T]
) -> EpisodeScores:
    """Every episode's return (the sum of its rewards over its rows) and its group's statistics.
    `GroupInputs` describes the keyword arguments.

    Raises:
        ValueError: an episode's rows name different groups.
    """
    mask = mask if mask.dtype == torch.bool else mask != 0
    rows = torch.arange(mask.shape[0], device=mask.device)
    episode = rows if episode_ids is None else numbered(episode_ids)
    number = int(episode.max()) + 1 if episode.numel() else 0
    groups = group_ids.new_zeros(number).scatter(0, episode, group_ids)
    if (groups[episode] != group_ids).any():
        row = int((groups[episode] != group_ids).nonzero()[0])
        raise ValueError(
            f"an episode belongs to one group; the rows of row {row}'s episode name several"
        )
    errors = torch.where(mask, rounding_errors(rewards, errors), 0.0)
    rewards = torch.where(mask, rewards.double(), 0.0)
    nothing = rewards.new_zeros(number)
    returns = nothing.index_add(0, episode, rewards.sum(-1))
    errors = nothing.index_add(0, episode, errors.sum(-1))
    votes = (mask.any(-1) if counted is None else counted).long()
    counts = votes.new_zeros(number).index_add(0, episode, votes) > 0
    members = group_statistics(returns, groups, counted=counts, errors=errors)
    return EpisodeScores(members=members, groups=groups, episode_of_row=episode)


def group_inputs(batch: Batch) -> GroupInputs:
    """The shared keyword arguments of group estimators, from a batch."""
    return {
        "group_ids": batch.group_ids,
        "episode_ids": batch.episode_ids,
        "counted": batch.loss_mask.any(-1),
        "errors": batch.reward_errors,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupScores:
    """The groups of a batch with the spread of their returns."""

    episodes: EpisodeScores
    group: Tensor  # [E] int64
    """The group of each episode, numbered from 0."""
    std: Tensor  # [G] float64
    """The standard deviation of the returns of each group."""


def score_groups(batch: Batch) -> GroupScores:
    """The spread of every group's returns, over the episodes that are trained on."""
    scored = score_episodes(batch.rewards, batch.response_mask, **group_inputs(batch))
    group = numbered(scored.groups)
    number = int(group.max()) + 1 if group.numel() else 0
    std = scored.members.std.new_zeros(number).scatter(0, group, scored.members.std)
    return GroupScores(episodes=scored, group=group, std=std)


def distance_from_mean(members: Members, *, singleton: Singleton, normalize_std: bool) -> Tensor:
    """Each member's distance from its group's mean, 0 for those that do not count or have no peer:
    [E]."""
    if singleton == "error" and bool(members.alone.any()):
        number = int(members.alone.sum())
        raise ValueError(
            f"a group of one has no baseline, and {number} episode(s) are alone in theirs; "
            "raise group_size or rollout.min_group_size, or set algo.singleton: zero"
        )
    distance = members.scores - members.mean
    if normalize_std:
        distance = distance / (members.std + EPS)
    return torch.where(members.counted & (members.std > 0), distance, 0.0)


def spread_over_tokens(
    scored: EpisodeScores, advantages: Tensor, *, rewards: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """One advantage per episode, and its return, on all of its tokens: [B, T] each."""
    dtype = float_dtype(rewards)
    mask = mask != 0
    returns = scored.spread(scored.members.scores, mask)
    return scored.spread(advantages, mask).to(dtype), returns.to(dtype)
