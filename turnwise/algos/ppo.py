"""PPO (arXiv 1707.06347) with GAE over tokens (arXiv 1506.02438).

    A_t = r_t + gamma * V_{t+1} - V_t + gamma * lam * A_{t+1}

What we changed: the token after an action token is the next action token, in the next turn if need
be; observations are skipped. A truncated episode bootstraps.
"""

from torch import Tensor

from turnwise.algos.algorithm import Algorithm, Estimate
from turnwise.algos.critics import bootstrap_of, last_values, same_shape, values_of
from turnwise.algos.layout import build_layout, gae
from turnwise.algos.rounding import credit_error
from turnwise.algos.rounding import whiten as whiten_tokens
from turnwise.data.batch import Batch


def token_gae(
    rewards: Tensor,  # [B, T]
    values: Tensor,  # [B, T]
    mask: Tensor,  # [B, T]
    *,
    gamma: float,
    lam: float,
    bootstrap: Tensor | None = None,  # [B]
    whiten: bool = False,
    turn_ids: Tensor | None = None,  # [B, T]
    episode_ids: Tensor | None = None,  # [B]
) -> tuple[Tensor, Tensor]:
    """Advantages and returns ([B, T] each, 0 outside the mask) of GAE over the action tokens of
    each episode.

    The token after an action token is the next action token, in the next turn if need be; turns
    play no part but to order an episode's rows where `episode_ids` say that it has several. (GAE,
    arXiv 1506.02438.)

    Example:
        >>> import torch
        >>> rewards, values = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.5, 9.0, 0.75]])
        >>> token_gae(rewards, values, torch.tensor([[True, False, True]]), gamma=1.0, lam=0.0)[0]
        tensor([[0.2500, 0.0000, 0.2500]])
    """
    same_shape(rewards, values, mask)
    lay = build_layout(mask, turn_ids=turn_ids, episode_ids=episode_ids)
    tokens = lay.take(values)
    advantages = gae(
        lay.take(rewards),
        tokens,
        lengths=lay.episode_lengths,
        gamma=gamma,
        lam=lam,
        last_values=last_values(lay, bootstrap),
    )
    returns = advantages + tokens
    if whiten:
        error = credit_error(lay, rewards=rewards, values=values, bootstrap=bootstrap)
        advantages = whiten_tokens(advantages, error=error)
    return lay.put(advantages, values), lay.put(returns, values)


def estimate(batch: Batch, algorithm: Algorithm, rewards: Tensor) -> Estimate:
    advantages, returns = token_gae(
        rewards,
        values_of(batch),
        batch.response_mask,
        gamma=algorithm.gamma,
        lam=algorithm.lam,
        bootstrap=bootstrap_of(batch),
        turn_ids=batch.turn_ids,
        episode_ids=batch.episode_ids,
    )
    return advantages, returns, {}


PPO = Algorithm(
    name="ppo",
    advantage="token_gae",
    estimator=estimate,
    settings=frozenset({"gamma", "lam"}),
    needs_critic=True,
    uses_token_rewards=True,
    whiten=True,
)
