# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""Attention over verl's packed rows where flash-attention is not installed: torch's own kernel."""

import importlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AttentionInterface

from turnwise.integrations.verl.config.settings import PACKED_ATTENTION
from turnwise.models.packing import packed_attention

_known: Any = WeakIdKeyDictionary()
"""Positions of a pass -> its rows. Every layer of a pass is called with the same tensor."""


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    position_ids: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention within the rows that `position_ids` counts: ([1, N, H, D], no weights).

    verl hands a packed pass to the model as positions alone.

    Raises:
        ValueError: there are no positions, or rows are divided over ranks (sequence parallelism).
    """
    if position_ids is None or position_ids.dim() != 2:
        raise ValueError(
            "packed rows are told apart by their position_ids, which this model does not hand to "
            "its attention; set train.packing to false"
        )
    ulysses: Any = importlib.import_module("verl.utils.ulysses")
    if (ranks := ulysses.get_ulysses_sequence_parallel_world_size()) > 1:
        raise ValueError(
            f"rows are divided over {ranks} ranks (ulysses_sequence_parallel_size), which needs "
            "flash-attention; install flash-attn"
        )
    if position_ids not in _known:
        _known[position_ids] = rows_of(position_ids)
    rows: tuple[Tensor, int] = _known[position_ids]
    boundaries, longest = rows
    return packed_attention(
        module,
        query,
        key,
        value,
        attention_mask,
        cu_seq_lens_q=boundaries,
        max_length_q=longest,
        **kwargs,
    )


def rows_of(position_ids: Tensor) -> tuple[Tensor, int]:
    """(where each row starts, and the end; tokens of the longest row).

    Example:
        >>> rows_of(torch.tensor([[0, 1, 2, 0, 1]]))
        (tensor([0, 3, 5], dtype=torch.int32), 3)
    """
    starts = (position_ids[0] == 0).nonzero()[:, 0]
    end = starts.new_tensor([position_ids.shape[1]])
    boundaries = torch.cat([starts, end])
    return boundaries.int(), int(boundaries.diff().max())


def register() -> None:
    """Makes the function known to transformers, by the name that the settings use."""
    AttentionInterface.register(PACKED_ATTENTION, attention)
