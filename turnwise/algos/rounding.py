"""Bounds on float32 rounding errors, and statistics that do not mistake them for differences.

Dividing by a standard deviation turns the smallest difference into an advantage of about 1. Where
everything is equal, the smallest difference is rounding: 0.2 + 3.4 and 3.6 differ in the last bit.
The estimators compute in float64, so the error that is left is that of their inputs, and how it
adds up is known.
"""

import torch
from torch import Tensor

from turnwise.algos.layout import Layout

ROUNDING = 2.0**-23
"""Error of a float32 number that was rounded twice (by its environment, and when it was stored), as
a share of it."""


def rounding_errors(numbers: Tensor, errors: Tensor | None = None) -> Tensor:
    """A bound on the rounding error of each number, in float64: `errors` if given."""
    return numbers.double().abs() * ROUNDING if errors is None else errors.double()


def credit_error(
    lay: Layout,
    *,
    rewards: Tensor,  # [B, T]
    errors: Tensor | None = None,  # [B, T] of the rewards
    values: Tensor | None = None,  # [B, T]
    bootstrap: Tensor | None = None,  # [B]
) -> Tensor:
    """A bound on the error of every advantage, whichever estimator computed it: a number.

    An advantage is a weighted mean of n-step returns less a value, with weights that sum to 1 and
    discounts of at most 1. So it holds the rewards of an episode once and two values. Bi-level
    GAE's options `turn_value: first` and `last_token: add` add the rewards once more and four
    values.
    """
    token_errors = lay.take(rounding_errors(rewards, errors))
    episodes = torch.repeat_interleave(lay.episode_lengths)
    sums = token_errors.new_zeros(lay.episode_lengths.shape[0]).index_add_(
        0, episodes, token_errors
    )
    bound = 2 * largest(sums)
    if values is not None:
        bound = bound + 6 * torch.maximum(largest(lay.take(values)), largest(bootstrap)) * ROUNDING
    return bound


def whiten(x: Tensor, *, error: Tensor | None = None) -> Tensor:
    """x with mean 0 and (unbiased) variance 1; exactly 0 where its entries differ by no more than
    rounding: [N].

    Args:
        error: how far rounding may have moved an entry. None: as if the entries themselves were
            rounded.
    """
    error = largest(rounding_errors(x)) if error is None else error
    if x.numel() < 2 or bool(x.max() - x.min() <= 2 * error):
        return torch.zeros_like(x)
    var, mean = torch.var_mean(x.double())
    return ((x.double() - mean) * torch.rsqrt(var + 1e-8)).to(x.dtype)


def masked_whiten(x: Tensor, mask: Tensor, *, error: Tensor | None = None) -> Tensor:
    """x with mean 0 and (unbiased) variance 1 over the mask, 0 outside it. What lies outside is
    never read.

    Example:
        >>> masked_whiten(torch.tensor([1.0, float("nan"), 3.0]), torch.tensor([True, False, True]))
        tensor([-0.7071,  0.0000,  0.7071])
    """
    full = torch.zeros_like(x)
    full[mask] = whiten(x[mask], error=error)
    return full


def largest(x: Tensor | None) -> Tensor:
    """The largest absolute value, 0 of nothing: a float64 number."""
    return (
        torch.zeros((), dtype=torch.float64)
        if x is None or not x.numel()
        else x.double().abs().max().cpu()
    )
