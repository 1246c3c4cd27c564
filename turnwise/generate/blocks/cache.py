# pyright: reportUnknownMemberType=false
"""The key/value cache of all slots, and the attention function that reads it."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from turnwise.generate.blocks import ops

ATTENTION = "turnwise_blocks"


@dataclass(kw_only=True)
class View:
    """The view of the cache in one forward pass over packed tokens [1, N]."""

    rows: Tensor  # [N] slot of each token
    write: Tensor  # [N] position of its key and value
    block_rows: Tensor | None  # [blocks] each block's slot. None: single tokens, one of each slot
    block_at: Tensor | None  # [blocks] its first token
    block_first: Tensor  # [blocks] that token's position
    block_count: Tensor  # [blocks] how many tokens it has
    block: int
    """The most that a block can have."""
    holders: Tensor  # [slots + 1] int32: the slot that holds each slot's first positions
    shared: Tensor  # [slots + 1] int32: how many positions these are


class PackedCache(Cache):
    """Keys and values of all slots: [slots + 1, HK, length + 1, D] per layer, the last row and
    position scratch.

    The first positions of a slot may be in another slot (`holders`, `shared`): a group's common
    prompt prefix is stored and read once.
    """

    def __init__(self, *, slots: int, length: int, device: torch.device) -> None:
        super().__init__(layers=[])
        self.holders = torch.arange(slots + 1, dtype=torch.int32, device=device)
        self.shared = torch.zeros(slots + 1, dtype=torch.int32, device=device)
        self.slots = slots
        self.length = length
        self.view: View | None = None
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self._store: Tensor | None = None

    def allocate(self, *, layers: int, heads: int, dim: int, like: Tensor) -> None:
        """Allocates the memory of all layers at once, for models with equal layers."""
        shape = (layers, 2, self.slots + 1, heads, self.length + 1, dim)
        store = torch.zeros(shape, dtype=like.dtype, device=like.device)
        self._store = store
        self.keys = [store[layer, 0] for layer in range(layers)]
        self.values = [store[layer, 1] for layer in range(layers)]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        view = self.view
        assert view is not None, "a forward pass over the cache needs a view"
        if layer_idx == len(self.keys):
            _, heads, _, dim = key_states.shape
            shape = (self.slots + 1, heads, self.length + 1, dim)
            self.keys.append(key_states.new_zeros(shape))
            self.values.append(value_states.new_zeros(shape))
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        keys[view.rows, :, view.write] = key_states[0].transpose(0, 1)
        values[view.rows, :, view.write] = value_states[0].transpose(0, 1)
        return keys, values

    def copy(self, sources: Tensor, targets: Tensor, *, first: int, last: int) -> None:
        """Copies positions first..last of the source slots to the target slots. The sources must
        not share them."""
        if self._store is not None:
            part = self._store[:, :, :, :, first:last]
            part.index_copy_(2, targets, part.index_select(2, sources))
            return
        for states in (*self.keys, *self.values):
            part = states[:, :, first:last]
            part.index_copy_(0, targets, part.index_select(0, sources))

    @property
    def num_bytes(self) -> int:
        return sum(states.numel() * states.element_size() for states in (*self.keys, *self.values))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.length, 0

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return self.length


class Active:
    """The view of the pass that is running; a plain attribute, so that torch.compile can trace
    it."""

    view: View | None = None
    softcap: bool = True


def packed_attention(
    module: nn.Module,
    query: Tensor,  # [1, H, N, D]
    key: Tensor,  # the whole cache
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls in every layer: ([1, N, H, D], no weights)."""
    view = Active.view
    assert view is not None
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    cap = softcap if softcap is not None and Active.softcap else 0.0
    packed = query[0].transpose(0, 1).contiguous()
    out = ops.attend(
        packed,
        key,
        value,
        view.block_rows,
        view.block_at,
        view.block_first,
        view.block_count,
        view.holders,
        view.shared,
        view.block,
        scale,
        sliding_window or 0,
        cap,
    )
    return out[None], None


AttentionInterface.register(ATTENTION, packed_attention)
