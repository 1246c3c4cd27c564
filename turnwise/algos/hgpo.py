"""HGPO (arXiv 2602.22817): a turn against turns played from the same state, and from the same
states before it.

    A = sum of w_n * A_n / sum of w_n,    w_n = (n + 1) ** hgpo_alpha,    n = 1 .. hgpo_history + 1
    A_n = (G - mean) / (std + 1e-6)

over all turns of the group whose last n states, their own included, are the same, where G discounts
the turns' rewards by `high_level_gamma` per turn. The longer the shared history, the fewer turns
there are to compare with, but the more alike they are. Comparisons that say nothing (no peer, or a
return that is the mean) have no weight. With `hgpo_episode`, n = 0 is the episode among its group,
as in GRPO. Without `hgpo_std`, nothing is divided.

The weights and the standard deviation of turns, which is that of the population, are those of the
authors' code. What we changed: a return within rounding of the mean has no weight, and under
`hgpo_episode` an episode counts once in its group, not once per turn.
"""

from typing import Unpack

import torch
from torch import Tensor

from turnwise.algos.algorithm import Algorithm, Estimate
from turnwise.algos.groups import (
    EPS,
    GroupInputs,
    Members,
    Singleton,
    distance_from_mean,
    group_inputs,
    group_statistics,
    score_episodes,
    spread_over_tokens,
)
from turnwise.algos.layout import Layout, numbered
from turnwise.algos.same_state import turns_by_state
from turnwise.data.batch import Batch


def hgpo(
    rewards: Tensor,  # [B, T]
    mask: Tensor,  # [B, T]
    *,
    state_ids: Tensor,  # [B, T]
    gamma: float,
    history: int = 2,
    alpha: float = 1.0,
    normalize_std: bool = True,
    with_episode: bool = False,
    turn_ids: Tensor | None = None,  # [B, T]
    singleton: Singleton = "error",
    **group: Unpack[GroupInputs],
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Advantages and returns ([B, T] each) of HGPO (arXiv 2602.22817), and metrics.

    Args:
        history: How many states before a turn's own are compared at most.
        alpha: A comparison that shares n states, the turn's own included, weighs (n + 1) ** alpha.
        with_episode: The episode among its group is a comparison too, with weight 1.
        state_ids: Names the state in which each action token's turn was played; compared within a
            group.
    """
    scored = score_episodes(rewards, mask, **group)
    episodes = distance_from_mean(scored.members, singleton=singleton, normalize_std=normalize_std)
    turns = turns_by_state(
        scored,
        rewards=rewards,
        mask=mask,
        state_ids=state_ids,
        turn_ids=turn_ids,
        gamma=gamma,
        group=group,
    )
    lay, states, episode, counts = turns.layout, turns.states, turns.episodes, turns.counted
    before = _turns_before(lay)
    comparisons = [(1.0, _informative(scored.members)[episode], episodes[episode])]
    comparisons = comparisons if with_episode else []
    context, longest = states, int(lay.episode_turns.max()) if len(before) else 0
    peers = torch.zeros_like(counts)
    for shared in range(1, min(history + 1, longest) + 1):
        if shared > 1:  # the states up to the turn before, and this turn's own
            context = numbered(torch.stack([context.roll(1), states], -1))
        members = group_statistics(
            turns.returns, context, counted=counts & (before >= shared - 1), errors=turns.errors
        )
        peers = peers | ((members.size > 1) & members.counted)
        distance = _distance(members, normalize_std=normalize_std)
        comparisons.append(((shared + 1.0) ** alpha, _informative(members), distance))
    weights = sum(
        (weight * used for weight, used, _ in comparisons), torch.zeros_like(turns.returns)
    )
    total = sum(
        (weight * used * far for weight, used, far in comparisons), torch.zeros_like(weights)
    )
    means = torch.where(weights > 0, total / weights.clamp(min=1.0), 0.0)
    advantages = lay.put_turns(means, rewards)
    _, returns = spread_over_tokens(scored, episodes, rewards=rewards, mask=mask)
    number = counts.sum().clamp(min=1)
    metrics = {
        "hgpo/turns_with_peers": float(peers.sum() / number),
        "hgpo/comparisons": sum(float(used.sum() / number) for _, used, _ in comparisons),
    }
    return advantages, returns, metrics


def _turns_before(lay: Layout) -> Tensor:
    """How many turns of its episode come before each turn: [M]."""
    first = lay.episode_turns.cumsum(0) - lay.episode_turns
    turns = torch.arange(lay.turn_lengths.shape[0], device=lay.turn_lengths.device)
    return turns - torch.repeat_interleave(first, lay.episode_turns)


def _informative(members: Members) -> Tensor:
    """True where a member's distance from its group's mean is more than rounding: [E]."""
    far = (members.scores - members.mean).abs() > 2 * members.error
    return members.counted & (members.std > 0) & far


def _distance(members: Members, *, normalize_std: bool) -> Tensor:
    """Each member's distance from its group's mean, by the population's standard deviation: [E]."""
    distance = members.scores - members.mean
    if normalize_std:
        size = members.size.clamp(min=1)
        distance = distance / (members.std * ((size - 1) / size).sqrt() + EPS)
    return torch.where(members.counted & (members.std > 0), distance, 0.0)


def estimate(batch: Batch, algorithm: Algorithm, rewards: Tensor) -> Estimate:
    return hgpo(
        rewards,
        batch.response_mask,
        state_ids=batch.state_ids,
        gamma=algorithm.high_level_gamma,
        history=algorithm.hgpo_history,
        alpha=algorithm.hgpo_alpha,
        normalize_std=algorithm.hgpo_std,
        with_episode=algorithm.hgpo_episode,
        turn_ids=batch.turn_ids,
        singleton=algorithm.singleton,
        **group_inputs(batch),
    )


HGPO = Algorithm(
    name="hgpo",
    advantage="hgpo",
    estimator=estimate,
    settings=frozenset(
        {"high_level_gamma", "hgpo_history", "hgpo_alpha", "hgpo_std", "hgpo_episode"}
    ),
    compares_groups=True,
    reduction="episode_mean",
)
