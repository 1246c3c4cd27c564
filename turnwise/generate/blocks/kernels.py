# pyright: basic, reportMissingImports=false, reportIndexIssue=false, reportOptionalOperand=false
"""Triton kernels of the block engine: attention over slots, and drawing a token with all that follows from it.

Imported on CUDA only; `ops` has the same operations in plain torch for every other device.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _attend(
    Q, K, V, OUT, ROW, POS, NUM, scale, window, cap,
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
    keys = K + row * sk_s + head * sk_h
    values = V + row * sk_s + head * sk_h
    for at_key in range(start, end, BN):
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
        query, keys, values, out, rows, first, count, scale, window, cap,
        query.stride(0), query.stride(1), keys.stride(0), keys.stride(1), keys.stride(2), out.stride(0), out.stride(1),
        BT=block, G=groups, GP=padded, M=max(16, block * padded),
        D=dim, DP=max(16, triton.next_power_of_2(dim)), BN=64,
        HAS_WINDOW=window > 0, HAS_CAP=cap > 0, PRECISE=query.dtype == torch.float32,
        num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _advance(
    LOGITS, stride, ROW, BASE, SEED, TEMP, LEFT, STOP, TOKEN, POS, WRITE, COUNT, OUT_ID, OUT_LOGPROB, CURSOR,
    num_slots, length, vocab, BV: tl.constexpr, DECODE: tl.constexpr,
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
        for v in range(0, vocab, BV):
            x = tl.load(row + v + j, mask=v + j < vocab, other=float("-inf")).to(tl.float32) * inverse
            here = tl.max(x, 0)
            argmax = tl.where(here > top, v + tl.argmax(x, 0), argmax)
            top = tl.maximum(top, here)
        total = tl.zeros((), tl.float64)
        for v in range(0, vocab, BV):
            x = tl.load(row + v + j, mask=v + j < vocab, other=float("-inf")).to(tl.float32) * inverse
            total += tl.sum(tl.exp(x - top), 0).to(tl.float64)
        # splitmix64 of (seed, index of the drawn token), as in sampling.uniform
        golden = 0x9E3779B97F4A7C15
        seed = tl.load(SEED + slot).to(tl.uint64, bitcast=True)
        index = (base + 1).to(tl.int64).to(tl.uint64)
        bits = _mix(_mix(seed + golden) + index * golden)
        u = (bits >> 12).to(tl.float64) * 2.220446049250313e-16
        threshold = u * total
        cumulative = tl.zeros((), tl.float64)
        drawn = -1
        for v in range(0, vocab, BV):
            x = tl.load(row + v + j, mask=v + j < vocab, other=float("-inf")).to(tl.float32) * inverse
            p = tl.exp(x - top)
            mass = tl.sum(p, 0).to(tl.float64)
            if (drawn < 0) & (cumulative + mass > threshold):
                inner = tl.cumsum(p, 0).to(tl.float64) + cumulative
                hit = tl.min(tl.where((inner > threshold) & (p > 0.0), j, BV), 0)
                last = tl.max(tl.where(p > 0.0, j, 0), 0)  # where the two sums round differently
                drawn = v + tl.where(hit < BV, hit, last)
            cumulative += mass
        token = tl.where((temperature > 0.0) & (drawn >= 0), drawn, argmax)
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
    _advance[(logits.shape[0],)](
        logits, logits.stride(0), rows, base, state.seed, state.temperature, state.left, state.stop, state.token,
        state.position, state.write, state.count, state.out_ids, state.out_logprobs, state.cursor,
        state.slots, state.length, vocab, BV=4096, DECODE=decode, num_warps=8,
    )  # fmt: skip
