# pyright: reportUnknownLambdaType=false, reportUnknownVariableType=false
"""Episodes with several contexts in TRL's batch: adds rows to the one row per episode that TRL
expects.

A window that moves, or a chat template that rewrites history, gives an episode several contexts.
TRL scores one row per episode; the rows of the other contexts are added afterwards, weighted so
that an episode counts once.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from turnwise.integrations.trl.credit import TrainRow

ROW_MEANS = ("grpo", "sapo", "luspo")
"""Losses that average over rows after averaging over a row's tokens."""


def can_extend(output: dict[str, Any]) -> bool:
    """True if everything that the loss reads of a row is known without another forward pass."""
    return not {"ref_per_token_logps", "importance_sampling_ratio", "pixel_values"} & set(output)


def extend(
    output: dict[str, Any], extra: Sequence[TrainRow], *, pad_id: int, total: int
) -> dict[str, Any]:
    """The batch with a row for each of `extra`, then masked rows up to `total` rows.

    The old log-probs of all rows become the sampler's where the loss reads any.
    """
    rows = output["completion_ids"].shape[0]
    missing = total - rows - len(extra)
    values: dict[str, list[list[float]]] = {
        "prompt_ids": [row.prompt_ids for row in extra] + [[pad_id]] * missing,
        "prompt_mask": [[1] * len(row.prompt_ids) for row in extra] + [[1]] * missing,
        "completion_ids": [row.completion_ids for row in extra] + [[pad_id]] * missing,
        "completion_mask": [[1] * len(row.completion_ids) for row in extra] + [[1]] * missing,
        "tool_mask": [row.mask for row in extra] + [[0]] * missing,
        "sampling_per_token_logps": [row.logprobs for row in extra] + [[0.0]] * missing,
    }
    fills = {"prompt_ids": pad_id, "completion_ids": pad_id, "tool_mask": 1}
    extended = dict(output)
    for name, lists in values.items():
        old = output[name]
        width = max(old.shape[1], *(len(one) for one in lists))
        left = name.startswith("prompt")
        padded = [
            _pad(one, width, fills.get(name, 0), left=left)
            for one in (*old, *map(_like(old), lists))
        ]
        extended[name] = torch.stack(padded)
    if "old_per_token_logps" in output:
        extended["old_per_token_logps"] = extended["sampling_per_token_logps"]
    return extended


def row_weights(
    rows: Sequence[TrainRow], *, total: int, loss_type: str, by_sequence: bool = False
) -> list[float]:
    """Factors for each row's advantages, so that the loss weighs every episode as one row.

    Means over rows: a row's share of its episode's tokens, times rows per episode. Sums over rows
    divided by their number (dr_grpo): rows per episode. Means over tokens need nothing.
    `by_sequence`: every row counts the same.
    """
    episodes = len({row.episode.id for row in rows})
    if loss_type == "dr_grpo":
        return [total / episodes] * len(rows)
    if by_sequence and loss_type in ROW_MEANS:
        return [total / len(rows)] * len(rows)
    if loss_type not in ROW_MEANS:
        return [1.0] * len(rows)
    tokens: dict[str, int] = {}
    for row in rows:
        tokens[row.episode.id] = tokens.get(row.episode.id, 0) + sum(row.mask)
    return [sum(row.mask) / max(tokens[row.episode.id], 1) * total / episodes for row in rows]


def parts(inputs: dict[str, Any], size: int) -> list[dict[str, Any]]:
    """A batch in parts of at most `size` rows."""
    rows = inputs["completion_ids"].shape[0]
    return [
        {
            name: value[start : start + size]
            if isinstance(value, Tensor) and value.ndim and value.shape[0] == rows
            else value
            for name, value in inputs.items()
        }
        for start in range(0, rows, size)
    ]


def part_weight(part: dict[str, Any], whole: dict[str, Any], *, loss_type: str) -> float:
    """The factor of a part's loss, so that the parts' losses add up to that of the whole batch."""
    if loss_type == "bnpo":
        trained = [
            float((batch["completion_mask"] * batch["tool_mask"]).sum()) for batch in (part, whole)
        ]
        return trained[0] / max(trained[1], 1.0)
    if loss_type in (*ROW_MEANS, "dr_grpo"):
        return part["completion_ids"].shape[0] / whole["completion_ids"].shape[0]
    return 1.0  # a sum over tokens, divided by a number that the whole batch has


def _like(tensor: Tensor) -> Any:
    return lambda values: torch.tensor(values, dtype=tensor.dtype, device=tensor.device)


def _pad(row: Tensor, width: int, fill: float, *, left: bool) -> Tensor:
    empty = row.new_full((width - row.shape[0],), fill)
    return torch.cat([empty, row] if left else [row, empty])
