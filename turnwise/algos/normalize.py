# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
"""Rewards on a common scale: by the statistics of a group, of the batch, or of the run so far."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from turnwise.algos.groups import Singleton, group_statistics, score_episodes
from turnwise.algos.layout import build_layout
from turnwise.algos.rounding import rounding_errors
from turnwise.config.schema import ShapingConfig
from turnwise.data.batch import Batch
from turnwise.types import Json

How = Literal["none", "state", "batch", "running"]
EPS = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningStats:
    """Mean and spread of all episode returns so far, in Chan's numerically safe form. Part of a
    checkpoint.

    Example:
        >>> stats = RunningStats().update([1.0, 3.0]).update([5.0])
        >>> stats.mean, stats.std, RunningStats.from_json(stats.to_json()) == stats
        (3.0, 2.0, True)
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    """Sum of squared deviations from the mean."""

    @property
    def std(self) -> float:
        """Unbiased; 0 for fewer than two numbers."""
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0

    def update(self, values: Sequence[float]) -> "RunningStats":
        """The statistics with these numbers added."""
        if not values:
            return self
        number, mean = len(values), math.fsum(values) / len(values)
        squares = math.fsum((value - mean) ** 2 for value in values)
        total, change = self.count + number, mean - self.mean
        return RunningStats(
            count=total,
            mean=self.mean + change * number / total,
            squares=self.squares + squares + change**2 * self.count * number / total,
        )

    def to_json(self) -> dict[str, Json]:
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    @classmethod
    def from_json(cls, data: Mapping[str, Json]) -> "RunningStats":
        return cls(count=data["count"], mean=data["mean"], squares=data["squares"])


def normalize_rewards(
    batch: Batch,
    *,
    how: How,
    std: bool = True,
    running: RunningStats | None = None,
    rows: Tensor | None = None,  # [B] bool
    singleton: Singleton = "error",
) -> tuple[Batch, RunningStats]:
    """The batch with normalised rewards, and the statistics that the next call with "running"
    takes.

    An episode's return R (the sum of its turns' rewards, over all its rows) becomes (R - mean) /
    (std + 1e-6). Every reward is divided; the mean is taken from the last turn alone, because
    subtracting a share in every turn would reward long or short episodes. "state" takes mean and
    std of the episode's group, "batch" of all episodes, "running" of all episodes of the run, these
    included. Where all returns are equal, nothing is divided.

    Args:
        rows: whose rewards change, and who counts in the statistics. None: all. An episode's rows
            go together.
        singleton: under "state" a group of one would lose its reward: refuse it, or let it be zero.
    """
    running = running or RunningStats()
    rows = torch.ones_like(batch.truncated) if rows is None else rows
    if how == "none" or not bool(rows.any()):
        return batch, running
    counted = batch.loss_mask.any(-1) & rows
    scored = score_episodes(
        batch.rewards,
        batch.response_mask,
        group_ids=batch.group_ids,
        episode_ids=batch.episode_ids,
        counted=counted,
        errors=batch.reward_errors,
    )
    members = scored.members
    if how == "state":
        if singleton == "error" and bool(members.alone.any()):
            raise ValueError(
                "env.shaping.normalize: state compares the members of a group, and "
                f"{int(members.alone.sum())} groups "
                "have one member; raise rollout.train.group_size, or normalise by batch or running"
            )
        mean, spread = members.mean, members.std
    elif how == "batch":
        everyone = torch.zeros_like(scored.groups)
        over_all = group_statistics(
            members.scores, everyone, counted=members.counted, errors=members.errors
        )
        mean, spread = over_all.mean, over_all.std
    else:
        running = running.update(members.scores[members.counted].tolist())
        mean = torch.full_like(members.mean, running.mean)
        spread = torch.full_like(members.std, running.std)
    scale = torch.where(spread > 0, spread + EPS, 1.0) if std else torch.ones_like(spread)
    changed, errors = _rescale(batch, mean=mean, scale=scale, episode_of_row=scored.episode_of_row)
    place = rows[:, None] & batch.response_mask
    rewards = torch.where(place, changed, batch.rewards)
    errors = torch.where(place, errors, rounding_errors(batch.rewards, batch.reward_errors))
    return batch.replace(rewards=rewards, reward_errors=errors), running


def _rescale(
    batch: Batch, *, mean: Tensor, scale: Tensor, episode_of_row: Tensor
) -> tuple[Tensor, Tensor]:
    """Rewards divided by their episode's scale, with its mean taken from the episode's last action
    token, and their errors: [B, T] each. Subtracting the mean makes a reward smaller, but not its
    error."""
    layout = build_layout(
        batch.response_mask, turn_ids=batch.turn_ids, episode_ids=batch.episode_ids
    )
    ends = layout.index[layout.episode_lengths.cumsum(0) - 1]
    episodes = episode_of_row[ends // batch.response_mask.shape[1]]
    rewards = torch.where(batch.response_mask, batch.rewards.double(), 0.0).flatten()
    rewards[ends] -= mean[episodes]
    divisor = scale[episode_of_row][:, None]
    changed = (rewards.view(batch.rewards.shape) / divisor).to(batch.rewards.dtype)
    return changed, rounding_errors(batch.rewards, batch.reward_errors) / divisor + rounding_errors(
        changed
    )


class RewardNormalizer:
    """Normalises each environment's rewards by its own config (`env.shaping`), and keeps the
    running statistics.

    Example:
        >>> normalizer = RewardNormalizer({"lake": ShapingConfig(normalize="running")})
        >>> normalizer.state_dict()
        {'lake': {'count': 0, 'mean': 0.0, 'squares': 0.0}}
    """

    def __init__(
        self, shaping: Mapping[str, ShapingConfig], *, singleton: Singleton = "error"
    ) -> None:
        self._shaping = {
            tag: config for tag, config in shaping.items() if config.normalize != "none"
        }
        self._singleton: Singleton = singleton
        self._running = {
            tag: RunningStats()
            for tag, config in self._shaping.items()
            if config.normalize == "running"
        }

    def __call__(self, batch: Batch, tags: Sequence[str]) -> Batch:
        """The batch with normalised rewards; `tags` names the environment of every row."""
        if len(tags) != batch.num_rows:
            raise ValueError(
                f"every row has an environment's tag, got {len(tags)} tags for {batch.num_rows} "
                "rows"
            )
        for tag, config in self._shaping.items():
            rows = torch.tensor([other == tag for other in tags], device=batch.rewards.device)
            batch, running = normalize_rewards(
                batch,
                how=config.normalize,
                std=config.normalize_std,
                running=self._running.get(tag),
                rows=rows,
                singleton=self._singleton,
            )
            if tag in self._running:
                self._running[tag] = running
        return batch

    def state_dict(self) -> dict[str, Json]:
        return {tag: stats.to_json() for tag, stats in self._running.items()}

    def load_state_dict(self, state: Mapping[str, Json]) -> None:
        if set(state) != set(self._running):
            raise ValueError(
                f"running reward statistics are of {', '.join(sorted(state)) or 'nothing'}, and "
                "the config "
                f"normalises {', '.join(sorted(self._running)) or 'nothing'}; resume with the "
                "config of the run"
            )
        self._running = {tag: RunningStats.from_json(stats) for tag, stats in state.items()}
