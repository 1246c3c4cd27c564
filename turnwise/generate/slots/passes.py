# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""The model passes of the in-process engine: prefill a few chunks, decode one token of every slot.

`SlotPasses` runs them over the slot cache. `RecomputePasses` is the slow stand-in for models whose
state does not fit into slots (recurrent, linear attention, attention of their own): it runs the
whole context for every token.
"""

import inspect
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from turnwise.generate.sampling import draw
from turnwise.generate.scheduler import SessionState
from turnwise.generate.slots.cache import SlotCache, SlotView, attend, slot_forward
from turnwise.models.attention import attention_configs

Drawn = tuple[list[int], list[float]]
"""One id and log-prob per session of a pass; a log-prob that is not finite marks a broken row."""


class Passes(Protocol):
    """The interface that the generator needs of a model."""

    @property
    def num_bytes(self) -> int:
        """Memory that the cache holds now."""
        ...

    def prefill(self, batch: Sequence[SessionState], *, size: int, num_rows: int) -> Drawn:
        """Runs the next span of each session, in rows of `size`, and draws the token after it."""
        ...

    def decode(self, batch: Sequence[SessionState]) -> Drawn:
        """Runs the next id of each session, and draws the token after it."""
        ...

    def clear_row(self, row: int) -> None:
        """Wipes a slot whose states may not be finite."""
        ...

    def free(self) -> None:
        """Gives the cache's memory back; it is allocated again when needed."""
        ...


@contextmanager
def inference(model: torch.nn.Module) -> Generator[None]:
    """Eval mode without gradients; the training mode is restored, module by module, if it was
    on."""
    modules = [module for module in model.modules() if module.training] if model.training else []
    for module in modules:
        module.training = False
    try:
        with torch.inference_mode():
            yield
    finally:
        for module in modules:
            module.training = True


def draw_tokens(logits: Tensor, rows: Sequence[int], batch: Sequence[SessionState]) -> Drawn:
    """Draws a token for each session from its row of the logits [R, V]."""
    num_rows = logits.shape[0]
    seeds, positions, temperature = [0] * num_rows, [0] * num_rows, [1.0] * num_rows
    top_k, top_p = [0] * num_rows, [1.0] * num_rows
    truncated = False
    for row, state in zip(rows, batch, strict=True):
        sampling = state.sampling
        assert sampling is not None
        seeds[row], positions[row], temperature[row] = (
            state.seed,
            len(state.ids),
            sampling.temperature,
        )
        if sampling.top_k or sampling.top_p < 1.0:
            top_k[row], top_p[row], truncated = sampling.top_k, sampling.top_p, True
    keys = torch.tensor([seeds, positions]).to(logits.device)
    ids, logprobs = draw(
        logits,
        seeds=keys[0],
        positions=keys[1],
        temperature=torch.tensor(temperature).to(logits.device),
        top_k=torch.tensor(top_k).to(logits.device) if truncated else None,
        top_p=torch.tensor(top_p).to(logits.device) if truncated else None,
    )
    all_ids, all_logprobs = ids.tolist(), logprobs.tolist()
    return [all_ids[row] for row in rows], [all_logprobs[row] for row in rows]


