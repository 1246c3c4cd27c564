"""Converts episodes to TRL's training rows: one row of ids per episode, and per-token advantages if
configured."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from turnwise.algos.algorithm import Algorithm
from turnwise.algos.credit import compute_advantages
from turnwise.algos.groups import distance_from_mean, group_statistics, score_episodes
from turnwise.algos.turn_gae import turn_gae
from turnwise.data.batch import Batch, collate
from turnwise.data.samples import contexts, episode_to_samples, require_one_role
from turnwise.types import Episode, Sample

TRL_EPS = 1e-4
"""TRL's epsilon of standard deviations."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainRow:
    """One row of TRL's batch: an episode's last context, from its first reply to its last."""

    prompt_ids: list[int]
    completion_ids: list[int]
    mask: list[int]
    """1 where the token is trained on."""
    logprobs: list[float]
    episode: Episode
    sample: Sample | None
    """None if the episode failed: its row is one masked end-of-sequence token."""
    left_out: int
    """Tokens of earlier contexts, which do not fit into TRL's one row per episode."""
    context: int = -1
    """Which of the episode's contexts this is; -1 is the last."""

    @property
    def failed(self) -> bool:
        return self.sample is None

    @property
    def start(self) -> int:
        """Position of the first reply in the sample's ids."""
        return len(self.prompt_ids)


def train_row(episode: Episode, *, eos_id: int) -> TrainRow:
    """The row that an episode becomes. A failed episode is neither trained on nor scored; its row
    is a placeholder."""
    if episode.status.failed or not episode.turns:
        return TrainRow(
            prompt_ids=[eos_id],
            completion_ids=[eos_id],  # never empty: TRL looks at the last id of every completion
            mask=[0],
            logprobs=[0.0],
            episode=episode,
            sample=None,
            left_out=0,
        )
    require_one_role(episode, backend="trl")
    samples = episode_to_samples(episode)
    left_out = sum(sum(sample.loss_mask) for sample in samples[:-1])
    return _row(episode, samples[-1], context=-1, left_out=left_out)


def earlier_rows(episode: Episode) -> list[TrainRow]:
    """Rows of the contexts before the last, in their order."""
    if episode.status.failed or not episode.turns:
        return []
    samples = episode_to_samples(episode)[:-1]
    return [
        _row(episode, sample, context=index, left_out=0) for index, sample in enumerate(samples)
    ]


def _row(episode: Episode, sample: Sample, *, context: int, left_out: int) -> TrainRow:
    start = sample.response_mask.index(True)
    end = len(sample.ids) - sample.response_mask[::-1].index(True)
    return TrainRow(
        prompt_ids=list(sample.ids[:start]),
        completion_ids=list(sample.ids[start:end]),
        mask=[int(trained) for trained in sample.loss_mask[start:end]],
        logprobs=list(sample.logprobs[start:end]),
        episode=episode,
        sample=sample,
        left_out=left_out,
        context=context,
    )


def sampled_ids(row: TrainRow) -> list[int]:
    """The ids that the generator returned in the row's context, from those of the episode's turns
    that are to be trained on."""
    if row.failed or not row.episode.turns:
        return []
    turns = row.episode.turns
    found = [turns[number] for number in contexts(turns)[row.context].turns]
    return [token for turn in found if turn.trained for token in turn.completion.ids]


def trained_reward(episode: Episode) -> float | None:
    """The reward of the role that is trained on. None: the episode failed or has none, so that it
    is in no baseline."""
    roles = {turn.role for turn in episode.turns if turn.trained}
    if episode.status.failed or not roles:
        return None
    return math.fsum(turn.reward for turn in episode.turns if turn.role in roles)


def completion_messages(episode: Episode) -> list[dict[str, object]]:
    """All messages after the opening, including the environment's."""
    messages: list[dict[str, object]] = []
    for turn in episode.turns:
        messages.append({"role": "assistant", "content": turn.text})
        messages.extend(message.to_json() for message in turn.messages)
    return messages


def group_advantages(rewards: Tensor, *, group_size: int, scale: str) -> Tensor:
    """TRL's advantages of episodes [N], where those without a reward (NaN) are in no baseline and
    get 0.

    Example:
        >>> group_advantages(torch.tensor([1.0, 3.0, torch.nan, 5.0, 5.0, torch.nan]), group_size=3,
        ...     scale="none")
        tensor([-1.,  1.,  0.,  0.,  0.,  0.])
    """
    grouped = rewards.view(-1, group_size)
    centred = grouped - grouped.nanmean(1, keepdim=True)
    if scale == "group":
        scored = (~grouped.isnan()).sum(1, keepdim=True)
        centred = centred / (((centred**2).nansum(1, keepdim=True) / (scored - 1)).sqrt() + TRL_EPS)
    elif scale == "batch":
        centred = centred / (rewards[~rewards.isnan()].std() + TRL_EPS)
    return centred.reshape(-1).nan_to_num(nan=0.0)


