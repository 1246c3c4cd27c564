"""The block engine: packed prefills and blocks of decode steps over slots, without the host in between.

Sampling, stopping and log-probs stay on the device. The host plans a block (which prompts to prefill, how many steps
to decode), launches it, and reads an earlier one's tokens meanwhile. On CUDA a decode step is a captured graph,
compiled where that works; prefills are captured per size. On other devices everything runs eagerly, in the same order.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache

from turnwise.generate.blocks import ops
from turnwise.generate.blocks.ops import SlotState
from turnwise.generate.sampling import truncate

logger = logging.getLogger(__name__)
ATTENTION = "turnwise_blocks"
PREFILL_BLOCK = 16
"""Prompts are padded to blocks of so many tokens; a block belongs to one slot."""
PREFILL_SIZES = (256, 512, 1024, 2048, 3072, 4096, 8192, 16384)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prefill:
    """ids at positions start.. of one slot; after the last of a request's, the first token is drawn."""

    slot: int
    start: int
    ids: Sequence[int]
    final: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """A request that begins: how its slot draws."""

    slot: int
    seed: int
    temperature: float
    limit: int


@dataclass(kw_only=True)
class _View:
    """What one forward pass over packed tokens [1, N] sees of the cache."""

    rows: Tensor  # [N] slot of each token
    write: Tensor  # [N] position of its key and value
    block_rows: Tensor  # [N / block] int32
    block_first: Tensor
    block_count: Tensor
    block: int


class PackedCache(Cache):
    """Keys and values of all slots: [slots + 1, HK, length + 1, D] per layer, the last row and position scratch."""

    def __init__(self, *, slots: int, length: int) -> None:
        super().__init__(layers=[])
        self.slots = slots
        self.length = length
        self.view: _View | None = None
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

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

    @property
    def num_bytes(self) -> int:
        return sum(states.numel() * states.element_size() for states in (*self.keys, *self.values))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.length, 0

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return self.length


class _Active:
    """The view of the pass that is running; a plain attribute, so that torch.compile can see through it."""

    view: _View | None = None
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
    view = _Active.view
    assert view is not None
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    cap = softcap if softcap is not None and _Active.softcap else 0.0
    packed = query[0].transpose(0, 1).contiguous()
    out = ops.attend(
        packed,
        key,
        value,
        view.block_rows,
        view.block_first,
        view.block_count,
        view.block,
        scale,
        sliding_window or 0,
        cap,
    )
    return out[None], None


AttentionInterface.register(ATTENTION, packed_attention)