class SlotPasses:
    """Passes over a slot cache.

    With `exact`, every pass has a shape that does not depend on who takes part: decode runs all
    slots, prefill a fixed number of rows, and attention a length whose bits do not depend on the
    others (`exact_lengths`).
    """

    def __init__(self, model: PreTrainedModel, *, slots: int, length: int, exact: bool) -> None:
        self._model = model
        self._slots = slots
        self._length = length
        self._exact = exact
        self._device = next(model.parameters()).device
        self._configs = attention_configs(model)
        # transformers' sdpa function leaves a softcap out, its others apply it: do as the model
        # does elsewhere.
        self._softcap = self._configs[0]._attn_implementation != "sdpa"
        names = inspect.signature(model.forward).parameters
        takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in names.values())
        self._last_only: dict[str, Any] = (
            {"logits_to_keep": 1} if "logits_to_keep" in names or takes_any else {}
        )
        self.windows: set[int] = set()
        """Sliding windows that the layers asked for in the last pass."""
        self._cache: SlotCache | None = None
        self._lengths = [length]
        self._tuned = False

    def prefill(self, batch: Sequence[SessionState], *, size: int, num_rows: int) -> Drawn:
        num_rows = num_rows if self._exact else len(batch)
        tokens = torch.zeros(num_rows, size, dtype=torch.long)
        positions = torch.zeros(num_rows, size, dtype=torch.long)
        write = torch.full((num_rows, size), self._length)
        rows = [self._slots] * num_rows
        for row, state in enumerate(batch):
            span = state.spans[state.at]
            # On the left, so that every row's last token is the last column.
            pad = size - (span.end - span.start)
            tokens[row, pad:] = torch.tensor(state.ids[span.start : span.end])
            positions[row, pad:] = write[row, pad:] = torch.arange(span.start, span.end)
            rows[row] = cast(int, state.slot)
        longest = max(state.spans[state.at].end for state in batch)
        logits = self._forward(tokens, positions, write, rows=torch.tensor(rows), longest=longest)
        return draw_tokens(logits, range(len(batch)), batch)

    def decode(self, batch: Sequence[SessionState]) -> Drawn:
        slots = [cast(int, state.slot) for state in batch]
        num_rows = self._slots if self._exact else min(self._slots, -(-(max(slots) + 1) // 8) * 8)
        tokens, positions, write = [0] * num_rows, [0] * num_rows, [self._length] * num_rows
        for slot, state in zip(slots, batch, strict=True):
            tokens[slot] = state.ids[state.cached]
            positions[slot] = write[slot] = state.cached
        inputs = torch.tensor([tokens, positions, write])[:, :, None]
        logits = self._forward(
            inputs[0], inputs[1], inputs[2], rows=None, longest=max(positions) + 1
        )
        return draw_tokens(logits, slots, batch)

    def clear_row(self, row: int) -> None:
        if self._cache is not None:
            with torch.inference_mode():
                self._cache.clear_row(row)

    def free(self) -> None:
        self._cache = None

    @property
    def num_bytes(self) -> int:
        """Memory that the cache holds now."""
        return 0 if self._cache is None else self._cache.num_bytes

    def _forward(
        self, tokens: Tensor, positions: Tensor, write: Tensor, *, rows: Tensor | None, longest: int
    ) -> Tensor:
        """Logits [R, V] of each row's last token."""
        if self._cache is None:
            self._cache = SlotCache(slots=self._slots, length=self._length)
        if not self._tuned:
            self._lengths, self._tuned = self._pick_lengths(), True
        tokens, positions, write = (part.to(self._device) for part in (tokens, positions, write))
        view = SlotView(
            rows=None if rows is None else rows.to(self._device),
            positions=positions,
            write=write,
            length=next(length for length in self._lengths if length >= longest),
            softcap=self._softcap,
        )
        with slot_forward(self._configs, cache=self._cache, view=view):
            out = self._model(
                input_ids=tokens,
                position_ids=positions,
                past_key_values=self._cache,
                use_cache=True,
                **self._last_only,
            )
        self.windows = view.windows
        return out.logits[:, -1]

    def _pick_lengths(self) -> list[int]:
        lengths = attention_lengths(self._length)
        if not self._exact:
            return lengths
        text = self._configs[0].get_text_config()
        capped = text.to_dict().get("attn_logit_softcapping") if self._softcap else None
        heads = int(text.num_attention_heads)
        settings = text.to_dict()
        return exact_lengths(
            lengths,
            heads=heads,
            kv_heads=int(settings.get("num_key_value_heads") or heads),
            dim=int(settings.get("head_dim") or text.hidden_size // heads),
            softcap=capped,
            sizes=(1, 16),
        )


def attention_lengths(length: int) -> list[int]:
    """The lengths over which attention runs: doubling to 512, then by 512, up to the whole slot.

    Example:
        >>> attention_lengths(1300)
        [64, 128, 256, 512, 1024, 1300]
    """
    steps = [64, 128, 256, *range(512, length, 512)]
    return [*(step for step in steps if step < length), length]


def exact_lengths(
    lengths: list[int],
    *,
    heads: int,
    kv_heads: int,
    dim: int,
    softcap: float | None,
    sizes: tuple[int, ...],
) -> list[int]:
    """Those lengths whose result has the same bits as that of the longest, found out by trying.

    Attention over 64 positions equals attention over 1024 of which 960 are masked only as far as
    the kernel adds up in the same order; that is a property of the machine and the library, so it
    is tested and not assumed.
    """
    generator = torch.Generator().manual_seed(0)
    longest = lengths[-1]
    query = {size: torch.randn(2, heads, size, dim, generator=generator) for size in sizes}
    key, value = (torch.randn(2, kv_heads, longest, dim, generator=generator) for _ in range(2))

    def run(size: int, length: int, live: int) -> Tensor:
        positions = torch.full((2, size), live - 1)
        view = SlotView(rows=None, positions=positions, write=positions, length=length)
        mask = view.mask(window=None, groups=heads // kv_heads, dtype=torch.float32)
        states = key[:, :, :length], value[:, :, :length]
        return attend(query[size], *states, mask=mask, scaling=None, softcap=softcap)

    def same(length: int) -> bool:
        lives = {length, length - 1, length * 3 // 4 + 1, length // 2 + 1}
        return all(
            torch.equal(run(size, length, n), run(size, longest, n))
            for size in sizes
            for n in lives
            if n > 0
        )

    return [*(length for length in lengths[:-1] if same(length)), longest]


class RecomputePasses:
    """Passes without a cache: the whole context of every session, one by one. Right for every
    causal model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._device = next(model.parameters()).device

    @property
    def num_bytes(self) -> int:
        return 0

    def prefill(self, batch: Sequence[SessionState], *, size: int, num_rows: int) -> Drawn:
        return self._run(batch, [state.spans[state.at].end for state in batch])

    def decode(self, batch: Sequence[SessionState]) -> Drawn:
        return self._run(batch, [state.cached + 1 for state in batch])

    def clear_row(self, row: int) -> None:
        """Nothing is kept, so nothing can be left behind."""

    def free(self) -> None:
        """Nothing is kept."""

    def _run(self, batch: Sequence[SessionState], ends: Sequence[int]) -> Drawn:
        logits = [
            self._model(
                input_ids=torch.tensor([state.ids[:end]], device=self._device), use_cache=False
            ).logits[0, -1]
            for state, end in zip(batch, ends, strict=True)
        ]
        return draw_tokens(torch.stack(logits), range(len(batch)), batch)
