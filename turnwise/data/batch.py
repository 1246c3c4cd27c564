# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
"""Batch: validated tensors that every estimator, loss and backend reads, with one meaning per
tensor."""

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from turnwise.types import Sample


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Padded samples. Position t of every [B, T] tensor refers to the choice of token t given the
    ids before it.

    Rows are padded on the right. Where a window mode or a rewriting chat template made several
    samples of an episode, its rows share the episode id, and `turn_ids` keeps counting through
    them.

    Example: one row, where the model said [7 8] and [9], padded by one

        input_ids       1   2   7   8   3   9   0
        attention_mask  1   1   1   1   1   1   0
        response_mask   .   .   x   x   .   x   .
        turn_ids       -1  -1   0   0  -1   1  -1
        rewards         0   0   0  r0   0  r1   0
    """

    input_ids: Tensor  # [B, T] int64
    attention_mask: Tensor  # [B, T] int64: 1 on every token, 0 on padding
    response_mask: Tensor  # [B, T] bool: the model produced the token
    loss_mask: Tensor  # [B, T] bool, within response_mask: the token is trained on
    turn_ids: Tensor  # [B, T] int64: turn in the episode, -1 where response_mask is False
    rewards: Tensor  # [B, T] float32: a turn's reward on its last token
    logprobs: Tensor  # [B, T] float32: the sampler's log-probs ("old"), 0 outside response_mask
    # [B, T] int64: state in which the token's turn was played, equal within a group; -1 outside.
    state_ids: Tensor
    episode_ids: Tensor  # [B] int64
    group_ids: Tensor  # [B] int64
    truncated: Tensor  # [B] bool: bootstrap from the state after the row's last real token
    values: Tensor | None = None  # [B, T] float32: critic's value of the prefix before token t
    bootstrap: Tensor | None = (
        None  # [B] float32: critic's value of the whole row, 0 where not truncated
    )
    ref_logprobs: Tensor | None = None  # [B, T] float32: the reference policy's log-probs
    advantages: Tensor | None = None  # [B, T] float32, 0 outside response_mask
    returns: Tensor | None = None  # [B, T] float32, 0 outside response_mask
    old_logprobs: Tensor | None = (
        None  # [B, T] float32: trainer's own before the update. None: logprobs are exact
    )
    # [B, T] float32: of the distribution that the token was drawn from. None: not scored
    entropies: Tensor | None = None
    reward_errors: Tensor | None = (
        None  # [B, T] float64: a bound on rewards' rounding (algos/rounding.py)
    )
    weights: Tensor | None = (
        None  # [B, T] float32: each token's share in its mini-batch's loss (algos/reduce.py)
    )

    def __post_init__(self) -> None:
        rows, width = self.input_ids.shape
        for name, tensor in self.tensors().items():
            wanted = (rows,) if name in _PER_ROW else (rows, width)
            if tuple(tensor.shape) != wanted:
                raise ValueError(
                    f"Batch.{name} must have shape {wanted}, got {tuple(tensor.shape)}"
                )
            if (dtype := _DTYPES.get(name)) is not None and tensor.dtype != dtype:
                raise ValueError(f"Batch.{name} must be {dtype}, got {tensor.dtype}")

    @property
    def num_rows(self) -> int:
        return self.input_ids.shape[0]

    @property
    def num_tokens(self) -> int:
        """Real tokens, padding left out."""
        return int(self.attention_mask.sum())

    @property
    def lengths(self) -> Tensor:  # [B] int64
        return self.attention_mask.sum(-1)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are set, by name."""
        found = {spec.name: getattr(self, spec.name) for spec in fields(self)}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def validate(self) -> "Batch":
        """The batch itself. Raises ValueError where a tensor's content contradicts its
        definition."""
        real = self.attention_mask.bool()
        responses = self.response_mask
        _refuse(
            ~real[:, :-1] & real[:, 1:], "attention_mask must be ones, then zeros (right padding)"
        )
        _refuse(self.loss_mask & ~responses, "loss_mask must lie within response_mask")
        _refuse(responses & ~real, "response_mask must lie within attention_mask")
        _refuse(
            responses != (self.turn_ids >= 0), "turn_ids must be >= 0 on responses and only there"
        )
        _refuse(
            responses != (self.state_ids >= 0), "state_ids must be >= 0 on responses and only there"
        )
        _refuse((self.rewards != 0) & ~responses, "rewards must lie within response_mask")
        _refuse((self.logprobs != 0) & ~responses, "logprobs must be 0 outside response_mask")
        for name in ("rewards", "logprobs"):
            _refuse(~getattr(self, name).isfinite(), f"{name} must be finite")
        return self

    def to(self, device: torch.device | str) -> "Batch":
        return self._map(lambda tensor: tensor.to(device))

    def select(self, rows: Tensor) -> "Batch":
        """The rows with these indices (or under this bool mask), trimmed to their own longest
        row."""
        picked = self._map(lambda tensor: tensor[rows])
        width = max(int(picked.lengths.max()) if picked.num_rows else 0, 1)
        return picked._map(lambda tensor: tensor[:, :width] if tensor.dim() == 2 else tensor)

    def split(self, max_tokens: int) -> list["Batch"]:
        """Micro-batches of at most `max_tokens` padded tokens each (one row at least), longest rows
        together.

        Every row is in exactly one of them. The loss does not depend on the split, because its
        denominators are counted over the whole mini-batch and passed in (algos/reduce.py).
        """
        return [self.select(rows) for rows in self.chunks(max_tokens)]

    def chunks(self, max_tokens: int) -> list[Tensor]:
        """The row indices of each micro-batch of `split`."""
        order = torch.argsort(self.lengths, descending=True, stable=True)
        lengths = self.lengths.tolist()
        chunks: list[list[int]] = []
        width = 0
        for row in order.tolist():
            if chunks and (len(chunks[-1]) + 1) * width <= max_tokens:
                chunks[-1].append(row)
            else:
                chunks.append([row])
                width = max(lengths[row], 1)
        return [torch.tensor(chunk, device=self.input_ids.device) for chunk in chunks]

    def replace(self, **tensors: Tensor | None) -> "Batch":
        """A copy with some tensors set."""
        return replace(self, **tensors)

    def _map(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        return replace(self, **{name: function(tensor) for name, tensor in self.tensors().items()})


def collate(samples: Sequence[Sample], *, pad_id: int = 0) -> Batch:
    """The samples as one validated batch, padded on the right to the longest.

    Episode names become numbers in the order of their first sample; states get numbers that are
    equal exactly where group and state name are. Each role of an episode is an episode of its own.
    """
    if not samples:
        raise ValueError("a batch needs at least one sample, got none")
    episode_numbers: dict[tuple[str, str], int] = {}
    state_numbers: dict[tuple[int, str], int] = {}
    episodes: list[int] = []
    states: list[int] = []  # row after row: -1 for no state, then the state of every turn
    places: list[int] = []  # where a row's begin
    turns: list[int] = []  # how many turns it has
    for sample in samples:
        _same_lengths(sample)
        player = (sample.episode_id, sample.role)
        episodes.append(episode_numbers.setdefault(player, len(episode_numbers)))
        places.append(len(states))
        turns.append(max(sample.state_keys, default=-1) + 1)
        states.append(-1)
        for turn in range(turns[-1]):
            key = sample.state_keys.get(turn)
            states.append(
                -1
                if key is None
                else state_numbers.setdefault((_group(sample), key), len(state_numbers))
            )

    lengths = torch.tensor([len(sample.ids) for sample in samples])
    real = torch.arange(int(lengths.max())) < lengths[:, None]

    def pad(numbers: Tensor, fill: int) -> Tensor:
        filled = torch.full(real.shape, fill, dtype=numbers.dtype)
        filled[real] = numbers
        return filled

    turn_ids = _flat("q", (sample.turn_ids for sample in samples))
    known = (turn_ids >= 0) & (turn_ids < torch.tensor(turns).repeat_interleave(lengths))
    at = torch.tensor(places).repeat_interleave(lengths) + (turn_ids + 1) * known
    return Batch(
        input_ids=pad(_flat("q", (sample.ids for sample in samples)), pad_id),
        attention_mask=real.long(),
        response_mask=pad(_flags(sample.response_mask for sample in samples), 0),
        loss_mask=pad(_flags(sample.loss_mask for sample in samples), 0),
        turn_ids=pad(turn_ids, -1),
        rewards=pad(_flat("f", (sample.rewards for sample in samples)), 0),
        logprobs=pad(_flat("f", (sample.logprobs for sample in samples)), 0),
        state_ids=pad(torch.tensor(states)[at], -1),
        episode_ids=torch.tensor(episodes),
        group_ids=torch.tensor([_group(sample) for sample in samples]),
        truncated=torch.tensor([sample.truncated for sample in samples]),
    ).validate()


def _group(sample: Sample) -> int:
    """The group of a sample. Each role of an episode has its own."""
    return sample.group_id + (crc32(sample.role.encode()) << 31 if sample.role else 0)


def _same_lengths(sample: Sample) -> None:
    """Raises ValueError if a sequence is longer or shorter than the ids: it would shift all later
    rows."""
    for name in ("response_mask", "loss_mask", "logprobs", "turn_ids", "rewards"):
        if len(getattr(sample, name)) != len(sample.ids):
            raise ValueError(
                f"a sample of episode {sample.episode_id} has {len(sample.ids)} ids and "
                f"{len(getattr(sample, name))} {name}; all sequences of a sample are equally long"
            )


def _flags(rows: Iterable[Sequence[bool]]) -> Tensor:
    return torch.from_numpy(np.frombuffer(b"".join(map(bytes, rows)), dtype=np.uint8) != 0)


def _flat(code: str, rows: Iterable[Sequence[int | float]]) -> Tensor:
    """All rows concatenated. Filling an array from Python is several times faster than filling a
    tensor."""
    numbers = array(code)
    for row in rows:
        numbers.extend(row)
    return torch.from_numpy(np.array(numbers))


_PER_ROW = {"episode_ids", "group_ids", "truncated", "bootstrap"}
_DTYPES = {
    "input_ids": torch.int64,
    "attention_mask": torch.int64,
    "response_mask": torch.bool,
    "loss_mask": torch.bool,
    "turn_ids": torch.int64,
    "state_ids": torch.int64,
    "episode_ids": torch.int64,
    "group_ids": torch.int64,
    "truncated": torch.bool,
}


def _refuse(wrong: Tensor, rule: str) -> None:
    if wrong.any():
        where = tuple(wrong.nonzero()[0].tolist())
        raise ValueError(f"invalid batch: {rule}; first violated at (row, position) {where}")
