"""Prompts in passes: every token in one block, and every draw at its place."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from turnwise.generate.blocks.cache import PackedCache
from turnwise.generate.blocks.prefill import PREFILL_BLOCK, Prefill, PrefillBuffers, pack, size_for
from turnwise.generate.blocks.staging import Staging

STAGING = Staging(torch.device("cpu"))


def test_long_prompts_are_cut_into_passes_in_order() -> None:
    items = [
        Prefill(slot=0, start=5, ids=list(range(70)), final=True),
        Prefill(slot=1, start=0, ids=list(range(20)), final=True),
    ]
    parts = pack(items, 64)
    assert [[(i.slot, i.start, len(i.ids), i.final) for i in part] for part in parts] == [
        [(0, 5, 64, False)],
        [(0, 69, 6, True), (1, 0, 20, True)],
    ]


@given(
    st.lists(st.tuples(st.integers(1, 70), st.booleans(), st.integers(0, 3)), max_size=40),
    st.integers(0, 100),
)
def test_every_token_of_a_pass_is_in_one_block(
    prompts: list[tuple[int, bool, int]], start: int
) -> None:
    slots, length = 200, 300
    items = [
        Prefill(
            slot=slot,
            start=start,
            ids=[slot] * num,
            final=final,
            twins=tuple(range(100, 100 + twins)),
        )
        for slot, (num, final, twins) in enumerate(prompts)
    ]
    read: dict[int, list[int]] = {}
    drawn: list[tuple[int, int]] = []
    for part in pack(items, 256):
        cache = PackedCache(slots=slots, length=length, device=torch.device("cpu"))
        buffers = PrefillBuffers.make(size_for(part), cache=cache)
        buffers.load(part, slots=slots, length=length, staging=STAGING)
        view, size = buffers.view, buffers.tokens.shape[0]
        assert size == 256
        covered = [0] * size
        blocks = zip(
            view.block_rows, view.block_at, view.block_first, view.block_count, strict=True
        )
        for row, at, first, count in (map(int, block) for block in blocks):
            if count == 0:
                assert row == slots
            for offset in range(count or PREFILL_BLOCK):
                if at + offset < size:
                    token = at + offset
                    covered[token] += 1
                    assert view.rows[token] == row
                    assert view.write[token] == (first + offset if count else length)
                    if count:
                        assert buffers.tokens[token] == row
                        read.setdefault(row, []).append(int(buffers.positions[token]))
        assert covered == [1] * size
        for keep, row, base in zip(buffers.keep, buffers.draw_rows, buffers.draw_base, strict=True):
            if row < slots:
                assert buffers.positions[keep] == base
                drawn.append((int(buffers.tokens[keep]), int(row)))
    assert read == {item.slot: list(range(start, start + len(item.ids))) for item in items}
    assert drawn == [
        (item.slot, slot) for item in items if item.final for slot in (item.slot, *item.twins)
    ]


def test_a_pass_has_a_block_for_every_short_prompt() -> None:
    items = [Prefill(slot=slot, start=3, ids=[7], final=False) for slot in range(100)]
    parts = pack(items, 256)
    assert [item for part in parts for item in part] == items
    for part in parts:
        cache = PackedCache(slots=100, length=50, device=torch.device("cpu"))
        buffers = PrefillBuffers.make(size_for(part), cache=cache)
        buffers.load(part, slots=100, length=50, staging=STAGING)
        assert int(buffers.view.block_count.sum()) == len(part)
        last = int((buffers.view.block_at + PREFILL_BLOCK * (buffers.view.block_count == 0)).max())
        assert last >= buffers.tokens.shape[0]  # the padding is covered to its end


def test_a_pass_has_room_for_every_draw() -> None:
    item = Prefill(slot=0, start=0, ids=[1, 2], final=True, twins=tuple(range(1, 40)))
    assert size_for([item]) >= 40 * PREFILL_BLOCK
    assert pack([item], 16384) == [[item]]
