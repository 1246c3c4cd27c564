"""Shared by estimators with a critic: its values, and the value after a truncated episode."""

import torch
from torch import Tensor

from turnwise.algos.layout import Layout
from turnwise.data.batch import Batch


def values_of(batch: Batch) -> Tensor:
    """[B, T]; `compute_advantages` has checked that they are set."""
    assert batch.values is not None
    return batch.values


def bootstrap_of(batch: Batch) -> Tensor | None:
    """The value after each truncated row: [B]. 0 for a terminated episode, regardless of
    Batch.bootstrap."""
    return None if batch.bootstrap is None else torch.where(batch.truncated, batch.bootstrap, 0.0)


def last_values(lay: Layout, bootstrap: Tensor | None) -> Tensor | None:
    return None if bootstrap is None else bootstrap[lay.last_rows]


def same_shape(rewards: Tensor, values: Tensor, mask: Tensor) -> None:
    if not rewards.shape == values.shape == mask.shape or rewards.dim() != 2:
        shapes = f"{tuple(rewards.shape)}, {tuple(values.shape)} and {tuple(mask.shape)}"
        raise ValueError(f"rewards, values and mask must share one shape [B, T], got {shapes}")
