"""Turn-level GAE: a turn is one action, and all its tokens get one number.

A_k = r_k + high_level_gamma * V(s_{k+1}) - V(s_k) + high_level_gamma * high_level_lam * A_{k+1}
"""

import torch
from torch import Tensor

from turnwise.algos.algorithm import Algorithm, Estimate
from turnwise.algos.critics import bootstrap_of, last_values, same_shape, values_of
from turnwise.algos.layout import build_layout, gae
from turnwise.algos.rounding import credit_error
from turnwise.algos.rounding import whiten as whiten_tokens
from turnwise.data.batch import Batch


def turn_gae(
    rewards: Tensor,  # [B, T]
    values: Tensor,  # [B, T]
    mask: Tensor,  # [B, T]
    *,
    gamma: float,
    lam: float,
    turn_ids: Tensor | None = None,  # [B, T]
    bootstrap: Tensor | None = None,  # [B]
    whiten: bool = False,
    episode_ids: Tensor | None = None,  # [B]
) -> tuple[Tensor, Tensor]:
    """Advantages and returns ([B, T] each, 0 outside the mask) of GAE over turns: one number for a
    turn's tokens.

    A turn is one action: its state's value is V(s_k), before its first token, its reward the sum of
    its tokens'. Its return A_k + V(s_k) is the critic's target on each of its tokens, for each of
    those prefixes leads to it.

    Example:
        >>> rewards, values = torch.tensor([[0.0, 1.0]]), torch.tensor([[0.25, 0.5]])
        >>> turn_gae(rewards, values, torch.tensor([[True, True]]), gamma=1.0, lam=1.0)[0]
        tensor([[0.7500, 0.7500]])
    """
    same_shape(rewards, values, mask)
    lay = build_layout(mask, turn_ids=turn_ids, episode_ids=episode_ids)
    states = lay.take(values)[lay.turn_starts]
    advantages = gae(
        lay.turn_sums(lay.take(rewards)),
        states,
        lengths=lay.episode_turns,
        gamma=gamma,
        lam=lam,
        last_values=last_values(lay, bootstrap),
    )
    spread = torch.repeat_interleave(advantages, lay.turn_lengths)
    returns = torch.repeat_interleave(advantages + states, lay.turn_lengths)
    if whiten:
        spread = whiten_tokens(
            spread, error=credit_error(lay, rewards=rewards, values=values, bootstrap=bootstrap)
        )
    return lay.put(spread, values), lay.put(returns, values)


def estimate(batch: Batch, algorithm: Algorithm, rewards: Tensor) -> Estimate:
    advantages, returns = turn_gae(
        rewards,
        values_of(batch),
        batch.response_mask,
        gamma=algorithm.high_level_gamma,
        lam=algorithm.high_level_lam,
        turn_ids=batch.turn_ids,
        bootstrap=bootstrap_of(batch),
        episode_ids=batch.episode_ids,
    )
    return advantages, returns, {}


TURN_GAE = Algorithm(
    name="turn_gae",
    advantage="turn_gae",
    estimator=estimate,
    settings=frozenset({"lam", "high_level_gamma", "high_level_lam"}),
    needs_critic=True,
    uses_token_rewards=True,
    whiten=True,
)
