"""REINFORCE++ (arXiv 2501.03262): what comes after a token, against the whole batch.

    A_t = r_t + gamma * A_{t+1}, whitened over the batch's tokens

No critic and no group. The paper's KL penalty in the reward is `algo.kl_in: reward`.
"""

from torch import Tensor

from turnwise.algos.algorithm import Algorithm, Estimate
from turnwise.algos.layout import build_layout, discounted_suffix_sums
from turnwise.algos.rounding import credit_error
from turnwise.algos.rounding import whiten as whiten_tokens
from turnwise.data.batch import Batch


def reinforce_pp(
    rewards: Tensor,  # [B, T]
    mask: Tensor,  # [B, T]
    *,
    gamma: float = 1.0,
    whiten: bool = True,
    turn_ids: Tensor | None = None,  # [B, T]
    episode_ids: Tensor | None = None,  # [B]
) -> tuple[Tensor, Tensor]:
    """Advantages and returns ([B, T] each) of REINFORCE++ (arXiv 2501.03262): the discounted sum of
    what comes after.

    The return of a token is its reward and the discounted rewards of the action tokens after it;
    the batch's mean and variance over tokens are the baseline (`whiten`). No group is needed.

    Example:
        >>> import torch
        >>> rewards, mask = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[True, False, True]])
        >>> reinforce_pp(rewards, mask, gamma=0.5, whiten=False)[0]
        tensor([[0.5000, 0.0000, 1.0000]])
    """
    lay = build_layout(mask, turn_ids=turn_ids, episode_ids=episode_ids)
    sums = discounted_suffix_sums(lay.take(rewards), lengths=lay.episode_lengths, decay=gamma)
    advantages = whiten_tokens(sums, error=credit_error(lay, rewards=rewards)) if whiten else sums
    return lay.put(advantages, rewards), lay.put(sums, rewards)


def estimate(batch: Batch, algorithm: Algorithm, rewards: Tensor) -> Estimate:
    advantages, returns = reinforce_pp(
        rewards,
        batch.response_mask,
        gamma=algorithm.gamma,
        whiten=False,
        turn_ids=batch.turn_ids,
        episode_ids=batch.episode_ids,
    )
    return advantages, returns, {}


REINFORCE_PP = Algorithm(
    name="reinforce_pp",
    advantage="reinforce_pp",
    estimator=estimate,
    settings=frozenset({"gamma"}),
    uses_token_rewards=True,
    whiten=True,
)
