# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
"""Packed prompts: the static inputs of a prefill pass, and how prompts are split into passes."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from turnwise.generate.blocks.cache import PackedCache, View
from turnwise.generate.blocks.staging import Staging

PREFILL_BLOCK = 16
"""Tokens of one slot that attention takes together."""
PREFILL_SIZES = (
    *range(256, 1024, 256),
    *range(1024, 4096, 512),
    *range(4096, 8192, 1024),
    *range(8192, 16384 + 1, 2048),
)
"""Sizes of passes. A pass is padded to the next size; above 2048 tokens at most a fifth is
padding."""


@dataclass(kw_only=True, slots=True)
class Prefill:
    """ids at positions start.. of one slot; after the last of a request's, the first token is
    drawn."""

    slot: int
    start: int
    ids: Sequence[int]
    final: bool
    twins: tuple[int, ...] = ()
    """Slots with the same prompt: they sample from the same logits and have the same states."""
    shared: int = 0
    """How many positions of this slot the twins read here; of the others they are given a copy."""

    @property
    def slots(self) -> tuple[int, ...]:
        """All that draw after it."""
        return (self.slot, *self.twins)


@dataclass(kw_only=True)
class PrefillBuffers:
    """The static inputs of a prefill of one size: parts of one tensor, so that they are copied at
    once."""

    inputs: Tensor  # all of what follows, int64
    tokens: Tensor  # [N]
    positions: Tensor  # [N]
    keep: Tensor  # [N / 16] index of the token after which to draw
    draw_rows: Tensor  # [N / 16] the slot to draw for, scratch where there is none
    draw_base: Tensor  # [N / 16] position of that token
    view: View

    @classmethod
    def make(cls, size: int, *, cache: PackedCache) -> "PrefillBuffers":
        sizes = _part_sizes(size)
        inputs = torch.zeros(sum(sizes), dtype=torch.int64, device=cache.shared.device)
        tokens, positions, rows, write, keep, draw_rows, draw_base, *block = inputs.split(sizes)
        view = View(
            rows=rows,
            write=write,
            block_rows=block[0],
            block_at=block[1],
            block_first=block[2],
            block_count=block[3],
            block=PREFILL_BLOCK,
            holders=cache.holders,
            shared=cache.shared,
        )
        return cls(
            inputs=inputs,
            tokens=tokens,
            positions=positions,
            keep=keep,
            draw_rows=draw_rows,
            draw_base=draw_base,
            view=view,
        )

    def load(self, items: Sequence[Prefill], *, slots: int, length: int, staging: Staging) -> None:
        """Copies the prompts in, concatenated; the rest is padding."""
        staged = staging.take(self.inputs.shape[0])
        inputs = staged.values
        inputs[:] = 0
        parts = np.split(inputs, np.cumsum(_part_sizes(self.tokens.shape[0]))[:-1])
        tokens, positions, token_rows, write, keep, draw_rows, draw_base, *block = parts
        block_rows, block_at, block_first, block_count = block
        nums = np.array([len(item.ids) for item in items], dtype=np.int64)
        rows = np.array([item.slot for item in items], dtype=np.int64)
        starts = np.array([item.start for item in items], dtype=np.int64)
        ends = nums.cumsum()
        total = int(nums.sum())
        tokens[:total] = list(chain.from_iterable(item.ids for item in items))
        positions[:total] = np.arange(total) + np.repeat(starts - ends + nums, nums)
        token_rows[:] = slots
        token_rows[:total] = np.repeat(rows, nums)
        write[:] = length
        write[:total] = positions[:total]
        blocks = -(-nums // PREFILL_BLOCK)
        used = int(blocks.sum())
        before = PREFILL_BLOCK * (np.arange(used) - np.repeat(blocks.cumsum() - blocks, blocks))
        block_rows[:] = slots
        block_rows[:used] = np.repeat(rows, blocks)
        block_at[:used] = np.repeat(ends - nums, blocks) + before
        block_at[used:] = total + PREFILL_BLOCK * np.arange(len(block_at) - used)  # the padding
        block_first[:used] = np.repeat(starts, blocks) + before
        block_count[:used] = np.minimum(np.repeat(nums, blocks) - before, PREFILL_BLOCK)
        draw_rows[:] = slots
        draws = [
            (end, item, slot)
            for end, item in zip(ends, items, strict=True)
            if item.final
            for slot in item.slots
        ]
        keep[: len(draws)] = [end - 1 for end, _, _ in draws]
        draw_rows[: len(draws)] = [slot for _, _, slot in draws]
        draw_base[: len(draws)] = [item.start + len(item.ids) - 1 for _, item, _ in draws]
        staged.send(self.inputs)


def _part_sizes(size: int) -> list[int]:
    """How the inputs of a pass are divided: by token, by draw, by block. There are blocks enough
    for the prompts that `room` lets in, and for the padding after them."""
    draws, blocks = size // PREFILL_BLOCK, 2 * size // PREFILL_BLOCK + 1
    return [size] * 4 + [draws] * 3 + [blocks] * 4


def room(num: int) -> int:
    """The part of a pass's size that `num` ids of one slot take up: a token each, and more where
    they would leave most of a block empty, because the blocks of a pass are limited.

    Example:
        >>> room(1), room(8), room(16), room(17), room(53)
        (15, 8, 16, 17, 53)
    """
    return max(num, -num % PREFILL_BLOCK)


def size_for(items: Sequence[Prefill]) -> int:
    """The size of the pass that holds these: it has room for their tokens, and for their draws."""
    draws = sum(1 + len(item.twins) for item in items if item.final)
    needed = max(sum(room(len(item.ids)) for item in items), PREFILL_BLOCK * draws)
    return next(size for size in PREFILL_SIZES if size >= needed)


def pack(items: Sequence[Prefill], most: int) -> list[list[Prefill]]:
    """The prefills in passes of at most the size `most`. Long prompts are split at the end of a
    pass and continue in the next. Passes run in order, so the pieces of a slot do too."""
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
            if room(num) > most - used:  # a few ids at the end of a pass that has no block for them
                used = most
                continue
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
            used += room(num)
            draws += drawing if final else 0
            start += num
    return parts
