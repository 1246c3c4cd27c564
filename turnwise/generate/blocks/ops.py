# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
"""The block engine's two operations, as torch operators: attention over slots, and drawing the next
token.

On CUDA they are Triton kernels (`kernels`); elsewhere plain torch with the same results.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from turnwise.generate.sampling import draw

TILE = 64
"""Positions of a slot that attention reads at once. Shared prefixes are a multiple of it."""


@dataclass(kw_only=True)
class SlotState:
    """The decoding state of all slots, on the device. Kernels update it; the host only adds new
    requests."""

    slots: int
    length: int
    """Positions of a slot; the one after them is scratch."""
    token: Tensor  # [slots + 1] int64: the next token to feed
    position: Tensor  # [slots + 1] int64: its position
    # [slots + 1] int64: where its key and value go: its position, or scratch where the slot rests.
    write: Tensor
    count: Tensor  # [slots + 1] int32: 1 where the slot is decoding, 0 where it rests
    seed: Tensor  # [slots + 1] int64
    temperature: Tensor  # [slots + 1] float32
    left: Tensor  # [slots + 1] int32: tokens that may still be drawn
    stop: Tensor  # [vocab] uint8: 1 on ids that end a completion
    out_ids: Tensor  # [ring, slots] int32: drawn ids by step, -1 where none was drawn
    out_logprobs: Tensor  # [ring, slots] float32
    cursor: Tensor  # [1] int64: the ring's current row; every decode step moves it on

    @classmethod
    def make(
        cls, *, slots: int, length: int, vocab: int, ring: int, device: torch.device
    ) -> "SlotState":
        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        return cls(
            slots=slots,
            length=length,
            token=zeros(slots + 1, dtype=torch.int64),
            position=zeros(slots + 1, dtype=torch.int64),
            write=torch.full((slots + 1,), length, dtype=torch.int64, device=device),
            count=zeros(slots + 1, dtype=torch.int32),
            seed=zeros(slots + 1, dtype=torch.int64),
            temperature=torch.ones(slots + 1, device=device),
            left=zeros(slots + 1, dtype=torch.int32),
            stop=zeros(vocab, dtype=torch.uint8),
            out_ids=torch.full((ring, slots), -1, dtype=torch.int32, device=device),
            out_logprobs=zeros(ring, slots, dtype=torch.float32),
            cursor=zeros(1, dtype=torch.int64),
        )


@torch.library.custom_op("turnwise::attend", mutates_args=())
def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: Tensor | None,
    at: Tensor | None,
    first: Tensor,
    count: Tensor,
    holders: Tensor,
    shared: Tensor,
    block: int,
    scale: float,
    window: int,
    cap: float,
) -> Tensor:
    """Attention [N, H, D] of N tokens in blocks of at most `block`, each block a stretch of one
    slot.

    Args:
        query: [N, H, D].
        keys: [slots + 1, HK, length + 1, D], the new tokens' included.
        rows: each block's slot, [blocks]. None: the blocks are single tokens, one of each slot.
        at: the index of each block's first token. None where `rows` is.
        first: the position of each block's first token.
        count: how many tokens the block has. Where it has none, the `block` tokens from `at` on are
            padding and come out as zeros. Every token is in one block.
        holders: by slot, [slots + 1]: the slot that holds its first positions.
        shared: by slot: how many positions these are, a multiple of TILE.
        window: how far back a token looks, itself included; 0 is everything.
        cap: soft cap of the attention logits; 0 is none.
    """
    if query.is_cuda:
        from turnwise.generate.blocks import kernels

        return kernels.attend(
            query,
            keys,
            values,
            rows,
            at,
            first,
            count,
            holders,
            shared,
            block=block,
            scale=scale,
            window=window,
            cap=cap,
        )
    return _attend_reference(
        query, keys, values, rows, at, first, count, holders, shared, block, scale, window, cap
    )


@attend.register_fake
def _(  # pyright: ignore[reportUnusedFunction]
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: Tensor | None,
    at: Tensor | None,
    first: Tensor,
    count: Tensor,
    holders: Tensor,
    shared: Tensor,
    block: int,
    scale: float,
    window: int,
    cap: float,
) -> Tensor:
    return torch.empty_like(query)


def _attend_reference(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: Tensor | None,
    at: Tensor | None,
    first: Tensor,
    count: Tensor,
    holders: Tensor,
    shared: Tensor,
    block: int,
    scale: float,
    window: int,
    cap: float,
) -> Tensor:
    num, heads, _ = query.shape
    groups = heads // keys.shape[1]
    singles = torch.arange(first.shape[0], device=query.device)
    own, start = (singles, singles) if rows is None or at is None else (rows.long(), at.long())
    offset = torch.arange(block, device=query.device)
    real = offset < count[:, None]  # [blocks, block]
    position = first[:, None] + offset
    token = start[:, None] + offset
    elsewhere = (torch.arange(keys.shape[2], device=query.device) < shared[own][:, None])[
        :, None, :, None
    ]
    held = holders.long()[own]
    wide = torch.promote_types(query.dtype, torch.float32)
    k, v = (torch.where(elsewhere, states[held], states[own]).to(wide) for states in (keys, values))
    k, v = (states.repeat_interleave(groups, 1) for states in (k, v))  # [blocks, H, length + 1, D]
    q = query[token.clamp(max=num - 1)].transpose(1, 2).to(wide)  # [blocks, H, block, D]
    weights = q @ k.transpose(2, 3) * scale
    if cap > 0:
        weights = torch.tanh(weights / cap) * cap
    key = torch.arange(k.shape[2], device=query.device)
    seen = key <= position[:, :, None]
    if window > 0:
        seen = seen & (key > position[:, :, None] - window)
    weights = weights.masked_fill(~seen[:, None], float("-inf"))
    found = (
        (torch.softmax(weights, -1) @ v).transpose(1, 2).to(query.dtype)
    )  # [blocks, block, H, D]
    out = torch.zeros_like(query)
    out[token[real]] = found[real]
    return out


def add_norm(
    residual: Tensor, added: Tensor | None, weight: Tensor, *, eps: float
) -> tuple[Tensor, Tensor]:
    """(residual + added, its RMS norm times weight), both [N, H]."""
    if residual.is_cuda:
        from turnwise.generate.blocks import kernels

        return kernels.add_norm(residual, added, weight, eps=eps)
    total = residual if added is None else residual + added
    return total, _norm(total, weight, eps)


def _norm(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = states.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(states.dtype)


def silu_mul(both: Tensor) -> Tensor:
    """silu of the first half times the second: [N, 2 I] -> [N, I]."""
    if both.is_cuda:
        from turnwise.generate.blocks import kernels

        return kernels.silu_mul(both)
    gate, up = both.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def rope_write(
    qkv: Tensor,  # [N, (H + 2 HK) D]
    *,
    cos: Tensor,  # [length + 1, D / 2]
    sin: Tensor,
    positions: Tensor,  # [N]
    rows: Tensor,  # [N]
    write: Tensor,  # [N]
    keys: Tensor,  # [slots + 1, HK, length + 1, D]
    values: Tensor,
    heads: int,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    eps: float,
) -> Tensor:
    """The rotated queries [N, H, D]. Rotated keys, and values, go into the slots."""
    if qkv.is_cuda:
        from turnwise.generate.blocks import kernels

        return kernels.rope_write(
            qkv,
            cos=cos,
            sin=sin,
            positions=positions,
            rows=rows,
            write=write,
            keys=keys,
            values=values,
            heads=heads,
            query_norm=query_norm,
            key_norm=key_norm,
            eps=eps,
        )
    kv_heads, dim = keys.shape[1], keys.shape[3]
    query, key, value = qkv.view(qkv.shape[0], -1, dim).split([heads, kv_heads, kv_heads], 1)
    if query_norm is not None:
        query = _norm(query, query_norm, eps)
    if key_norm is not None:
        key = _norm(key, key_norm, eps)
    c, s = cos[positions][:, None], sin[positions][:, None]  # [N, 1, D / 2]

    def rotate(states: Tensor) -> Tensor:
        left, right = states.chunk(2, -1)
        return torch.cat([left * c - right * s, right * c + left * s], -1)

    keys[rows, :, write] = rotate(key)
    values[rows, :, write] = value
    return rotate(query)


def advance(logits: Tensor, rows: Tensor, base: Tensor, state: SlotState, *, decode: bool) -> None:
    """Draws the token after each row of logits [R, V] and moves the row's slot on to it: its id and
    log-prob go to the ring, and the slot goes on decoding unless the token is a stop id or was the
    last of its budget.

    Args:
        rows: the slot of each row, [R]. The scratch slot takes no part.
        base: position of the token that the logits follow, [R]; with `decode` the slots know it.
        decode: the rows are the slots themselves; those at rest mark the ring with -1, and its
            cursor moves on.
    """
    if logits.is_cuda:
        from turnwise.generate.blocks import kernels

        kernels.advance(logits, rows, base, state, decode=decode)
        if decode:
            state.cursor.add_(1)
        return
    slot = rows.long()
    live = state.count[slot] > 0 if decode else slot < state.slots
    at = int(state.cursor)
    if decode:
        state.out_ids[at, slot[~live]] = -1
        state.cursor += 1
    slot, position = slot[live], (state.position[slot] if decode else base.long())[live]
    ids, logprobs = draw(
        logits[live],
        seeds=state.seed[slot],
        positions=position + 1,
        temperature=state.temperature[slot],
    )
    left = state.left[slot] - 1
    goes_on = (left > 0) & (state.stop[ids] == 0)
    state.out_ids[at, slot] = ids.int()
    state.out_logprobs[at, slot] = logprobs
    state.left[slot] = left
    state.token[slot] = ids
    state.position[slot] = position + 1
    state.write[slot] = torch.where(goes_on, position + 1, state.length)
    state.count[slot] = goes_on.int()
