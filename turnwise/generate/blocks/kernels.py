# pyright: basic, reportMissingImports=false, reportIndexIssue=false, reportOptionalOperand=false
"""Triton kernels of the block engine: attention over slots, and drawing a token with all that
follows from it.

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
LEAST_ROWS = 8 if tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 5) else 16
"""Rows of the smallest product that Triton takes. Fewer are quicker: a decode step has as many as a
key head has query heads."""


@triton.jit
def _attend(
    Q, K, V, OUT, ROW, AT, POS, NUM, HOLDER, SHARED, num_tokens, scale, window, cap, sk_s, sk_h,
    BT: tl.constexpr, H: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, M: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr,
    HAS_ROWS: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """One program: a block of up to BT tokens of one slot, one key head, all query heads that share
    it."""
    block = tl.program_id(0)
    head = tl.program_id(1)
    if HAS_ROWS:
        row = tl.load(ROW + block).to(tl.int32)
        at = tl.load(AT + block).to(tl.int32)
    else:
        row = block
        at = block
    first = tl.load(POS + block).to(tl.int32)
    count = tl.load(NUM + block).to(tl.int32)
    holder = tl.load(HOLDER + row)
    shared = tl.load(SHARED + row)
    m = tl.arange(0, M)
    d = tl.arange(0, DP)
    j = tl.arange(0, BN)
    token = m // GP
    group = m % GP
    valid = (token < count) & (group < G)
    mine = ((at + token).to(tl.int64) * H + head * G + group)[:, None] * D + d[None, :]
    inner = (d < D)[None, :]  # always true, and known to be, where the dimension is a power of two
    q = tl.load(Q + mine, mask=valid[:, None] & inner, other=0.0)
    end = tl.where(count > 0, first + count, 0)  # a slot at rest costs nothing
    last = first + token  # of the positions that a row sees
    start = 0
    if HAS_WINDOW:
        start = tl.maximum(0, first - window + 1) // BN * BN
    # Powers of two in place of e: one instruction less for every weight.
    factor = 1.4426950408889634 if HAS_CAP else scale * 1.4426950408889634
    best = tl.full((M,), -1e30, tl.float32)
    # With one token per block, sum over keys after the loop: a cross-thread reduction per tile is
    # slow.
    total = tl.zeros((M, BN), tl.float32) if BT == 1 else tl.zeros((M, 1), tl.float32)
    out = tl.zeros((M, DP), tl.float32)
    inside = j[:, None] * D + d[None, :]
    for key in range(start, end, BN):
        # What a group of prompts has in common is read from one place, and so from the cache next
        # to the processors.
        there = tl.where(key < shared, holder, row).to(tl.int64) * sk_s + head * sk_h + key * D
        live = (j < end - key)[:, None] & inner
        k = tl.load(K + there + inside, mask=live, other=0.0)
        w = tl.dot(q, tl.trans(k), input_precision="ieee") if PRECISE else tl.dot(q, tl.trans(k))
        if HAS_CAP:
            w = cap * (2.0 * tl.sigmoid(2.0 * scale / cap * w) - 1.0)
        seen = (j < end - key)[None, :] if BT == 1 else j[None, :] <= (last - key)[:, None]
        if HAS_WINDOW:
            seen = seen & (j[None, :] > (last - key - window)[:, None])
        w = tl.where(seen, w, -1e30)
        new_best = tl.maximum(best, tl.max(w, 1))
        p = tl.exp2(w * factor - (new_best * factor)[:, None])
        if HAS_WINDOW:  # else every row sees position 0, and so `new_best` is one that was seen
            p = tl.where(seen, p, 0.0)
        fade = tl.exp2((best - new_best) * factor)
        v = tl.load(V + there + inside, mask=live, other=0.0)
        if PRECISE:
            out = out * fade[:, None] + tl.dot(p, v, input_precision="ieee")
        else:
            out = tl.dot(p.to(v.dtype), v, out * fade[:, None])
        total = total * fade[:, None] + (p if BT == 1 else tl.sum(p, 1)[:, None])
        best = new_best
    out = tl.where(valid[:, None], out / tl.maximum(tl.sum(total, 1), 1e-30)[:, None], 0.0)
    # Blocks without a slot are padding. It gets zeros, so that nothing undefined flows through the
    # layers above.
    written = (token < tl.where(count > 0, count, BT)) & (at + token < num_tokens) & (group < G)
    tl.store(OUT + mine, out.to(OUT.dtype.element_ty), mask=written[:, None] & inner)


def attend(
    query: Tensor,  # [N, H, D]
    keys: Tensor,  # [slots + 1, HK, length + 1, D]
    values: Tensor,
    rows: Tensor | None,  # [blocks]
    at: Tensor | None,  # [blocks]
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
    """See `ops.attend`."""
    num, heads, dim = query.shape
    blocks, kv_heads = first.shape[0], keys.shape[1]
    groups = heads // kv_heads
    padded = triton.next_power_of_2(groups)
    out = torch.empty_like(query)
    _attend[(blocks, kv_heads)](
        query, keys, values, out, rows, at, first, count, holders, shared,
        num, scale, window, cap, keys.stride(0), keys.stride(1),
        BT=block, H=heads, G=groups, GP=padded, M=max(LEAST_ROWS, block * padded),
        D=dim, DP=max(16, triton.next_power_of_2(dim)), BN=TILE,
        HAS_ROWS=rows is not None, HAS_WINDOW=window > 0, HAS_CAP=cap > 0, PRECISE=query.dtype == torch.float32,
        num_warps=2 if block == 1 and query.dtype != torch.float32 else 4,  # as measured on an H200
    )  # fmt: skip
    return out


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _uniform(seed, index):
    """splitmix64 of (seed, index of the drawn token) in [0, 1), as in sampling.uniform."""
    golden = 0x9E3779B97F4A7C15
    bits = _mix(_mix(seed + golden) + index * golden)
    return (bits >> 12).to(tl.float64) * 2.220446049250313e-16


@triton.jit
def _draw(row, inverse, top, wide, threshold, vocab, BV: tl.constexpr, NC: tl.constexpr):
    """The token at which the cumulative mass passes the threshold: first its chunk, by the chunks'
    masses `wide`, then its place in the chunk."""
    c = tl.arange(0, NC)
    j = tl.arange(0, BV)
    up_to = tl.cumsum(wide, 0)
    chunk = tl.min(tl.where(up_to > threshold, c, NC), 0)
    # Rounding may leave no chunk above the threshold: then the last one with any mass.
    chunk = tl.where(chunk < NC, chunk, tl.max(tl.where(wide > 0.0, c, 0), 0))
    before = tl.sum(tl.where(c == chunk, up_to - wide, 0.0), 0)
    first = chunk * BV
    x = tl.load(row + first + j, mask=first + j < vocab, other=float("-inf")).to(tl.float32)
    p = tl.exp(x * inverse - top)
    inner = tl.cumsum(p, 0).to(tl.float64) + before
    hit = tl.min(tl.where((inner > threshold) & (p > 0.0), j, BV), 0)
    last = tl.max(tl.where(p > 0.0, j, 0), 0)
    return first + tl.where(hit < BV, hit, last)


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
        inverse = tl.where(
            temperature > 0.0, 1.0 / tl.where(temperature > 0.0, temperature, 1.0), 1.0
        )
        row = LOGITS + r.to(tl.int64) * stride
        top = float("-inf")
        argmax = 0
        # One pass over the vocabulary, a chunk at a time: each chunk's largest value and its mass
        # relative to that.
        c = tl.arange(0, NC)
        tops = tl.full((NC,), float("-inf"), tl.float32)
        masses = tl.zeros((NC,), tl.float32)
        coming = tl.load(row + j, mask=j < vocab, other=float("-inf"))
        for v in range(0, vocab, BV):
            x = coming.to(tl.float32) * inverse
            coming = tl.load(
                row + v + BV + j, mask=v + BV + j < vocab, other=float("-inf")
            )  # while this one is summed
            here = tl.max(x, 0)
            # argmax costs as much as the rest of the loop, so only greedy rows compute it.
            if temperature <= 0.0:
                argmax = tl.where(here > top, v + tl.argmax(x, 0), argmax)
            top = tl.maximum(top, here)
            base_value = tl.where(here > float("-inf"), here, 0.0)
            tops = tl.where(c == v // BV, here, tops)
            masses = tl.where(c == v // BV, tl.sum(tl.exp(x - base_value), 0), masses)
        wide = masses.to(tl.float64) * tl.exp(tops - top).to(tl.float64)
        total = tl.sum(wide, 0)
        seed = tl.load(SEED + slot).to(tl.uint64, bitcast=True)
        u = _uniform(seed, (base + 1).to(tl.int64).to(tl.uint64))
        drawn = _draw(row, inverse, top, wide, u * total, vocab, BV, NC)
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


def add_norm(
    residual: Tensor, added: Tensor | None, weight: Tensor, *, eps: float
) -> tuple[Tensor, Tensor]:
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
            is_query,
            tl.load(QN + d[None, :], mask=live, other=0.0),
            tl.load(KN + d[None, :], mask=live, other=0.0),
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
