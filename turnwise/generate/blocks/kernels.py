# pyright: basic, reportMissingImports=false, reportIndexIssue=false, reportOptionalOperand=false
"""Triton kernels of the block engine: attention over slots, and drawing a token with all that follows from it.

Imported on CUDA only; `ops` has the same operations in plain torch for every other device.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from turnwise.generate.blocks.ops import TILE

CHUNK = 4096
"""Logits that the drawing kernel holds at once."""


@triton.jit
def _attend(
    Q, K, V, OUT, ROW, POS, NUM, HOLDER, SHARED, scale, window, cap,
    sq_n, sq_h, sk_s, sk_h, sk_l, so_n, so_h,
    BT: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, M: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """One program: a block of BT tokens of one slot, one key head, all query heads that share it."""
    block = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.load(ROW + block).to(tl.int64)
    first = tl.load(POS + block)
    count = tl.load(NUM + block)
    m = tl.arange(0, M)
    d = tl.arange(0, DP)
    j = tl.arange(0, BN)
    token = m // GP
    group = m % GP
    valid = (token < count) & (group < G)
    at = (block * BT + token).to(tl.int64)
    inside = valid[:, None] & (d < D)[None, :]
    q = tl.load(Q + at[:, None] * sq_n + (head * G + group)[:, None] * sq_h + d[None, :], mask=inside, other=0.0)
    position = first + token
    end = tl.where(count > 0, first + count, 0)  # a slot at rest costs nothing
    start = 0
    if HAS_WINDOW:
        start = tl.maximum(0, first - window + 1) // BN * BN
    best = tl.full((M,), -1e30, tl.float32)
    total = tl.zeros((M,), tl.float32)
    out = tl.zeros((M, DP), tl.float32)
    holder = tl.load(HOLDER + row).to(tl.int64)
    shared = tl.load(SHARED + row)
    for at_key in range(start, end, BN):
        # What a group of prompts has in common is read from one place, and so from the cache next to the processors.
        there = tl.where(at_key < shared, holder, row) * sk_s + head * sk_h
        keys = K + there
        values = V + there
        key = at_key + j
        live = (key < end)[:, None] & (d < D)[None, :]
        k = tl.load(keys + key[:, None] * sk_l + d[None, :], mask=live, other=0.0)
        if PRECISE:
            w = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        else:
            w = tl.dot(q, tl.trans(k)).to(tl.float32) * scale
        if HAS_CAP:
            w = cap * (2.0 * tl.sigmoid(2.0 * w / cap) - 1.0)
        seen = key[None, :] <= position[:, None]
        if HAS_WINDOW:
            seen = seen & (key[None, :] > position[:, None] - window)
        w = tl.where(seen, w, -1e30)
        new_best = tl.maximum(best, tl.max(w, 1))
        p = tl.where(seen, tl.exp(w - new_best[:, None]), 0.0)
        fade = tl.exp(best - new_best)
        v = tl.load(values + key[:, None] * sk_l + d[None, :], mask=live, other=0.0)
        if PRECISE:
            out = out * fade[:, None] + tl.dot(p, v, input_precision="ieee")
        else:
            out = out * fade[:, None] + tl.dot(p.to(v.dtype), v)
        total = total * fade + tl.sum(p, 1)
        best = new_best
    out = tl.where(valid[:, None], out / tl.maximum(total, 1e-30)[:, None], 0.0)
    # Padding tokens get zeros, so that nothing undefined flows through the layers above.
    written = ((token < BT) & (group < G))[:, None] & (d < D)[None, :]
    where = OUT + at[:, None] * so_n + (head * G + group)[:, None] * so_h + d[None, :]
    tl.store(where, out.to(OUT.dtype.element_ty), mask=written)


def attend(
    query: Tensor,  # [N, H, D]
    keys: Tensor,  # [slots + 1, HK, length + 1, D]
    values: Tensor,
    rows: Tensor,  # [N / block] int32
    first: Tensor,
    count: Tensor,
    holders: Tensor,  # [slots + 1] int32
    shared: Tensor,  # [slots + 1] int32
    *,
    block: int,
    scale: float,
    window: int,
    cap: float,
) -> Tensor:
    """Attention output [N, H, D] of blocks of tokens over their slots."""
    num, heads, dim = query.shape
    kv_heads = keys.shape[1]
    groups = heads // kv_heads
    padded = triton.next_power_of_2(groups)
    out = torch.empty_like(query)
    _attend[(num // block, kv_heads)](
        query, keys, values, out, rows, first, count, holders, shared, scale, window, cap,
        query.stride(0), query.stride(1), keys.stride(0), keys.stride(1), keys.stride(2), out.stride(0), out.stride(1),
        BT=block, G=groups, GP=padded, M=max(16, block * padded),
        D=dim, DP=max(16, triton.next_power_of_2(dim)), BN=TILE,
        HAS_WINDOW=window > 0, HAS_CAP=cap > 0, PRECISE=query.dtype == torch.float32,
        num_warps=_warps(query, block=block, programs=num // block * kv_heads),
    )  # fmt: skip
    return out


def _warps(query: Tensor, *, block: int, programs: int) -> int:
    """Warps per program, as measured on an H200: a decode step of narrow heads over few slots waits for memory, and
    runs half again as fast with one."""
    if block > 1 or query.shape[2] > 64 or query.dtype == torch.float32:
        return 4
    return 1 if programs < 1536 else 2


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _advance(
    LOGITS, stride, ROW, BASE, SEED, TEMP, LEFT, STOP, TOKEN, POS, WRITE, COUNT, OUT_ID, OUT_LOGPROB, CURSOR,
    num_slots, length, vocab, BV: tl.constexpr, NC: tl.constexpr, DECODE: tl.constexpr,
):  # fmt: skip
    """One program: draws the next token of one row and moves its slot on to it."""
    r = tl.program_id(0)
    slot = tl.load(ROW + r)
    cursor = tl.load(CURSOR)
    if DECODE:
        live = tl.load(COUNT + slot) > 0
        base = tl.load(POS + slot)
    else:
        live = slot < num_slots
        base = tl.load(BASE + r)
    if live:
        j = tl.arange(0, BV)
        temperature = tl.load(TEMP + slot)
        inverse = tl.where(temperature > 0.0, 1.0 / tl.where(temperature > 0.0, temperature, 1.0), 1.0)
        row = LOGITS + r.to(tl.int64) * stride
        top = float("-inf")
        argmax = 0
        # One pass over the vocabulary, a chunk at a time: each chunk's largest value and its mass relative to that.
        c = tl.arange(0, NC)
        tops = tl.full((NC,), float("-inf"), tl.float32)
        masses = tl.zeros((NC,), tl.float32)
        for v in range(0, vocab, BV):
            x = tl.load(row + v + j, mask=v + j < vocab, other=float("-inf")).to(tl.float32) * inverse
            here = tl.max(x, 0)
            argmax = tl.where(here > top, v + tl.argmax(x, 0), argmax)
            top = tl.maximum(top, here)
            base_value = tl.where(here > float("-inf"), here, 0.0)
            tops = tl.where(c == v // BV, here, tops)
            masses = tl.where(c == v // BV, tl.sum(tl.exp(x - base_value), 0), masses)
        wide = masses.to(tl.float64) * tl.exp(tops - top).to(tl.float64)
        total = tl.sum(wide, 0)
        # splitmix64 of (seed, index of the drawn token), as in sampling.uniform
        golden = 0x9E3779B97F4A7C15
        seed = tl.load(SEED + slot).to(tl.uint64, bitcast=True)
        index = (base + 1).to(tl.int64).to(tl.uint64)
        bits = _mix(_mix(seed + golden) + index * golden)
        u = (bits >> 12).to(tl.float64) * 2.220446049250313e-16
        threshold = u * total
        up_to = tl.cumsum(wide, 0)
        chunk = tl.min(tl.where(up_to > threshold, c, NC), 0)
        chunk = tl.where(chunk < NC, chunk, tl.max(tl.where(wide > 0.0, c, 0), 0))  # where sums round differently
        before = tl.sum(tl.where(c == chunk, up_to - wide, 0.0), 0)
        first = chunk * BV
        x = tl.load(row + first + j, mask=first + j < vocab, other=float("-inf")).to(tl.float32) * inverse
        p = tl.exp(x - top)
        inner = tl.cumsum(p, 0).to(tl.float64) + before
        hit = tl.min(tl.where((inner > threshold) & (p > 0.0), j, BV), 0)
        last = tl.max(tl.where(p > 0.0, j, 0), 0)
        drawn = first + tl.where(hit < BV, hit, last)
        token = tl.where(temperature > 0.0, drawn, argmax)
        chosen = tl.load(row + token).to(tl.float32) * inverse
        logprob = chosen - top - tl.log(total.to(tl.float32))
        left = tl.load(LEFT + slot) - 1
        stop = tl.load(STOP + token)
        goes_on = (left > 0) & (stop == 0)
        tl.store(OUT_ID + cursor * num_slots + slot, token)
        tl.store(OUT_LOGPROB + cursor * num_slots + slot, logprob)
        tl.store(LEFT + slot, left)
        tl.store(TOKEN + slot, token)
        tl.store(POS + slot, base + 1)
        tl.store(WRITE + slot, tl.where(goes_on, base + 1, length))
        tl.store(COUNT + slot, tl.where(goes_on, 1, 0))
    elif DECODE:
        tl.store(OUT_ID + cursor * num_slots + slot, -1)


def advance(logits: Tensor, rows: Tensor, base: Tensor, state: Any, *, decode: bool) -> None:
    """Draws a token for every row and moves its slot on. See `ops.advance`."""
    vocab = logits.shape[-1]
    chunks = triton.next_power_of_2(triton.cdiv(vocab, CHUNK))
    _advance[(logits.shape[0],)](
        logits, logits.stride(0), rows, base, state.seed, state.temperature, state.left, state.stop, state.token,
        state.position, state.write, state.count, state.out_ids, state.out_logprobs, state.cursor,
        state.slots, state.length, vocab, BV=CHUNK, NC=chunks, DECODE=decode, num_warps=8,
    )  # fmt: skip


@triton.jit
def _add_norm(X, ADD, W, OUT, width, eps, HP: tl.constexpr, HAS_ADD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, HP)
    inside = h < width
    x = tl.load(X + row * width + h, mask=inside, other=0.0)
    if HAS_ADD:
        x = x + tl.load(ADD + row * width + h, mask=inside, other=0.0)
        tl.store(X + row * width + h, x, mask=inside)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    # Rounded where transformers rounds, so that sampler and trainer differ as little as can be.
    normed = (wide * scale).to(x.dtype)
    tl.store(OUT + row * width + h, normed * tl.load(W + h, mask=inside, other=0.0), mask=inside)


def add_norm(residual: Tensor, added: Tensor | None, weight: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    """See `ops.add_norm`. The sum replaces `residual` in place."""
    num, width = residual.shape
    out = torch.empty_like(residual)
    _add_norm[(num,)](
        residual, residual if added is None else added, weight, out, width, eps,
        HP=triton.next_power_of_2(width), HAS_ADD=added is not None, num_warps=4 if width <= 2048 else 8,
    )  # fmt: skip
    return residual, out


@triton.jit
def _silu_mul(BOTH, OUT, width, B: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * B + tl.arange(0, B)
    inside = i < width
    gate = tl.load(BOTH + row * 2 * width + i, mask=inside, other=0.0)
    up = tl.load(BOTH + row * 2 * width + width + i, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    acted = (wide * tl.sigmoid(wide)).to(gate.dtype)
    tl.store(OUT + row * width + i, acted * up, mask=inside)


def silu_mul(both: Tensor) -> Tensor:
    """See `ops.silu_mul`."""
    num, width = both.shape[0], both.shape[1] // 2
    out = both.new_empty(num, width)
    _silu_mul[(num, triton.cdiv(width, 1024))](both, out, width, B=1024, num_warps=4)
    return out


@triton.jit
def _rope_write(
    QKV, COS, SIN, POS, ROW, WRITE, K, V, OUT, QN, KN, eps, sk_s, sk_h, sk_l,
    H: tl.constexpr, HK: tl.constexpr, HP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """One program: all heads of one token, in two halves, which is how they rotate."""
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(POS + token)
    row = tl.load(ROW + token)
    at = tl.load(WRITE + token)
    h = tl.arange(0, HP)
    d = tl.arange(0, DP)
    half = D // 2
    inside = (h < H + 2 * HK)[:, None] & (d < half)[None, :]
    source = QKV + token * (H + 2 * HK) * D + h[:, None] * D + d[None, :]
    left = tl.load(source, mask=inside, other=0.0)
    right = tl.load(source + half, mask=inside, other=0.0)
    kind = left.dtype
    if NORM:
        wide_left, wide_right = left.to(tl.float32), right.to(tl.float32)
        squares = tl.sum(wide_left * wide_left, 1) + tl.sum(wide_right * wide_right, 1)
        scale = tl.rsqrt(squares / D + eps)[:, None]
        is_query = (h < H)[:, None]
        is_value = (h >= H + HK)[:, None]
        live = (d < half)[None, :]
        w_left = tl.where(
            is_query, tl.load(QN + d[None, :], mask=live, other=0.0), tl.load(KN + d[None, :], mask=live, other=0.0)
        )
        w_right = tl.where(
            is_query,
            tl.load(QN + half + d[None, :], mask=live, other=0.0),
            tl.load(KN + half + d[None, :], mask=live, other=0.0),
        )
        left = tl.where(is_value, left, (wide_left * scale).to(kind) * w_left)
        right = tl.where(is_value, right, (wide_right * scale).to(kind) * w_right)
    c = tl.load(COS + position * half + d, mask=d < half, other=0.0).to(tl.float32)[None, :]
    s = tl.load(SIN + position * half + d, mask=d < half, other=0.0).to(tl.float32)[None, :]
    wide_left, wide_right = left.to(tl.float32), right.to(tl.float32)
    turns = (h < H + HK)[:, None]
    new_left = tl.where(turns, wide_left * c - wide_right * s, wide_left).to(kind)
    new_right = tl.where(turns, wide_right * c + wide_left * s, wide_right).to(kind)
    queries = inside & (h < H)[:, None]
    target = OUT + token * H * D + h[:, None] * D + d[None, :]
    tl.store(target, new_left, mask=queries)
    tl.store(target + half, new_right, mask=queries)
    keys = inside & ((h >= H) & (h < H + HK))[:, None]
    target = K + row * sk_s + (h - H)[:, None] * sk_h + at * sk_l + d[None, :]
    tl.store(target, new_left, mask=keys)
    tl.store(target + half, new_right, mask=keys)
    values = inside & (h >= H + HK)[:, None]
    target = V + row * sk_s + (h - H - HK)[:, None] * sk_h + at * sk_l + d[None, :]
    tl.store(target, new_left, mask=values)
    tl.store(target + half, new_right, mask=values)


def rope_write(
    qkv: Tensor,
    *,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    rows: Tensor,
    write: Tensor,
    keys: Tensor,
    values: Tensor,
    heads: int,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    eps: float,
) -> Tensor:
    """See `ops.rope_write`."""
    kv_heads, dim = keys.shape[1], keys.shape[3]
    out = qkv.new_empty(qkv.shape[0], heads, dim)
    _rope_write[(qkv.shape[0],)](
        qkv, cos, sin, positions, rows, write, keys, values, out,
        qkv if query_norm is None else query_norm, qkv if key_norm is None else key_norm, eps,
        keys.stride(0), keys.stride(1), keys.stride(2),
        H=heads, HK=kv_heads, HP=triton.next_power_of_2(heads + 2 * kv_heads), D=dim,
        DP=triton.next_power_of_2(dim // 2), NORM=query_norm is not None, num_warps=4,
    )  # fmt: skip
    return out
