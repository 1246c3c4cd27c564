# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
"""Batch <-> verl's DataProto (padded) and TensorDict (jagged), without loss.

A row of ours is one stretch of ids; verl cuts it before the first sampled token into a prompt and a
response, and keeps per-token tensors for the response alone. Entries for prompt tokens are stored
as `prompt_NAME`.

    ours        1   2   7   8   3   9            ids
                .   .   x   x   .   x            response_mask
    verl      [ 1   2 ][ 7   8   3   9 ]         prompts, responses
                       [ 1   1   0   1 ]         response_mask
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from turnwise.data.batch import Batch

if TYPE_CHECKING:
    from tensordict import TensorDict
    from verl import DataProto

PER_TOKEN = {
    "response_mask": "response_mask",
    "loss_mask": "loss_mask",
    "turn_ids": "turn_ids",
    "state_ids": "state_ids",
    "rewards": "rm_scores",
    "logprobs": "rollout_log_probs",
    "values": "values",
    "ref_logprobs": "ref_log_prob",
    "advantages": "advantages",
    "returns": "returns",
    "old_logprobs": "old_log_probs",
    "entropies": "entropy",
    "reward_errors": "reward_errors",
    "weights": "token_weights",
}
"""Our names of [B, T] tensors, and verl's."""
PER_ROW = ("episode_ids", "group_ids", "truncated", "bootstrap")
_MASKS = ("response_mask", "loss_mask")  # bool here, int64 there
_FILL = {"turn_ids": -1, "state_ids": -1}

Rows = dict[str, list[Tensor]]


def batch_to_tensordict(batch: Batch) -> "TensorDict":
    """The batch as verl's V1 trainer keeps it: every row at its own length.

    Tensors of tokens are jagged; `input_ids`, `position_ids`, `prompts` and `responses` are there
    for verl's workers.
    """
    from tensordict import TensorDict

    found: dict[str, Tensor] = {name: _jagged(rows) for name, rows in _to_rows(batch).items()}
    found |= _vectors(batch)
    return TensorDict(found, batch_size=[batch.num_rows])


def batch_from_tensordict(data: Any, *, pad_id: int = 0) -> Batch:
    """The batch that `batch_to_tensordict` wrote, or one that verl completed, on its longest row's
    width."""
    names = [
        *PER_TOKEN.values(),
        *(f"prompt_{name}" for name in PER_TOKEN.values()),
        "prompts",
        "responses",
    ]
    rows = {name: list(data[name].unbind()) for name in names if name in data}
    vectors = {name: data[name] for name in PER_ROW if name in data}
    return _from_rows(rows, vectors, pad_id=pad_id)


