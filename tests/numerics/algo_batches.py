"""Batches for tests of the algorithms, written down as episodes of turns."""

import torch
from torch import Tensor

from turnwise.data.batch import Batch

Turns = list[tuple[int, float]]  # (tokens, reward) of each turn


def make_batch(
    rows: list[Turns],
    *,
    groups: list[int] | None = None,
    episodes: list[int] | None = None,
    first_turns: list[int] | None = None,
    states: list[list[int]] | None = None,
    truncated: list[bool] | None = None,
    gap: int = 2,
    pad: int = 0,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Batch:
    """A batch with one row per entry: before each turn `gap` observation tokens, behind the row
    `pad` pads."""
    count = len(rows)
    width = max(sum(gap + length for length, _ in row) for row in rows) + pad
    zeros = torch.zeros(count, width, dtype=dtype)
    mask = torch.zeros(count, width, dtype=torch.bool)
    attention = torch.zeros(count, width, dtype=torch.int64)
    turn_ids, state_ids = torch.full((count, width), -1), torch.full((count, width), -1)
    rewards = zeros.clone()
    for b, row in enumerate(rows):
        at = 0
        for k, (length, reward) in enumerate(row):
            span = slice(at + gap, at + gap + length)
            mask[b, span] = True
            turn_ids[b, span] = k + (0 if first_turns is None else first_turns[b])
            state_ids[b, span] = 100 * b + k if states is None else states[b][k]
            rewards[b, span.stop - 1] = reward
            at = span.stop
        attention[b, :at] = 1
    draw = torch.Generator().manual_seed(seed)

    def random() -> Tensor:
        """One number per token that does not depend on the padding: drawn row by row."""
        drawn = zeros.clone()
        for b in range(count):
            tokens = int(mask[b].sum())
            drawn[b, mask[b]] = torch.randn(tokens, generator=draw, dtype=torch.float64).to(dtype)
        return drawn

    return Batch(
        input_ids=torch.ones(count, width, dtype=torch.int64),
        attention_mask=attention,
        response_mask=mask,
        loss_mask=mask.clone(),
        turn_ids=turn_ids,
        rewards=rewards,
        logprobs=torch.where(mask, -random().abs() - 0.1, 0.0),
        state_ids=state_ids,
        episode_ids=torch.tensor(episodes if episodes is not None else list(range(count))),
        group_ids=torch.tensor(groups if groups is not None else [0] * count),
        truncated=torch.tensor(truncated if truncated is not None else [False] * count),
        values=random(),
        bootstrap=torch.zeros(count, dtype=dtype),
    ).validate()


def pad_right(batch: Batch, width: int) -> Batch:
    """The batch with `width` more pads, NaN in every float that stands on one."""

    def widen(tensor: Tensor) -> Tensor:
        if tensor.dim() == 1:
            return tensor
        fill = (
            torch.nan if tensor.is_floating_point() else (-1 if tensor.dtype == torch.int64 else 0)
        )
        return torch.cat([tensor, tensor.new_full((tensor.shape[0], width), fill)], dim=1)

    wide = {name: widen(tensor) for name, tensor in batch.tensors().items()}
    wide["attention_mask"] = wide["attention_mask"].clamp(min=0)
    wide["input_ids"] = wide["input_ids"].clamp(min=0)
    return Batch(**wide)
