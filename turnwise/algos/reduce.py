"""Each token's share in a mini-batch's loss, fixed before the mini-batch is split."""

import torch
from torch import Tensor

from turnwise.algos.algorithm import Algorithm, Reduction
from turnwise.algos.layout import numbered
from turnwise.data.batch import Batch


def token_weights(batch: Batch, algorithm: Algorithm) -> Tensor:
    """Each token's share in the loss of this mini-batch: [B, T], 0 outside loss_mask.

    Call it on the whole mini-batch, store it as `Batch.weights`, then split: loss = sum(weights *
    per-token loss), so that the losses of micro-batches sum to that of the mini-batch, and no
    split, order or padding changes the loss or its gradient.

        token_mean      every trained token weighs the same
        sequence_mean   every row weighs the same, its tokens share
        episode_mean    every episode weighs the same, its tokens share, however many rows it became
        token_sum_norm  every token weighs 1 / (episodes * norm_tokens), a constant (Dr.GRPO)

    Rows and episodes without a trained token do not count. The weights sum to 1 except under
    token_sum_norm, and to 0 where nothing is trained.

    Example: rows of 1 and 3 trained tokens
        >>> mask = torch.tensor([[False, True, False, False], [False, True, True, True]])
        >>> token_weights_of(mask, torch.tensor([0, 1]), "sequence_mean")[:, 1]
        tensor([0.5000, 0.1667])
        >>> token_weights_of(mask, torch.tensor([0, 0]), "episode_mean")[:, 1]
        tensor([0.2500, 0.2500])
    """
    return token_weights_of(
        batch.loss_mask, batch.episode_ids, algorithm.reduction, norm_tokens=algorithm.norm_tokens
    )


def token_weights_of(
    loss_mask: Tensor,  # [B, T] bool
    episode_ids: Tensor,  # [B] int64
    reduction: Reduction,
    *,
    norm_tokens: float = 1.0,
) -> Tensor:
    """`token_weights` of bare tensors: [B, T] float32."""
    counts = loss_mask.sum(-1).double()  # [B]
    episode_of_row = numbered(episode_ids)
    # Entries beyond E stay 0.
    per_episode = counts.new_zeros(loss_mask.shape[0]).index_add_(0, episode_of_row, counts)
    episodes = (per_episode > 0).sum()
    if reduction == "token_mean":
        share = 1.0 / counts.sum().expand_as(counts)
    elif reduction == "sequence_mean":
        share = 1.0 / (counts * (counts > 0).sum())
    elif reduction == "episode_mean":
        share = 1.0 / (per_episode[episode_of_row] * episodes)
    else:
        share = 1.0 / (norm_tokens * episodes.double()).expand_as(counts)
    return torch.where(loss_mask, share[:, None], 0.0).float()
