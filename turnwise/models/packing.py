# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
"""Padding-free passes: a micro-batch becomes one row of real tokens, and attention stays within the
original rows.

`RowLayout` holds the positions of a batch's tokens. It is computed once, so that passes do not
synchronize with the device. transformers calls `packed_attention` in every layer inside
`packed_passes`. `unpackable` checks a model's config and then tries it; models that cannot be
packed use the padded path, which gives the same results.
"""

import heapq
import inspect
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from turnwise.data.batch import Batch
from turnwise.models.attention import attention_configs, inner_model, routed, unroutable

ATTENTION = "turnwise_packed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """The real tokens of a batch, row after row.

    Example: rows [7 8 9] and [5 6]

        input_ids     7  8  9  5  6
        position_ids  0  1  2  0  1
        rows          0  0  0  1  1
        boundaries    0  3  5
    """

    input_ids: Tensor  # [1, N] int64
    position_ids: Tensor  # [1, N] int64: counted from each row's start
    rows: Tensor  # [N] int64: the row that each token is from
    boundaries: Tensor  # [B + 1] int32: where each row starts, and the end
    longest: int
    """Tokens of the longest row."""

    @classmethod
    def of(cls, batch: Batch) -> "Packed":
        """The batch without its padding."""
        rows, columns = batch.attention_mask.nonzero(as_tuple=True)
        lengths = batch.lengths
        return cls(
            input_ids=batch.input_ids[rows, columns][None],
            position_ids=columns[None],
            rows=rows,
            boundaries=F.pad(lengths.cumsum(0), (1, 0)).int(),
            longest=int(lengths.max()),
        )

    def arguments(self) -> dict[str, Any]:
        """Arguments of a forward pass, by the names that transformers uses."""
        return {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "cu_seq_lens_q": self.boundaries,
            "cu_seq_lens_k": self.boundaries,
            "max_length_q": self.longest,
            "max_length_k": self.longest,
        }

    def pad(self, packed: Tensor, width: int) -> Tensor:  # [N] -> [B, T]
        """One number per token, back in the padded shape, 0 on padding."""
        zeros = packed.new_zeros((self.boundaries.shape[0] - 1, width))
        return zeros.index_put((self.rows, self.position_ids[0]), packed)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowLayout:
    """Positions of a batch's tokens. Computed before a pass, because it synchronizes with the
    device."""

    rows: Tensor  # [R] int64: row of each response token
    columns: Tensor  # [R] int64: its column
    packed: Packed | None
    """None: the pass is padded."""

    @classmethod
    def of(cls, batch: Batch, *, packed: bool = False) -> "RowLayout":
        """The batch's layout.

        Raises:
            ValueError: a row starts with a response.
        """
        rows, columns = batch.response_mask.nonzero(as_tuple=True)
        if bool((columns == 0).any()):
            raise ValueError(
                "a response cannot be the first token of a row: there is no state it was chosen "
                "from"
            )
        return cls(rows=rows, columns=columns, packed=Packed.of(batch) if packed else None)

    def states_before(self, hidden: Tensor) -> Tensor:  # [R, H]
        """The hidden states that predict the response tokens: for each token, the state before it.

        `hidden` is [1, N, H] where the layout is packed, else [B, T, H].
        """
        if self.packed is None:
            return hidden[self.rows, self.columns - 1]
        return hidden[0, self.packed.boundaries[self.rows] + self.columns - 1]


def packed_chunks(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Row numbers in chunks of at most `max_tokens` real tokens; a row that is longer than that is
    alone in its own.

    The longest rows are placed first, each into the emptiest chunk, so that chunks are nearly
    equal.

    Example:
        >>> packed_chunks([5, 1, 4, 2], 6)
        [[0, 1], [2, 3]]
    """
    alone = [[row] for row, length in enumerate(lengths) if length > max_tokens]
    order = sorted(
        (row for row, length in enumerate(lengths) if length <= max_tokens),
        key=lambda row: -lengths[row],
    )
    count = -(-sum(lengths[row] for row in order) // max_tokens)
    while True:
        room = [(0, number) for number in range(count)]
        chunks: list[list[int]] = [[] for _ in range(count)]
        for row in order:
            held, number = heapq.heappop(room)
            if held + lengths[row] > max_tokens:
                break
            chunks[number].append(row)
            heapq.heappush(room, (held + lengths[row], number))
        else:
            return alone + [chunk for chunk in chunks if chunk]
        count += 1


def packed_attention(
    module: nn.Module,
    query: Tensor,  # [1, H, N, D]
    key: Tensor,  # [1, HK, N, D]
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention within the packed rows: ([1, N, H, D], no weights)."""
    if cu_seq_lens_q is None or max_length_q is None:
        raise ValueError(
            "a packed pass needs cu_seq_lens_q and max_length_q, and this model did not hand them "
            "on"
        )
    if softcap is not None or dropout or kwargs.get("s_aux") is not None:
        raise ValueError(
            "packed attention has no softcap, dropout or sinks; set train.packing to false"
        )
    if sliding_window is not None and max_length_q > sliding_window:
        raise ValueError(
            f"a row of {max_length_q} tokens is longer than the window of {sliding_window}"
        )
    if has_kernel(query.device, query.dtype):
        out = _flash(query, key, value, cu_seq_lens_q, max_length_q, scaling)
    else:
        out = _each_row(query, key, value, cu_seq_lens_q, scaling)
    return out[None], None


AttentionInterface.register(ATTENTION, packed_attention)


def has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """True if one kernel attends to all packed rows; otherwise rows are attended to one by one."""
    return (
        device.type == "cuda" and dtype in (torch.bfloat16, torch.float16) and _KERNEL is not None
    )


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    boundaries: Tensor,
    longest: int,
    scaling: float | None,
) -> Tensor:  # [N, H, D]
    assert _KERNEL is not None
    settings = _KERNEL.settings
    query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))  # [N, H, D]
    if "enable_gqa" not in settings and key.shape[1] != query.shape[1]:
        groups = query.shape[1] // key.shape[1]
        key, value = (states.repeat_interleave(groups, dim=1) for states in (key, value))
    if scaling is not None and _KERNEL.scales:
        settings = {**settings, "scale": scaling}
    elif scaling is not None:
        query = query * (scaling * query.shape[2] ** 0.5)
    if torch.compiler.is_compiling():  # compiled layers write and read this memory layout
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    return _KERNEL.attend(query, key, value, boundaries, boundaries, longest, longest, **settings)


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """torch's attention over packed rows, and how this version of it is called."""

    attend: Callable[..., Tensor]
    settings: dict[str, Any]
    scales: bool
    """It has a parameter for the scale of the logits."""

    @classmethod
    def of(cls, attend: Callable[..., Tensor], names: frozenset[str]) -> "Kernel":
        """`attend`, whose parameters have these names."""
        return cls(attend=attend, settings=varlen_settings(names), scales="scale" in names)


def varlen_settings(names: frozenset[str]) -> dict[str, Any]:
    """Keyword arguments that make this torch's `varlen_attn` causal with grouped-query heads, found
    from its signature.

    Example:
        >>> varlen_settings(frozenset({"is_causal"}))
        {'is_causal': True}
        >>> varlen_settings(frozenset({"window_size", "enable_gqa"}))
        {'window_size': (-1, 0), 'enable_gqa': True}
    """
    causal: dict[str, Any] = (
        {"window_size": (-1, 0)} if "window_size" in names else {"is_causal": True}
    )
    return {**causal, **({"enable_gqa": True} if "enable_gqa" in names else {})}


def _kernel() -> Kernel | None:
    """None where this torch has none (before 2.10)."""
    if find_spec("torch.nn.attention.varlen") is None:
        return None
    from torch.nn.attention.varlen import varlen_attn

    names = frozenset(inspect.signature(varlen_attn).parameters)
    return Kernel.of(cast(Callable[..., Tensor], varlen_attn), names)


_KERNEL = _kernel()
"""Looked up once at import: compiled code cannot do it."""


def _row_by_row(
    query: Tensor, key: Tensor, value: Tensor, boundaries: Tensor, scaling: float | None
) -> Tensor:  # [N, H, D]
    grouped = query.shape[1] != key.shape[1]
    parts = [
        F.scaled_dot_product_attention(
            query[:, :, start:end],
            key[:, :, start:end],
            value[:, :, start:end],
            is_causal=True,
            scale=scaling,
            enable_gqa=grouped,
        )
        for start, end in pairwise(boundaries.tolist())
        if end > start
    ]
    return torch.cat(parts, dim=2)[0].transpose(0, 1)


_each_row: Callable[..., Tensor] = cast(Any, torch.compiler.disable)(_row_by_row)
"""Not compiled: it reads the row boundaries from the device."""


@contextmanager
def packed_passes(*modules: nn.Module | None) -> Generator[None]:
    """Routes the attention of these modules' transformers models to `packed_attention`, and back
    afterwards.

    Keep it active until after the backward pass: gradient checkpointing runs the layers again
    there. Outside of it, the generator samples with the same modules and its own attention.
    """
    with routed(attention_configs(*modules), ATTENTION):
        yield


def window_of(model: nn.Module) -> int | None:
    """The shortest sliding window of the model's layers; None where every layer sees the whole
    row."""
    inner = inner_model(model)
    settings = {} if inner is None else _settings(inner)
    kinds = settings.get("layer_types")
    if kinds is not None and "sliding_attention" not in kinds:
        return None
    window = settings.get("sliding_window")
    return int(window) if window and settings.get("use_sliding_window", True) else None


def unpackable(model: nn.Module) -> str | None:
    """The reason why rows cannot be packed for this model, or None if they can. `model` maps ids to
    last_hidden_state.

    The config does not tell everything, so two short rows are run both padded and packed and
    compared.

    Example:
        >>> from turnwise.testing.tiny import tiny_model
        >>> unpackable(tiny_model("qwen3").get_decoder()) is None
        True
        >>> unpackable(tiny_model("gemma2").get_decoder())
        'it caps its attention logits'
    """
    return unpackable_by_config(model) or _trial(model)


def unpackable_by_config(model: nn.Module) -> str | None:
    """The same from the model's class and config alone; it needs no weights."""
    reason = unroutable(model)
    if reason is not None:
        return reason
    inner = inner_model(model)
    assert inner is not None
    if _settings(inner).get("attn_logit_softcapping") is not None:
        return "it caps its attention logits"
    return None


def _trial(model: nn.Module) -> str | None:
    weight = next(model.parameters())
    ids = torch.tensor([[2, 5, 3, 7, 4], [6, 1, 2, 0, 0]], device=weight.device)
    lengths = [5, 3]
    run = cast(Callable[..., Any], model)
    rows = torch.tensor([0] * 5 + [1] * 3, device=weight.device)
    columns = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2], device=weight.device)
    packed = Packed(
        input_ids=ids[rows, columns][None],
        position_ids=columns[None],
        rows=rows,
        boundaries=torch.tensor([0, 5, 8], device=weight.device, dtype=torch.int32),
        longest=max(lengths),
    )
    with torch.no_grad():
        plain = run(input_ids=ids, use_cache=False).last_hidden_state[rows, columns].float()
        try:
            with packed_passes(model):
                found = run(**packed.arguments(), use_cache=False).last_hidden_state[0].float()
        except Exception as error:
            # An unknown model may raise anything here; then it is not packed.
            return f"a trial raised {error!r}"
    gap, size = float((found - plain).abs().max()), float(plain.abs().max())
    if not gap <= (1e-4 if weight.dtype == torch.float32 else 0.05) * max(size, 1e-3):
        return (
            f"a trial differs from the padded pass by {gap:.3g} in hidden states of up to "
            f"{size:.3g}"
        )
    return None


def _settings(model: PreTrainedModel) -> dict[str, Any]:
    return model.config.get_text_config().to_dict()