class BlockEngine:
    """Runs prefills and blocks of decode steps of one model.

    Args:
        steps: decode steps per block.
        capture: capture CUDA graphs. None: where the model is on CUDA.
        compile: compile the decode step before it is captured.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        slots: int,
        length: int,
        vocab: int,
        stop_ids: Sequence[int],
        steps: int = 8,
        capture: bool | None = None,
        compile: bool = False,
    ) -> None:
        self._model = model
        self.device = next(model.parameters()).device
        self.slots = slots
        self.length = length
        self.steps = steps
        self._capture = self.device.type == "cuda" if capture is None else capture
        self._compile = compile and self._capture
        self._vocab = vocab
        self._stop_ids = [token for token in stop_ids if 0 <= token < vocab]
        self._configs: list[Any] = []
        for module in model.modules():
            if isinstance(module, PreTrainedModel) and not any(module.config is known for known in self._configs):
                self._configs.append(module.config)
        self._softcap = self._configs[0]._attn_implementation != "sdpa"
        self._ring = 2 * (steps + 1)
        self._row = 0
        self._cache: PackedCache | None = None
        self.state: SlotState | None = None
        self._decode: Callable[[], None] | None = None
        self._prefills: dict[int, tuple[_PrefillBuffers, Callable[[], None]]] = {}
        self._truncation: dict[int, tuple[int, float]] = {}
        self._pool: Any = None

    @property
    def num_bytes(self) -> int:
        """Memory that keys and values hold now."""
        return 0 if self._cache is None else self._cache.num_bytes

    def free(self) -> None:
        """Gives the memory of keys, values and graphs back; the next block allocates and captures again.

        A compiled step is kept by torch, so only the capture is repeated.
        """
        self._cache = None
        self.state = None
        self._decode = None
        self._prefills = {}
        self._pool = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def launch(
        self,
        *,
        starts: Sequence[Start],
        prefills: Sequence[Prefill],
        rests: Sequence[int] = (),
        truncation: dict[int, tuple[int, float]] | None = None,
        steps: int | None = None,
    ) -> "Launched":
        """Launches one block: slots in `rests` stop, prompts are prefilled in order, then so many steps are decoded.

        Args:
            truncation: top-k and top-p of the slots that have any; they take the step apart, which is slower.
        """
        state = self._ready()
        steps = self.steps if steps is None else min(steps, self.steps)
        first = self._row
        state.cursor.fill_(self._row)
        state.out_ids[self._row].fill_(-1)
        if rests:
            index = torch.tensor(list(rests), device=self.device)
            state.count[index] = 0
            state.write[index] = self.length
        if starts:
            self._start(state, starts)
        self._truncation = truncation or {}
        for part in _pack(prefills, PREFILL_SIZES[-1]):
            self._prefill(part)
        self._bump()
        decode = self._decode_step()
        for _ in range(steps):
            decode()
            self._bump()
        return Launched(self, first=first, num=steps + 1)

    def _bump(self) -> None:
        self._row = (self._row + 1) % self._ring
        state = self.state
        assert state is not None
        if self._row == 0:
            state.cursor.zero_()
        else:
            state.cursor.add_(1)

    def _ready(self) -> SlotState:
        if self._cache is None or self.state is None:
            self._cache = PackedCache(slots=self.slots, length=self.length)
            self.state = SlotState.make(
                slots=self.slots, length=self.length, vocab=self._vocab, ring=self._ring, device=self.device
            )
            self._row = 0
            if self._stop_ids:
                self.state.stop[torch.tensor(self._stop_ids, device=self.device)] = 1
        return self.state

    def _start(self, state: SlotState, starts: Sequence[Start]) -> None:
        ints = torch.tensor([[s.slot, s.seed, s.limit] for s in starts]).T.contiguous()
        ints = ints.to(self.device, non_blocking=True)
        temperature = torch.tensor([s.temperature for s in starts]).to(self.device, non_blocking=True)
        state.seed[ints[0]] = ints[1]
        state.left[ints[0]] = ints[2].int()
        state.temperature[ints[0]] = temperature

    def _forward(self, tokens: Tensor, positions: Tensor, keep: Tensor | None) -> Tensor:
        """Logits [R, V] of the kept tokens (all, where None)."""
        out = self._model(
            input_ids=tokens[None],
            position_ids=positions[None],
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=0 if keep is None else keep,
        )
        return out.logits[0]

    def _switched(self, function: Callable[[], None], view: _View) -> None:
        """Runs the function with the models' attention routed to the slots, and routes it back."""
        assert self._cache is not None
        before = [config._attn_implementation for config in self._configs]
        self._cache.view = _Active.view = view
        _Active.softcap = self._softcap
        for config in self._configs:
            config._attn_implementation = ATTENTION
        try:
            function()
        finally:
            for config, implementation in zip(self._configs, before, strict=True):
                config._attn_implementation = implementation
            self._cache.view = _Active.view = None

    def _decode_step(self) -> Callable[[], None]:
        state = self.state
        assert state is not None
        num = self.slots
        rows = torch.arange(num, device=self.device)
        block_rows = rows.int()
        view = _View(
            rows=rows,
            write=state.write[:num],
            block_rows=block_rows,
            block_first=state.position[:num],
            block_count=state.count[:num],
            block=1,
        )

        def forward() -> Tensor:
            return self._forward(state.token[:num], state.position[:num], None)

        if self._truncation:
            return lambda: self._switched(lambda: self._truncated_step(forward, block_rows), view)
        if self._decode is None:
            self._decode = self._captured_decode(forward, view)
        return self._decode

    def _captured_decode(self, forward: Callable[[], Tensor], view: _View) -> Callable[[], None]:
        state = self.state
        assert state is not None
        rows = view.block_rows

        def step(logits: Callable[[], Tensor]) -> Callable[[], None]:
            return lambda: ops.advance(logits(), rows, rows, state, decode=True)

        if not self._capture:
            return lambda: self._switched(step(forward), view)
        if self._compile:
            try:
                # Weights change in place between updates, so what was compiled stays right.
                return self._graph(step(torch.compile(forward, dynamic=False)), view)
            except Exception as error:  # whatever the compiler raises, the plain step still works
                logger.warning("the decode step could not be compiled, it runs as it is: %r", error)
        return self._graph(step(forward), view)

    def _truncated_step(self, forward: Callable[[], Tensor], block_rows: Tensor) -> None:
        state = self.state
        assert state is not None
        ops.advance(self._truncated(forward(), range(self.slots)), block_rows, block_rows, state, decode=True)

    def _truncated(self, logits: Tensor, slots: Sequence[int]) -> Tensor:
        """The logits, with everything outside top-k and top-p at -inf in the rows of the slots that have them."""
        state = self.state
        assert state is not None
        found = [(row, slot) for row, slot in enumerate(slots) if slot in self._truncation]
        if not found:
            return logits
        rows = torch.tensor([row for row, _ in found], device=self.device)
        top_k = torch.tensor([self._truncation[slot][0] for _, slot in found], device=self.device)
        top_p = torch.tensor([self._truncation[slot][1] for _, slot in found], device=self.device)
        heat = state.temperature[torch.tensor([slot for _, slot in found], device=self.device)]
        logits = logits.float()
        scaled = logits[rows] / torch.where(heat > 0, heat, 1.0)[:, None]
        logits[rows] = logits[rows].masked_fill(truncate(scaled, top_k=top_k, top_p=top_p).isinf(), float("-inf"))
        return logits

    def _prefill(self, items: Sequence[Prefill]) -> None:
        needed = sum(-(-len(item.ids) // PREFILL_BLOCK) * PREFILL_BLOCK for item in items)
        size = next(size for size in PREFILL_SIZES if size >= needed)
        if size not in self._prefills:
            buffers = _PrefillBuffers.make(size, slots=self.slots, length=self.length, device=self.device)
            self._prefills[size] = (buffers, self._captured_prefill(buffers))
        buffers, run = self._prefills[size]
        buffers.load(items, slots=self.slots, length=self.length)
        if any(item.slot in self._truncation for item in items):
            self._switched(lambda: self._prefill_step(buffers), buffers.view)
        else:
            run()

    def _captured_prefill(self, buffers: "_PrefillBuffers") -> Callable[[], None]:
        if not self._capture:
            return lambda: self._switched(lambda: self._prefill_step(buffers), buffers.view)
        buffers.load([], slots=self.slots, length=self.length)
        return self._graph(lambda: self._prefill_step(buffers), buffers.view)

    def _prefill_step(self, buffers: "_PrefillBuffers") -> None:
        state = self.state
        assert state is not None
        logits = self._forward(buffers.tokens, buffers.positions, buffers.keep)
        if self._truncation:
            logits = self._truncated(logits, buffers.draw_rows.tolist())
        ops.advance(logits, buffers.draw_rows, buffers.draw_base, state, decode=False)

    def _graph(self, step: Callable[[], None], view: _View) -> Callable[[], None]:
        """The step as a captured graph. Capturing happens while its rows rest, so nothing is drawn by it."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        saved = self._save()
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._switched(step, view)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()

        def capture() -> None:
            with torch.cuda.graph(graph, pool=self._pool):
                step()

        self._switched(capture, view)
        self._load(saved)

        def replay(kept: tuple[object, ...] = (step, view)) -> None:
            # A graph knows addresses only: what it reads must live as long as it does.
            graph.replay()

        return replay

    def _save(self) -> list[Tensor]:
        state = self.state
        assert state is not None
        saved = [t.clone() for t in _mutable(state)]
        state.count.zero_()
        state.write.fill_(self.length)
        return saved

    def _load(self, saved: Sequence[Tensor]) -> None:
        assert self.state is not None
        for tensor, old in zip(_mutable(self.state), saved, strict=True):
            tensor.copy_(old)


def _mutable(state: SlotState) -> list[Tensor]:
    return [state.token, state.position, state.write, state.count, state.left, state.out_ids, state.out_logprobs]


@dataclass(kw_only=True)
class _PrefillBuffers:
    """The static inputs of a prefill of one size."""

    tokens: Tensor  # [N]
    positions: Tensor  # [N]
    keep: Tensor  # [N / 16] index of each block's last real token
    draw_rows: Tensor  # [N / 16] int32: the slot to draw for, scratch where the block ends no prompt
    draw_base: Tensor  # [N / 16] position of the block's last real token
    view: _View

    @classmethod
    def make(cls, size: int, *, slots: int, length: int, device: torch.device) -> "_PrefillBuffers":
        blocks = size // PREFILL_BLOCK

        def zeros(num: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(num, dtype=dtype, device=device)

        view = _View(
            rows=zeros(size),
            write=zeros(size),
            block_rows=zeros(blocks, torch.int32),
            block_first=zeros(blocks),
            block_count=zeros(blocks, torch.int32),
            block=PREFILL_BLOCK,
        )
        return cls(
            tokens=zeros(size),
            positions=zeros(size),
            keep=zeros(blocks),
            draw_rows=torch.full((blocks,), slots, dtype=torch.int32, device=device),
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
        block[3] = np.arange(blocks) * PREFILL_BLOCK
        at = 0
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
            block[3, last - 1] = at + num - 1
            if item.final:
                block[4, last - 1] = item.slot
                block[5, last - 1] = item.start + num - 1
            at = last * PREFILL_BLOCK
        device = self.tokens.device
        tokens, blocks_ = (torch.from_numpy(part).to(device, non_blocking=True) for part in (token, block))
        for target, source in zip((self.tokens, self.positions, self.view.rows, self.view.write), tokens, strict=True):
            target.copy_(source)
        view = self.view
        targets = (view.block_rows, view.block_first, view.block_count, self.keep, self.draw_rows, self.draw_base)
        for target, source in zip(targets, blocks_, strict=True):
            target.copy_(source)


class Launched:
    """A block that runs, or ran. `tokens` waits for it."""

    def __init__(self, engine: BlockEngine, *, first: int, num: int) -> None:
        state = engine.state
        assert state is not None
        ring = state.out_ids.shape[0]
        rows = [(first + step) % ring for step in range(num)]
        self._event: torch.cuda.Event | None = None
        index = torch.tensor(rows, device=engine.device)
        ids, logprobs = state.out_ids[index], state.out_logprobs[index]
        if engine.device.type == "cuda":
            self._ids = torch.empty(ids.shape, dtype=ids.dtype, pin_memory=True)
            self._logprobs = torch.empty(logprobs.shape, pin_memory=True)
            self._ids.copy_(ids, non_blocking=True)
            self._logprobs.copy_(logprobs, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._ids, self._logprobs = ids, logprobs

    @property
    def done(self) -> bool:
        return self._event is None or self._event.query()

    def tokens(self) -> tuple["np.ndarray[Any, Any]", "np.ndarray[Any, Any]"]:
        """(ids [steps + 1, slots] with -1 where none was drawn, log-probs): the prefill's draws, then the steps'."""
        if self._event is not None:
            self._event.synchronize()
        return self._ids.numpy(), self._logprobs.numpy()


def _pack(items: Sequence[Prefill], most: int) -> list[list[Prefill]]:
    """The prefills in passes of at most `most` padded tokens. Long prompts are cut at the pass's end and go on in the
    next, and a slot's pieces stay in order, because passes run one after the other."""
    parts: list[list[Prefill]] = []
    used = most
    for item in items:
        start = 0
        while start < len(item.ids):
            if used >= most:
                parts.append([])
                used = 0
            num = min(len(item.ids) - start, most - used)
            parts[-1].append(
                Prefill(
                    slot=item.slot,
                    start=item.start + start,
                    ids=item.ids[start : start + num],
                    final=item.final and start + num == len(item.ids),
                )
            )
            used += -(-num // PREFILL_BLOCK) * PREFILL_BLOCK
            start += num
    return parts
