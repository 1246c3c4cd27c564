"""Samples one token per row, with noise that depends only on the row's seed and position."""

import torch
from torch import Tensor

# Splitmix64's, as signed 64-bit integers.
_MULTIPLIERS = (
    -4658895280553007687,
    -7723592293110705685,
)
_GOLDEN = -7046029254386353131


def _mix(x: Tensor) -> Tensor:
    """splitmix64's finaliser on int64 tensors; the shifts are logical, so the sign bits are masked
    away."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _MULTIPLIERS[0]
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _MULTIPLIERS[1]
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """Uniform float64 in [0, 1), one per (seed, position), without any generator state.

    Counter-based: the same pair gives the same number on every device, in every batch, in any
    order.

    Example:
        >>> seeds, positions = torch.tensor([1, 1, 2]), torch.tensor([0, 1, 0])
        >>> [round(u, 4) for u in uniform(seeds, positions).tolist()]
        [0.8629, 0.3682, 0.8986]
    """
    bits = _mix(_mix(seeds + _GOLDEN) + positions * _GOLDEN)
    # 52 bits, one less than a float64 holds: the product with a total then stays below the total.
    return ((bits >> 12) & 0xFFFFFFFFFFFFF).double() * 2.0**-52


def truncate(logits: Tensor, *, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Logits with everything outside each row's top-k and top-p set to -inf. 0 and 1.0 are off.

    top_p keeps the fewest tokens whose probabilities reach it (always one at least), after top_k.

    Example:
        >>> logits = torch.log(torch.tensor([[0.5, 0.3, 0.2]]))
        >>> truncate(logits, top_k=torch.tensor([2]),
        ...     top_p=torch.tensor([1.0])).exp().tolist()[0][2]
        0.0
        >>> truncate(logits, top_k=torch.tensor([0]), top_p=torch.tensor([0.4])).isfinite().tolist()
        [[True, False, False]]
    """
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    dropped = (rank >= top_k[:, None]) & (top_k > 0)[:, None]
    probs = ordered.masked_fill(dropped, float("-inf")).softmax(-1, dtype=torch.float64)
    before = probs.cumsum(-1) - probs
    dropped |= (before >= top_p[:, None]) & (top_p < 1.0)[:, None] & (rank > 0)
    return logits.masked_fill(torch.zeros_like(dropped).scatter(-1, order, dropped), float("-inf"))


def draw(
    logits: Tensor,  # [R, V]
    *,
    seeds: Tensor,  # [R] int64
    positions: Tensor,  # [R] int64
    temperature: Tensor,  # [R] float32; 0 is greedy
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(ids [R], log-probs [R] in float32) of one token per row.

    The log-prob is log_softmax(logits / temperature), of the truncated logits where top_k or top_p
    are given; a greedy row reports the distribution of temperature 1. The token is found by
    inverting the cumulative distribution in float64 at `uniform(seed, position)`: one number per
    token, whatever the size of the vocabulary, and a token of probability zero is never drawn.

    Example:
        >>> logits = torch.log(torch.tensor([[0.25, 0.75]])).repeat(4, 1)
        >>> ids, logprobs = draw(logits, seeds=torch.arange(4),
        ...     positions=torch.zeros(4, dtype=torch.long),
        ...                      temperature=torch.tensor([1.0, 1.0, 1.0, 0.0]))
        >>> ids[3].item(), round(logprobs[3].exp().item(), 4)
        (1, 0.75)
    """
    greedy = temperature == 0.0
    scaled = logits.float() / torch.where(greedy, 1.0, temperature)[:, None]
    if top_k is not None and top_p is not None:
        scaled = truncate(scaled, top_k=top_k, top_p=top_p)
    logprobs = torch.log_softmax(scaled, dim=-1)
    cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
    threshold = uniform(seeds, positions)[:, None] * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, threshold, right=True).clamp_(max=logits.shape[-1] - 1)[
        :, 0
    ]
    ids = torch.where(greedy, scaled.argmax(-1), drawn)
    return ids, logprobs.gather(-1, ids[:, None])[:, 0]
