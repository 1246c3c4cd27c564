# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
"""The block engine: packed prefills and blocks of decode steps over slots, without host
synchronization.

Sampling, stopping and log-probs stay on the device. The host plans a block (which prompts to
prefill, how many steps to decode), launches it, and reads an earlier one's tokens meanwhile. On
CUDA a decode step is a captured graph, compiled where that works; prefills are captured per size.
On other devices everything runs eagerly, in the same order.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from turnwise.generate.blocks import ops
from turnwise.generate.blocks.cache import ATTENTION, Active, PackedCache, View
from turnwise.generate.blocks.fused import FusedModel
from turnwise.generate.blocks.launched import Launched, Mark, Marks
from turnwise.generate.blocks.ops import SlotState
from turnwise.generate.blocks.prefill import PREFILL_SIZES, Prefill, PrefillBuffers, pack, size_for
from turnwise.generate.blocks.staging import Staging
from turnwise.generate.sampling import truncate
from turnwise.models.attention import attention_configs, routed

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class Start:
    """A request that begins: how its slot draws."""

    slot: int
    seed: int
    temperature: float
    limit: int


@dataclass(kw_only=True, slots=True)
class Copy:
    """Copy of positions first..last from one slot to another, for a common prompt prefix."""

    source: int
    target: int
    first: int = 0
    last: int


@dataclass(kw_only=True, slots=True)
class Link:
    """Makes the first `num` positions of a slot those of its holder; 0 means that the slot holds
    all of its own."""

    slot: int
    holder: int
    num: int


class BlockEngine:
    """Runs prefills and blocks of decode steps of one model.

    Args:
        steps: decode steps per block.
        compile: compile the decode step before it is captured, where the model has no fused pass of
            its own.
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
        compile: bool = False,
    ) -> None:
        self._model = model
        self.device = next(model.parameters()).device
        self.slots = slots
        self.length = length
        self.steps = steps
        self._capture = self.device.type == "cuda"
        self._compile = compile and self._capture
        self._vocab = vocab
        self._stop_ids = [token for token in stop_ids if 0 <= token < vocab]
        self._configs = attention_configs(model)
        self._softcap = self._configs[0]._attn_implementation != "sdpa"
        self._fused = FusedModel.of(model, length=length)
        self._half = 0
        self._staging = Staging(self.device)
        self._cache: PackedCache | None = None
        self.state: SlotState | None = None
        self._decode: Callable[[], None] | None = None
        self._prefills: dict[int, tuple[PrefillBuffers, Callable[[], None]]] = {}
        self._truncation: dict[int, tuple[int, float]] = {}
        self._pool: Any = None

    @property
    def num_bytes(self) -> int:
        """Memory that keys and values hold now."""
        return 0 if self._cache is None else self._cache.num_bytes

    def free(self) -> None:
        """Frees keys, values and graphs; the next block allocates and captures them again.

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
        copies: Sequence[Copy] = (),
        moves: Sequence[Copy] = (),
        links: Sequence[Link] = (),
        rests: Sequence[int] = (),
        truncation: dict[int, tuple[int, float]] | None = None,
        steps: int | None = None,
    ) -> Launched:
        """Launches one block without synchronizing: disables the slots in `rests`, copies states,
        prefills prompts in order, then decodes `steps` steps.

        Args:
            copies: what prompts have in common with one that was prefilled before.
            moves: what slots hold for others that is about to be overwritten; in order, before the
                links change.
            truncation: top-k and top-p of the slots that have any; they take the step apart, which
                is slower.
        """
        state = self._ready()
        began = Mark.now(self.device)
        steps = self.steps if steps is None else min(steps, self.steps)
        # Two blocks' tokens are kept: the one that runs, and the one before, which is being read.
        first = self._half * (self.steps + 1)
        self._half = 1 - self._half
        state.cursor.fill_(first)
        state.out_ids[first].fill_(-1)
        if rests:
            index = self._staging.send(rests)
            state.count[index] = 0
            state.write[index] = self.length
        if starts:
            self._start(state, starts)
        self._truncation = truncation or {}
        for move in moves:
            self._copy([move])
        self._link(links)
        self._copy(copies)
        for part in pack(prefills, PREFILL_SIZES[-1]):
            self._prefill(part)
        self._copy(
            [
                Copy(
                    source=item.slot,
                    target=twin,
                    first=item.shared,
                    last=item.start + len(item.ids),
                )
                for item in prefills
                for twin in item.twins
                if item.start + len(item.ids) > item.shared
            ]
        )
        state.cursor.add_(1)
        decode = self._decode_step()
        prefilled = Mark.now(self.device)
        ends: list[Mark] = []
        for _ in range(steps):
            decode()
            ends.append(Mark.now(self.device))
        marks = Marks(began=began, prefilled=prefilled, steps=ends)
        rows = slice(first, first + steps + 1)
        return Launched(state.out_ids[rows], state.out_logprobs[rows], marks=marks)

    def _copy(self, copies: Sequence[Copy]) -> None:
        if copies:
            assert self._cache is not None
            ends = self._staging.send(
                [number for copy in copies for number in (copy.source, copy.target)]
            )
            first, last = min(copy.first for copy in copies), max(copy.last for copy in copies)
            self._cache.copy(ends[0::2], ends[1::2], first=first, last=last)

    def _link(self, links: Sequence[Link]) -> None:
        if links:
            assert self._cache is not None
            found = {link.slot: link for link in links}  # the last one per slot counts
            numbers = [
                number for link in found.values() for number in (link.slot, link.holder, link.num)
            ]
            columns = self._staging.send(numbers).view(-1, 3)
            self._cache.holders[columns[:, 0]] = columns[:, 1].int()
            self._cache.shared[columns[:, 0]] = columns[:, 2].int()

    def _ready(self) -> SlotState:
        if self._cache is None or self.state is None:
            self._cache = PackedCache(slots=self.slots, length=self.length, device=self.device)
            self.state = SlotState.make(
                slots=self.slots,
                length=self.length,
                vocab=self._vocab,
                ring=2 * self.steps + 2,
                device=self.device,
            )
            if self._fused is not None:
                self._fused.allocate(self._cache)
            if self._stop_ids:
                self.state.stop[torch.tensor(self._stop_ids, device=self.device)] = 1
        return self.state

    def _start(self, state: SlotState, starts: Sequence[Start]) -> None:
        staged = self._staging.take(4 * len(starts))
        columns = staged.values.reshape(4, -1)
        columns[:3] = [
            [s.slot for s in starts],
            [s.seed for s in starts],
            [s.limit for s in starts],
        ]
        columns[3].view(np.float64)[:] = [s.temperature for s in starts]
        slots, seeds, limits, temperatures = staged.send().view(4, -1)
        state.seed[slots] = seeds
        state.left[slots] = limits.int()
        state.temperature[slots] = temperatures.view(torch.float64).float()

    def _forward(
        self, tokens: Tensor, positions: Tensor, view: View, keep: Tensor | None
    ) -> Tensor:
        """Logits [R, V] of the kept tokens (all, where None)."""
        assert self._cache is not None
        if self._fused is not None:
            return self._fused(tokens, positions, self._cache, view, keep)
        out = self._model(
            input_ids=tokens[None],
            position_ids=positions[None],
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=0 if keep is None else keep,
        )
        return out.logits[0]

    def _switched(self, function: Callable[[], None], view: View) -> None:
        """Runs the function with the models' attention routed to the slots, and routes it back."""
        assert self._cache is not None
        self._cache.view = Active.view = view
        Active.softcap = self._softcap
        try:
            with routed(self._configs, ATTENTION):
                function()
        finally:
            self._cache.view = Active.view = None

    def _decode_step(self) -> Callable[[], None]:
        if self._decode is not None and not self._truncation:
            return self._decode
        state, cache = self.state, self._cache
        assert state is not None
        assert cache is not None
        num = self.slots
        rows = torch.arange(num, device=self.device)
        slots = rows.int()
        view = View(
            rows=rows,
            write=state.write[:num],
            block_rows=None,
            block_at=None,
            block_first=state.position[:num],
            block_count=state.count[:num],
            block=1,
            holders=cache.holders,
            shared=cache.shared,
        )

        def forward() -> Tensor:
            return self._forward(state.token[:num], state.position[:num], view, None)

        if self._truncation:
            return lambda: self._switched(lambda: self._truncated_step(forward, slots), view)
        self._decode = self._captured_decode(forward, view, slots)
        return self._decode

    def _captured_decode(
        self, forward: Callable[[], Tensor], view: View, slots: Tensor
    ) -> Callable[[], None]:
        state = self.state
        assert state is not None

        def step(logits: Callable[[], Tensor]) -> Callable[[], None]:
            return lambda: ops.advance(logits(), slots, slots, state, decode=True)

        if not self._capture:
            return lambda: self._switched(step(forward), view)
        if self._compile and self._fused is None:
            try:
                # Weights are updated in place, so the compiled code stays valid.
                return self._graph(step(torch.compile(forward, dynamic=False)), view)
            except (
                Exception
            ) as error:  # compilers raise many kinds of errors; the uncompiled step works
                logger.warning("the decode step could not be compiled, it runs as it is: %r", error)
        return self._graph(step(forward), view)

    def _truncated_step(self, forward: Callable[[], Tensor], slots: Tensor) -> None:
        state = self.state
        assert state is not None
        ops.advance(self._truncated(forward(), range(self.slots)), slots, slots, state, decode=True)

    def _truncated(self, logits: Tensor, slots: Sequence[int]) -> Tensor:
        """The logits, with everything outside top-k and top-p at -inf in the rows of the slots that
        have them."""
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
        logits[rows] = logits[rows].masked_fill(
            truncate(scaled, top_k=top_k, top_p=top_p).isinf(), float("-inf")
        )
        return logits

    def _prefill(self, items: Sequence[Prefill]) -> None:
        size = size_for(items)
        if size not in self._prefills:
            assert self._cache is not None
            buffers = PrefillBuffers.make(size, cache=self._cache)
            self._prefills[size] = (buffers, self._captured_prefill(buffers))
        buffers, run = self._prefills[size]
        buffers.load(items, slots=self.slots, length=self.length, staging=self._staging)
        if any(slot in self._truncation for item in items for slot in item.slots):
            self._switched(lambda: self._prefill_step(buffers), buffers.view)
        else:
            run()

    def _captured_prefill(self, buffers: "PrefillBuffers") -> Callable[[], None]:
        if not self._capture:
            return lambda: self._switched(lambda: self._prefill_step(buffers), buffers.view)
        buffers.load([], slots=self.slots, length=self.length, staging=self._staging)
        return self._graph(lambda: self._prefill_step(buffers), buffers.view)

    def _prefill_step(self, buffers: "PrefillBuffers") -> None:
        state = self.state
        assert state is not None
        logits = self._forward(buffers.tokens, buffers.positions, buffers.view, buffers.keep)
        if self._truncation:
            logits = self._truncated(logits, buffers.draw_rows.tolist())
        ops.advance(logits, buffers.draw_rows, buffers.draw_base, state, decode=False)

    def _graph(self, step: Callable[[], None], view: View) -> Callable[[], None]:
        """The step as a captured graph. It is captured while its slots are disabled, so capturing
        draws nothing."""
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
            # A graph holds only addresses, so its inputs must live as long as the graph.
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
    return [
        state.token,
        state.position,
        state.write,
        state.count,
        state.left,
        state.out_ids,
        state.out_logprobs,
        state.cursor,
    ]