def batch_to_dataproto(batch: Batch, *, pad_id: int = 0) -> "DataProto":
    """The batch as verl's DataProto: prompts padded on the left, responses on the right.

    Example: a worker that takes DataProto reads `prompts`, `responses`, `input_ids`,
    `attention_mask`, `position_ids`, `response_mask`, `rollout_log_probs` and `rm_scores`, all of
    them set here.
    """
    from verl import DataProto

    rows = _to_rows(batch)
    left = max(len(row) for row in rows["prompts"])
    right = max(1, *(len(row) for row in rows["responses"]))
    found: dict[str, Tensor] = {}
    for name, parts in rows.items():
        if name in ("input_ids", "position_ids"):
            continue
        own = name.removeprefix("prompt_")
        fill = pad_id if name in ("prompts", "responses") else _FILL.get(own, 0)
        at_left = name == "prompts" or name.startswith("prompt_")
        found[name] = _padded(parts, left if at_left else right, fill, at_left=at_left)
    marks = [_padded([torch.ones_like(row) for row in rows["prompts"]], left, 0, at_left=True)]
    marks.append(
        _padded([torch.ones_like(row) for row in rows["responses"]], right, 0, at_left=False)
    )
    found["attention_mask"] = torch.cat(marks, dim=1)
    found["position_ids"] = (found["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    found["input_ids"] = torch.cat([found["prompts"], found["responses"]], dim=1)
    return DataProto.from_dict(tensors=found | _vectors(batch))


def batch_from_dataproto(data: "DataProto", *, pad_id: int = 0) -> Batch:
    """The batch that `batch_to_dataproto` wrote, or one that verl completed."""
    tensors = data.batch
    left = tensors["prompts"].shape[1]
    real = tensors["attention_mask"].bool()
    rows: Rows = {}
    for name in (*PER_TOKEN.values(), "responses"):
        if name in tensors:
            rows[name] = [
                row[keep] for row, keep in zip(tensors[name], real[:, left:], strict=True)
            ]
        if f"prompt_{name}" in tensors:
            prompt = tensors[f"prompt_{name}"]
            rows[f"prompt_{name}"] = [
                row[keep] for row, keep in zip(prompt, real[:, :left], strict=True)
            ]
    rows["prompts"] = [
        row[keep] for row, keep in zip(tensors["prompts"], real[:, :left], strict=True)
    ]
    vectors = {name: tensors[name] for name in PER_ROW if name in tensors}
    return _from_rows(rows, vectors, pad_id=pad_id)


def _to_rows(batch: Batch) -> Rows:
    """verl's tensors of each row, unpadded."""
    lengths = batch.lengths.tolist()
    has = batch.response_mask.any(-1)
    first = torch.where(has, batch.response_mask.int().argmax(-1), batch.lengths).tolist()
    rows: Rows = {"prompts": [], "responses": [], "input_ids": [], "position_ids": []}
    for ids, start, length in zip(batch.input_ids, first, lengths, strict=True):
        rows["prompts"].append(ids[:start])
        rows["responses"].append(ids[start:length])
        rows["input_ids"].append(ids[:length])
        rows["position_ids"].append(torch.arange(length))
    for own, name in PER_TOKEN.items():
        tensor = batch.tensors().get(own)
        if tensor is None:
            continue
        tensor = tensor.long() if own in _MASKS else tensor
        parts = list(zip(tensor, first, lengths, strict=True))
        rows[name] = [row[start:length] for row, start, length in parts]
        prompts = [row[:start] for row, start, _ in parts]
        if any((row != _FILL.get(own, 0)).any() for row in prompts):
            rows[f"prompt_{name}"] = prompts
    return rows


def _from_rows(rows: Rows, vectors: dict[str, Tensor], *, pad_id: int) -> Batch:
    prompts, responses = rows["prompts"], rows["responses"]
    lengths = [
        len(prompt) + len(response) for prompt, response in zip(prompts, responses, strict=True)
    ]
    width = max(1, *lengths)
    tensors: dict[str, Tensor] = {
        "input_ids": _padded(
            [torch.cat(pair) for pair in zip(prompts, responses, strict=True)], width, pad_id
        ),
        "attention_mask": _padded(
            [torch.ones(length, dtype=torch.int64) for length in lengths], width, 0
        ),
    }
    for own, name in PER_TOKEN.items():
        if name not in rows:
            continue
        fill = _FILL.get(own, 0)
        heads = rows.get(f"prompt_{name}")
        if heads is None:
            heads = [
                row.new_full((len(prompt),), fill)
                for row, prompt in zip(rows[name], prompts, strict=True)
            ]
        joined = [torch.cat(pair) for pair in zip(heads, rows[name], strict=True)]
        tensor = _padded(joined, width, fill)
        tensors[own] = tensor.bool() if own in _MASKS else tensor
    for name, vector in vectors.items():
        tensors[name] = vector.bool() if name == "truncated" else vector
    return Batch(**tensors)


def _vectors(batch: Batch) -> dict[str, Tensor]:
    tensors = batch.tensors()
    return {name: tensors[name] for name in PER_ROW if name in tensors}


def _padded(rows: list[Tensor], width: int, fill: float, *, at_left: bool = False) -> Tensor:
    out = rows[0].new_full((len(rows), width), fill)
    for index, row in enumerate(rows):
        place = slice(width - len(row), width) if at_left else slice(len(row))
        out[index, place] = row
    return out


def _jagged(rows: list[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)
