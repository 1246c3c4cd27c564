# pyright: reportUnknownMemberType=false
"""The slot cache: one static key/value tensor per layer, one row per slot, every row with a length
of its own.

A forward pass sees the cache through a `SlotView`: which rows it runs on, where each token's key
and value are written, and up to which position each token looks. The model is untouched: its
attention modules call the function registered here under ATTENTION, which takes the view in place
of the mask that transformers would make.
"""

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from turnwise.models.attention import routed

ATTENTION = "turnwise_slots"


class SlotView:
    """The part of the cache that one forward pass over [R, T] tokens sees.

    Args:
        rows: the slots that the pass runs on, [R]; None: the first R slots, which then are not
            copied.
        positions: each token's position in its sequence, [R, T]; it attends to the keys at or
            before it.
        write: where each token's key and value go, [R, T]; padding goes to the scratch position.
        length: attention covers the first so many positions of every row.
        softcap: whether a model that caps its attention logits does so here.

    Example: two rows at positions 2 and 0, keys 0..3

        >>> view = SlotView(rows=None, positions=torch.tensor([[2], [0]]),
        ...     write=torch.tensor([[2], [0]]), length=4)
        >>> (view.mask(window=None, groups=1, dtype=torch.float32) == 0)[:, 0, 0].int().tolist()
        [[1, 1, 1, 0], [1, 0, 0, 0]]
        >>> (view.mask(window=2, groups=1, dtype=torch.float32) == 0)[:, 0, 0].int().tolist()
        [[0, 1, 1, 0], [1, 0, 0, 0]]
    """

    def __init__(
        self,
        *,
        rows: Tensor | None,
        positions: Tensor,
        write: Tensor,
        length: int,
        softcap: bool = True,
    ) -> None:
        self.rows = rows
        self.positions = positions
        self.write = write
        self.length = length
        self.softcap = softcap
        num_rows = positions.shape[0]
        index = torch.arange(num_rows, device=positions.device) if rows is None else rows
        self.write_rows = index[:, None]  # [R, 1]
        self.windows: set[int] = set()
        """Sliding windows that the model's layers asked for."""
        self._masks: dict[tuple[int | None, int], Tensor] = {}

    def select(self, states: Tensor) -> Tensor:
        """The rows and positions of a layer's [slots + 1, H, L, D] that attention reads."""
        live = states[:, :, : self.length]
        return (
            live[: self.positions.shape[0]]
            if self.rows is None
            else live.index_select(0, self.rows)
        )

    def mask(self, *, window: int | None, groups: int, dtype: torch.dtype) -> Tensor:
        """Additive mask [R, 1, groups * T, length]; made once per pass and kind of layer, not once
        per layer."""
        key = (window, groups)
        if key not in self._masks:
            keys = torch.arange(self.length, device=self.positions.device)
            queries = self.positions[:, :, None]  # [R, T, 1]
            hidden = keys > queries
            if window is not None:
                hidden |= keys <= queries - window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(
                hidden, float("-inf")
            )
            self._masks[key] = mask[:, None].repeat(1, 1, groups, 1)
        return self._masks[key]


class SlotCache(Cache):
    """Keys and values of all slots. Layers are allocated when first used, so every head shape
    works.

    Row `slots` and position `length` are scratch: padding writes there and nothing reads it.
    """

    def __init__(self, *, slots: int, length: int) -> None:
        super().__init__(layers=[])
        self.slots = slots
        self.length = length
        self.view: SlotView | None = None
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Writes the new states at the view's places, and returns what the view reads."""
        assert self.view is not None, "a forward pass over the slot cache needs a view"
        if layer_idx == len(self._keys):
            self._keys.append(self._allocate(key_states))
            self._values.append(self._allocate(value_states))
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        rows, write = self.view.write_rows, self.view.write
        keys[rows, :, write] = key_states.transpose(1, 2)
        values[rows, :, write] = value_states.transpose(1, 2)
        return self.view.select(keys), self.view.select(values)

    def clear_row(self, row: int) -> None:
        """Zeroes a slot. Only needed after non-finite states: a zero weight times NaN is still
        NaN."""
        for states in (*self._keys, *self._values):
            states[row].zero_()
            states[self.slots].zero_()

    @property
    def num_bytes(self) -> int:
        """Memory held by keys and values."""
        return sum(
            states.numel() * states.element_size() for states in (*self._keys, *self._values)
        )

    def _allocate(self, states: Tensor) -> Tensor:
        _, heads, _, dim = states.shape
        return states.new_zeros((self.slots + 1, heads, self.length + 1, dim))

    # What masks and positions would be made from; both come with the view instead.
    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.length, 0

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return self.length


def attend(
    query: Tensor,  # [R, H, T, D]
    key: Tensor,  # [R, H / groups, L, D]
    value: Tensor,
    *,
    mask: Tensor,  # [R, 1, groups * T, L]
    scaling: float | None,
    softcap: float | None,
) -> Tensor:
    """Attention output [R, T, H, D]. Grouped heads share their keys: groups are folded into the
    query length."""
    num_rows, num_heads, num_tokens, dim = query.shape
    num_kv = key.shape[1]
    folded = query.reshape(num_rows, num_kv, num_heads // num_kv * num_tokens, dim)
    if softcap is None:
        out = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
    else:
        scale = dim**-0.5 if scaling is None else scaling
        weights = torch.tanh(folded @ key.transpose(2, 3) * scale / softcap) * softcap + mask
        out = torch.softmax(weights, dim=-1, dtype=torch.float32).to(query.dtype) @ value
    return out.reshape(num_rows, num_heads, num_tokens, value.shape[3]).transpose(1, 2)


_active = threading.local()


def slot_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls in every layer: ([R, T, H, D], no weights)."""
    if kwargs.get("s_aux") is not None:
        raise ValueError(
            "attention sinks (s_aux) are not supported by the slot cache; use another generator"
        )
    view: SlotView = _active.view
    if sliding_window is not None:
        view.windows.add(sliding_window)
    groups = query.shape[1] // key.shape[1]
    mask = view.mask(window=sliding_window, groups=groups, dtype=query.dtype)
    cap = softcap if view.softcap else None
    return attend(query, key, value, mask=mask, scaling=scaling, softcap=cap).contiguous(), None


AttentionInterface.register(ATTENTION, slot_attention)


@contextmanager
def slot_forward(configs: list[Any], *, cache: SlotCache, view: SlotView) -> Generator[None]:
    """Routes the attention of the models with these configs to the slot cache, for one forward
    pass."""
    cache.view = _active.view = view
    try:
        with routed(configs, ATTENTION):
            yield
    finally:
        cache.view = _active.view = None
