"""GiGPO (arXiv 2505.10978): GRPO's episode advantage, plus a turn advantage among turns from the
same state.

    A = A_episode + gigpo_weight * (G - mean) / (std + 1e-6)

over all turns of the group that were played from the same state, where G discounts the turns'
rewards by `high_level_gamma` per turn. A state that occurs once contributes 0. States are compared
by the environment's state key, or by the text of the observation. Without `gigpo_std`, nothing is
divided, neither here nor in the episode's advantage.
"""

from typing import Unpack

from torch import Tensor

from turnwise.algos.algorithm import Algorithm, Estimate
from turnwise.algos.groups import (
    GroupInputs,
    Singleton,
    distance_from_mean,
    group_inputs,
    group_statistics,
    score_episodes,
    spread_over_tokens,
)
from turnwise.algos.same_state import turns_by_state
from turnwise.data.batch import Batch


def gigpo(
    rewards: Tensor,  # [B, T]
    mask: Tensor,  # [B, T]
    *,
    state_ids: Tensor,  # [B, T]
    gamma: float,
    weight: float = 1.0,
    normalize_std: bool = True,
    turn_ids: Tensor | None = None,  # [B, T]
    singleton: Singleton = "error",
    **group: Unpack[GroupInputs],
) -> tuple[Tensor, Tensor, float]:
    """Advantages and returns ([B, T] each) of GiGPO (arXiv 2505.10978), and the share of turns that
    had a peer.

    GRPO's advantage of the episode, plus `weight` times that of the turn among all turns of the
    group that were played from the same state: (G - mean) / (std + 1e-6), where G discounts the
    turns' rewards by `gamma` per turn. A state that occurs once contributes 0.

    Args:
        normalize_std: False leaves out both divisions by the standard deviation.
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
    members = group_statistics(
        turns.returns, turns.states, counted=turns.counted, errors=turns.errors
    )
    steps = distance_from_mean(members, singleton="zero", normalize_std=normalize_std)
    step_advantages = turns.layout.put_turns(steps, rewards)
    advantages, returns = spread_over_tokens(scored, episodes, rewards=rewards, mask=mask)
    peers = float(((members.size > 1) & members.counted).sum() / members.counted.sum().clamp(min=1))
    return advantages + weight * step_advantages, returns, peers


def estimate(batch: Batch, algorithm: Algorithm, rewards: Tensor) -> Estimate:
    advantages, returns, peers = gigpo(
        rewards,
        batch.response_mask,
        state_ids=batch.state_ids,
        gamma=algorithm.high_level_gamma,
        weight=algorithm.gigpo_weight,
        normalize_std=algorithm.gigpo_std,
        turn_ids=batch.turn_ids,
        singleton=algorithm.singleton,
        **group_inputs(batch),
    )
    return advantages, returns, {"gigpo/turns_with_peers": peers}


GIGPO = Algorithm(
    name="gigpo",
    advantage="gigpo",
    estimator=estimate,
    settings=frozenset({"high_level_gamma", "gigpo_weight", "gigpo_std"}),
    compares_groups=True,
    reduction="episode_mean",
)
