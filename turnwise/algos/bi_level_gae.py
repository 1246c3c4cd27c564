"""Bi-level GAE: credit over turns first, then over the tokens of each turn (VAGEN, arXiv
2510.16907).

Turn k covers the action tokens s_k..e_k, and its reward r_k stands on e_k. Backwards over turns,
with V' after the last one:

    d_k = r_k + high_level_gamma * V(e_{k+1}) - V(e_k)
    A_k = d_k + high_level_gamma * high_level_lam * A_{k+1}

Backwards over the tokens of one turn, from A_{e_k} = A_k:

    A_j = r_j + gamma * V_{j+1} - V_j + gamma * lam * A_{j+1}

What we changed: the ends of turns are given, never guessed from rewards that are not zero, so a
turn without a reward is a turn; a truncated episode bootstraps; `turn_value` and `last_token` are
the paper's variants as settings.
"""

from typing import Literal

import torch
from torch import Tensor

from turnwise.algos.algorithm import Algorithm, Estimate
from turnwise.algos.critics import bootstrap_of, last_values, same_shape, values_of
from turnwise.algos.layout import Layout, build_layout, discounted_suffix_sums, gae
from turnwise.algos.rounding import credit_error
from turnwise.algos.rounding import whiten as whiten_tokens
from turnwise.data.batch import Batch


def compute_bi_level_gae_advantage_return(
    token_level_rewards: Tensor,  # [B, T]
    values: Tensor,  # [B, T]
    loss_mask: Tensor,  # [B, T]
    gamma: float,
    lam: float,
    high_level_gamma: float,
    *,
    high_level_lam: float | None = None,
    turn_ids: Tensor | None = None,  # [B, T]
    bootstrap: Tensor | None = None,  # [B]
    whiten: bool = False,
    turn_value: Literal["last", "first"] = "last",
    last_token: Literal["replace", "add"] = "replace",
    episode_ids: Tensor | None = None,  # [B]
) -> tuple[Tensor, Tensor]:
    """Advantages and returns ([B, T] each, 0 outside the mask) of bi-level GAE: over turns, then
    inside each turn.

    The module docstring has the formulas. V' is the bootstrap, 0 without one. No value crosses the
    start of a turn: a later turn affects this one only through A_k. returns = advantages + values.

    Args:
        token_level_rewards: A turn's reward on its last token; what else stands there is added to
            its token's delta.
        high_level_lam: None: the same as lam.
        turn_ids: The turn of each action token. None: the turns are the maximal runs of the mask.
        bootstrap: The value of the state after a truncated row's last token, 0 where the episode
            terminated.
        whiten: Whiten the advantages over all action tokens. Returns stay as they are.
        turn_value: The token whose value stands for a turn: V(e_k), or V(s_k); then A_{e_k} = A_k +
            V(s_k) - V(e_k).
        last_token: replace: A_{e_k} = A_k. add: the token's own delta, r_k + gamma * V(s_{k+1}) -
            V(e_k), comes on top.
        episode_ids: Rows with equal ids are one episode, in the order of their turns. None: a row
            is an episode.

    Example: two turns, [x x] and [x], the reward in the second, a critic that says 0.5 everywhere
        >>> rewards, values = torch.tensor([[0.0, 0.0, 0.0, 0.0, 1.0]]), torch.full((1, 5), 0.5)
        >>> mask = torch.tensor([[False, True, True, False, True]])
        >>> advantages, _ = compute_bi_level_gae_advantage_return(rewards, values, mask, 1.0, 1.0,
        ...     0.9)
        >>> advantages
        tensor([[0.0000, 0.4000, 0.4000, 0.0000, 0.5000]])
    """
    same_shape(token_level_rewards, values, loss_mask)
    lay = build_layout(loss_mask, turn_ids=turn_ids, episode_ids=episode_ids)
    rewards, tokens = lay.take(token_level_rewards), lay.take(values)
    ends = lay.turn_ends
    anchors = tokens[ends if turn_value == "last" else lay.turn_starts]
    turn_advantages = gae(
        rewards[ends],
        anchors,
        lengths=lay.episode_turns,
        gamma=high_level_gamma,
        lam=lam if high_level_lam is None else high_level_lam,
        last_values=last_values(lay, bootstrap),
    )
    at_ends = turn_advantages + (anchors - tokens[ends])
    if last_token == "add":
        at_ends = (
            at_ends + rewards[ends] + gamma * _first_of_next(lay, tokens, bootstrap) - tokens[ends]
        )
    deltas = rewards - tokens
    deltas[:-1] += gamma * tokens[1:]
    deltas[ends] = at_ends
    advantages = discounted_suffix_sums(deltas, lengths=lay.turn_lengths, decay=gamma * lam)
    returns = advantages + tokens
    if whiten:
        error = credit_error(lay, rewards=token_level_rewards, values=values, bootstrap=bootstrap)
        advantages = whiten_tokens(advantages, error=error)
    return lay.put(advantages, values), lay.put(returns, values)


def _first_of_next(lay: Layout, tokens: Tensor, bootstrap: Tensor | None) -> Tensor:
    """The value before each turn's following turn in its episode, V' after the last one: [M]."""
    firsts = tokens[lay.turn_starts]
    following = torch.zeros_like(firsts)
    following[:-1] = firsts[1:]
    last = last_values(lay, bootstrap)
    following[lay.episode_turns.cumsum(0) - 1] = (
        tokens.new_zeros(()) if last is None else last.to(tokens.dtype)
    )
    return following


def estimate(batch: Batch, algorithm: Algorithm, rewards: Tensor) -> Estimate:
    advantages, returns = compute_bi_level_gae_advantage_return(
        rewards,
        values_of(batch),
        batch.response_mask,
        algorithm.gamma,
        algorithm.lam,
        algorithm.high_level_gamma,
        high_level_lam=algorithm.high_level_lam,
        turn_ids=batch.turn_ids,
        bootstrap=bootstrap_of(batch),
        turn_value=algorithm.turn_value,
        last_token=algorithm.last_token,
        episode_ids=batch.episode_ids,
    )
    return advantages, returns, {}


BI_LEVEL_GAE = Algorithm(
    name="bi_level_gae",
    advantage="bi_level_gae",
    estimator=estimate,
    settings=frozenset(
        {"gamma", "lam", "high_level_gamma", "high_level_lam", "turn_value", "last_token"}
    ),
    needs_critic=True,
    uses_token_rewards=True,
    whiten=True,
)
