"""Turns and the states they were played from, for algorithms that compare turns of equal states."""

from dataclasses import dataclass

import torch
from torch import Tensor

from turnwise.algos.groups import EpisodeScores, GroupInputs
from turnwise.algos.layout import Layout, build_layout, discounted_suffix_sums, numbered
from turnwise.algos.rounding import rounding_errors


@dataclass(frozen=True, kw_only=True, slots=True)
class StateTurns:
    """All turns of a batch: M of them."""

    layout: Layout
    returns: Tensor
    """Discounted rewards from each turn on: [M]."""
    errors: Tensor
    """A bound on the rounding errors of the returns: [M]."""
    states: Tensor
    """A number per state and group: [M]."""
    episodes: Tensor
    """The episode of each turn: [M]."""
    counted: Tensor
    """Whether that episode is compared at all: [M]."""


def turns_by_state(
    scored: EpisodeScores,
    *,
    rewards: Tensor,  # [B, T]
    mask: Tensor,  # [B, T]
    state_ids: Tensor,  # [B, T]
    turn_ids: Tensor | None,  # [B, T]
    gamma: float,
    group: GroupInputs,
) -> StateTurns:
    """The turns, their returns discounted by `gamma` per turn, and the states they began in."""
    layout = build_layout(mask, turn_ids=turn_ids, episode_ids=group.get("episode_ids"))
    returns, errors = (
        discounted_suffix_sums(
            layout.turn_sums(layout.take(part)), lengths=layout.episode_turns, decay=gamma
        )
        for part in (rewards, rounding_errors(rewards, group.get("errors")))
    )
    heads = layout.index[layout.turn_starts]
    rows = torch.div(heads, layout.shape[1], rounding_mode="floor")
    pairs = torch.stack([group["group_ids"][rows], state_ids.reshape(-1)[heads]], -1)
    episodes = scored.episode_of_row[rows]
    return StateTurns(
        layout=layout,
        returns=returns,
        errors=errors,
        states=numbered(pairs),
        episodes=episodes,
        counted=scored.members.counted[episodes],
    )