def token_advantages(
    episodes: Sequence[Episode | None],
    *,
    credit: str,
    algorithm: Algorithm | None,
    turn_discount: float,
    scale: bool,
    env_weight: float = 1.0,
    extra: Sequence[float] = (),
) -> tuple[dict[str, list[Tensor]], dict[str, float]]:
    """(advantages of every token of every context, by episode id, and metrics), over the episodes
    of all processes.

    It needs the episodes of all groups; None and failed ones are skipped.

    Args:
        env_weight: weighs the environment's rewards, as TRL's reward_weights do.
        extra: what further reward functions gave to each episode, weighed; it counts for the last
            turn.
    """
    usable = {
        index: episode
        for index, episode in enumerate(episodes)
        if episode is not None and episode.turns and not episode.status.failed
    }
    samples = [sample for episode in usable.values() for sample in episode_to_samples(episode)]
    if not samples:
        return {}, {}
    batch = collate(samples)
    batch = batch.replace(rewards=batch.rewards * env_weight)
    if any(extra):
        bonus = {episode.id: extra[index] for index, episode in usable.items()}
        batch = _add_to_last_turns(batch, samples, bonus)
    if credit == "turn_level":
        advantages, metrics = turn_returns(batch, discount=turn_discount, scale=scale)
    else:
        assert algorithm is not None
        scored, metrics = compute_advantages(batch, algorithm)
        assert scored.advantages is not None
        advantages = scored.advantages
    found: dict[str, list[Tensor]] = {}
    for row, sample in enumerate(samples):
        found.setdefault(sample.episode_id, []).append(advantages[row, : len(sample.ids)])
    return found, {f"credit/{name}": value for name, value in metrics.items()}


def turn_returns(batch: Batch, *, discount: float, scale: bool) -> tuple[Tensor, dict[str, float]]:
    """Advantages [B, T]: a turn's discounted return, compared with the same turn of the group's
    other episodes.

    The return is that of turn-level GAE with all values 0 and a lambda of 1. A turn that no other
    member of the group reached gets 0; `lone_turns` counts them.
    """
    zeros = torch.zeros_like(batch.rewards)
    returns, _ = turn_gae(
        batch.rewards,
        zeros,
        batch.response_mask,
        gamma=discount,
        lam=1.0,
        turn_ids=batch.turn_ids,
        bootstrap=None,
        episode_ids=batch.episode_ids,
    )
    # One token per turn.
    last = batch.response_mask & (batch.turn_ids != torch.roll(batch.turn_ids, -1, dims=1))
    rows, columns = last.nonzero(as_tuple=True)
    turns = batch.turn_ids[rows, columns]
    peers = batch.group_ids[rows] * (int(turns.max()) + 1) + turns
    scored = score_episodes(
        batch.rewards, batch.response_mask, group_ids=batch.group_ids, episode_ids=batch.episode_ids
    )
    # A turn's rounding error is at most that of its episode.
    errors = scored.members.errors[scored.episode_of_row[rows]]
    members = group_statistics(returns[rows, columns], peers, errors=errors)
    centred = distance_from_mean(members, singleton="zero", normalize_std=scale)
    width = int(turns.max()) + 1
    table = returns.new_zeros(batch.num_rows * width)
    table[rows * width + turns] = centred.to(table.dtype)
    said_rows, said_columns = batch.response_mask.nonzero(as_tuple=True)
    advantages = torch.zeros_like(returns)
    advantages[said_rows, said_columns] = table[
        said_rows * width + batch.turn_ids[said_rows, said_columns]
    ]
    return advantages, {"lone_turns": float(members.alone.sum())}


def _add_to_last_turns(batch: Batch, samples: Sequence[Sample], bonus: dict[str, float]) -> Batch:
    rewards = batch.rewards.clone()
    last_rows = {sample.episode_id: row for row, sample in enumerate(samples)}
    for episode_id, row in last_rows.items():
        end = int(batch.response_mask[row].nonzero()[-1])
        rewards[row, end] += bonus[episode_id]
    return batch.replace(rewards=rewards)
