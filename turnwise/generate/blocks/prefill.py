"""Prompts, packed: the static inputs of a prefill pass, and how prompts are cut into passes."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from turnwise.generate.blocks.cache import PackedCache, View, pinned

PREFILL_BLOCK = 16
"""Prompts are padded to blocks of so many tokens; a block belongs to one slot."""
PREFILL_SIZES = (
    *range(256, 1024, 256),
    *range(1024, 4096, 512),
    *range(4096, 8192, 1024),
    *range(8192, 16384 + 1, 2048),
)
"""Sizes of passes. A pass runs in the next larger one: at most a fifth of it is for nothing, above 2048 tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prefill:
    """ids at positions start.. of one slot; after the last of a request's, the first token is drawn."""

    slot: int
    start: int
    ids: Sequence[int]
    final: bool
    twins: tuple[int, ...] = ()
    """Slots that begin with the very same ids: they draw from the same logits and have the same states."""
    shared: int = 0
    """How many positions of this slot the twins read here; of the others they are given a copy."""


@dataclass(kw_only=True)
class PrefillBuffers:
    """The static inputs of a prefill of one size."""

    tokens: Tensor  # [N]
    positions: Tensor  # [N]
    keep: Tensor  # [N / 16] index of the token after which to draw
    draw_rows: Tensor  # [N / 16] int32: the slot to draw for, scratch where there is none
    draw_base: Tensor  # [N / 16] position of that token
    view: View

    @classmethod
    def make(cls, size: int, *, cache: PackedCache) -> "PrefillBuffers":
        blocks, device = size // PREFILL_BLOCK, cache.shared.device

        def zeros(num: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(num, dtype=dtype, device=device)

        view = View(
            rows=zeros(size),
            write=zeros(size),
            block_rows=zeros(blocks, torch.int32),
            block_first=zeros(blocks),
            block_count=zeros(blocks, torch.int32),
            block=PREFILL_BLOCK,
            holders=cache.holders,
            shared=cache.shared,
        )
        return cls(
            tokens=zeros(size),
            positions=zeros(size),
            keep=zeros(blocks),
            draw_rows=torch.full((blocks,), cache.slots, dtype=torch.int32, device=device),
            draw_base=zeros(blocks),
            view=view,
        )

    def load(self, items: Sequence[Prefill], *, slots: int, length: int) -> None:
        """Copies the prompts in, each padded to blocks; everything else rests."""
        size = self.tokens.shape[0]
        blocks = size // PREFILL_BLOCK
        token = np.zeros((4, size), dtype=np.int64)  # token, position, row, write
        token[2] = slots
        token[3] = length
        block = np.zeros((6, blocks), dtype=np.int64)  # row, first, count, keep, draw row, draw base
        block[0] = block[4] = slots
        at = draws = 0
        for item in items:
            num = len(item.ids)
            where = np.arange(item.start, item.start + num)
            token[0, at : at + num] = item.ids
            token[1, at : at + num] = token[3, at : at + num] = where
            token[2, at : at + num] = item.slot
            first = at // PREFILL_BLOCK
            last = first + -(-num // PREFILL_BLOCK)
            block[0, first:last] = item.slot
            block[1, first:last] = item.start + np.arange(last - first) * PREFILL_BLOCK
            block[2, first:last] = PREFILL_BLOCK
            block[2, last - 1] = num - (last - first - 1) * PREFILL_BLOCK
            if item.final:
                drawing = (item.slot, *item.twins)
                block[3, draws : draws + len(drawing)] = at + num - 1
                block[4, draws : draws + len(drawing)] = drawing
                block[5, draws : draws + len(drawing)] = item.start + num - 1
                draws += len(drawing)
            at = last * PREFILL_BLOCK
        device = self.tokens.device
        tokens, blocks_ = pinned(token, device), pinned(block, device)
        view = self.view
        for target, source in zip((self.tokens, self.positions, view.rows, view.write), tokens, strict=True):
            target.copy_(source)
        targets = (view.block_rows, view.block_first, view.block_count, self.keep, self.draw_rows, self.draw_base)
        for target, source in zip(targets, blocks_, strict=True):
            target.copy_(source)


def padded(num: int) -> int:
    """Tokens that `num` ids of one slot take up in a pass.

    Example:
        >>> padded(1), padded(16), padded(17)
        (16, 16, 32)
    """
    return -(-num // PREFILL_BLOCK) * PREFILL_BLOCK


def size_for(items: Sequence[Prefill]) -> int:
    """The size of the pass that holds these: it has room for their tokens, and for as many draws as it has blocks."""
    draws = sum(1 + len(item.twins) for item in items if item.final)
    needed = max(sum(padded(len(item.ids)) for item in items), PREFILL_BLOCK * draws)
    return next(size for size in PREFILL_SIZES if size >= needed)


def pack(items: Sequence[Prefill], most: int) -> list[list[Prefill]]:
    """The prefills in passes of at most `most` padded tokens. Long prompts are cut at the pass's end and go on in the
    next, and a slot's pieces stay in order, because passes run one after the other."""
    parts: list[list[Prefill]] = []
    used, draws = most, 0
    for item in items:
        start = 0
        while start < len(item.ids):
            drawing = PREFILL_BLOCK * (1 + len(item.twins))
            if used >= most or draws + drawing > most:
                parts.append([])
                used = draws = 0
            num = min(len(item.ids) - start, most - used)
            final = item.final and start + num == len(item.ids)
            parts[-1].append(
                Prefill(
                    slot=item.slot,
                    start=item.start + start,
                    ids=item.ids[start : start + num],
                    final=final,
                    twins=item.twins if final else (),
                    shared=item.shared,
                )
            )
            used += padded(num)
            draws += drawing if final else 0
            start += num
    return parts
