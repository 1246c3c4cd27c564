# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
"""Converts rows of verl's TransferQueue to Batch and back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import transfer_queue as tq
from tensordict import TensorDict
from torch import Tensor

from turnwise.data.batch import Batch
from turnwise.integrations.verl.rollout.agent_loop import FAILURES, SAMPLED
from turnwise.integrations.verl.rollout.convert import (
    PER_TOKEN,
    batch_from_tensordict,
    batch_to_tensordict,
)
from turnwise.types import Episode

_ALWAYS = (
    "prompts",
    "responses",
    "response_mask",
    SAMPLED,
    "rm_scores",
    "rollout_log_probs",
    "turn_ids",
    "state_ids",
)


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The real rows of a queue's batch (verl's padding left out), ordered by group, member and
    context."""

    batch: Batch
    infos: list[dict[str, Any]]
    """The agent loop's info about each row's episode."""
    places: list[int]
    """The place of each row in verl's batch."""
    keys: list[str]
    """The name of each row in the queue."""

    @property
    def episodes(self) -> list[Episode]:
        """The rows' episodes, where the agent loop sent them along; else empty."""
        lines = [info["line"] for info in self.infos if info["row"] == 0]
        return [Episode.from_line(line) for line in lines] if lines and all(lines) else []

    @property
    def members(self) -> list[dict[str, Any]]:
        """One info per episode."""
        return [info for info in self.infos if info["row"] == 0]

    def placed_in(self, meta: Any) -> "Rows":
        """Those of the rows that verl's batch still has, at their present places in it."""
        there = {key: place for place, key in enumerate(meta.keys)}
        kept = [number for number, key in enumerate(self.keys) if key in there]
        same = len(kept) == len(self.keys)
        return Rows(
            batch=self.batch if same else self.batch.select(torch.tensor(kept, dtype=torch.int64)),
            infos=[self.infos[number] for number in kept],
            places=[there[self.keys[number]] for number in kept],
            keys=[self.keys[number] for number in kept],
        )

    def with_fields(self, meta: Any, fields: Sequence[str]) -> "Rows":
        """The same rows with these fields of the queue (verl's names), where they are set."""
        data = tq.kv_batch_get(
            keys=self.keys, partition_id=meta.partition_id, select_fields=list(fields)
        )
        starts = self.batch.response_mask.int().argmax(-1).tolist()
        found: dict[str, Tensor] = {}
        for own, name in PER_TOKEN.items():
            if name not in fields or name not in data:
                continue
            found[own] = torch.zeros_like(self.batch.rewards)
            for row, (start, values) in enumerate(zip(starts, data[name].unbind(0), strict=True)):
                found[own][row, start : start + len(values)] = values.float()
        if "bootstrap" in data:
            found["bootstrap"] = data["bootstrap"].reshape(-1)
        return replace(self, batch=self.batch.replace(**found))


def read_rows(meta: Any) -> Rows:
    """The rows of verl's batch as a Batch."""
    names = [*_ALWAYS, "extra_fields"]
    data = tq.kv_batch_get(keys=meta.keys, partition_id=meta.partition_id, select_fields=names)
    infos = [_plain(extra)["turnwise"] for extra in data.pop("extra_fields").tolist()]
    real = [place for place, tag in enumerate(meta.tags) if not tag.get("is_padding", False)]
    if not real:
        raise ValueError("verl's batch holds nothing but padding: no episode could be used")
    uids = [key.rsplit("_", 2)[:2] for key in meta.keys]
    real.sort(key=lambda place: (infos[place]["group"], uids[place], infos[place]["row"]))
    roles = [str(info["role"]) for info in infos]  # each is compared with the same role
    groups: dict[tuple[str, str], int] = {}
    episodes: dict[tuple[str, str, str], int] = {}
    for place in real:
        uid, member = uids[place]
        groups.setdefault((uid, roles[place]), len(groups))
        episodes.setdefault((uid, member, roles[place]), len(episodes))
    chosen: dict[str, Any] = {}
    for name in _ALWAYS:
        rows = list(data[name].unbind(0))
        chosen[name] = torch.nested.as_nested_tensor(
            [rows[place] for place in real], layout=torch.jagged
        )
    chosen["loss_mask"], chosen["response_mask"] = chosen["response_mask"], chosen.pop(SAMPLED)
    chosen["episode_ids"] = torch.tensor(
        [episodes[uids[place][0], uids[place][1], roles[place]] for place in real]
    )
    chosen["group_ids"] = torch.tensor([groups[uids[place][0], roles[place]] for place in real])
    chosen["truncated"] = torch.tensor([infos[place]["truncated"] for place in real])
    return Rows(
        batch=batch_from_tensordict(chosen),
        infos=[infos[place] for place in real],
        places=real,
        keys=[meta.keys[place] for place in real],
    )


def write_tokens(
    meta: Any,
    rows: Rows,
    tensors: Mapping[str, Tensor],
    *,
    names: Mapping[str, str] = PER_TOKEN,
    padding: float = 0.0,
) -> Any:
    """Puts [B, T] tensors of the rows, by our names in Batch, into the queue under verl's; padding
    rows are filled."""
    cut = batch_to_tensordict(rows.batch.replace(**tensors))
    fields: dict[str, Tensor] = {}
    for own in tensors:
        found = [torch.full((tag["response_len"],), padding) for tag in meta.tags]
        for place, row in zip(rows.places, cut[PER_TOKEN[own]].unbind(0), strict=True):
            found[place] = row.float()
        fields[names[own]] = torch.nested.as_nested_tensor(found, layout=torch.jagged)
    return tq.kv_batch_put(
        keys=meta.keys,
        partition_id=meta.partition_id,
        fields=TensorDict(fields, batch_size=[len(meta.keys)]),
    )


def drop_places(meta: Any, places: set[int]) -> Any:
    """verl's batch without the rows at these places, which leave the queue too."""
    from transfer_queue import KVBatchMeta

    gone = [meta.keys[place] for place in sorted(places)]
    if not gone:
        return meta
    tq.kv_clear(keys=gone, partition_id=meta.partition_id)
    kept = [place for place in range(len(meta.keys)) if place not in places]
    return KVBatchMeta(
        partition_id=meta.partition_id,
        keys=[meta.keys[place] for place in kept],
        tags=[meta.tags[place] for place in kept],
        extra_info=meta.extra_info,
    )


def drop_groups(uids: Sequence[str]) -> None:
    """Takes training groups out of the queue, with the rows of those members that are over."""
    gone = set(uids)
    there = (tq.kv_list("train") or {}).get("train", {})
    keys = [key for key in there if key.partition("_")[0] in gone]
    if keys:
        tq.kv_clear(keys=keys, partition_id="train")


def queue_actors(config: Any) -> dict[str, Any]:
    """The actors of the TransferQueue, by what a user may call them."""
    import ray

    found = {
        "controller of the TransferQueue": ray.get_actor(
            "TransferQueueController", namespace="transfer_queue"
        )
    }
    if config.backend.storage_backend == "SimpleStorage":
        for number in range(config.backend.SimpleStorage.num_data_storage_units):
            found[f"storage {number} of the TransferQueue"] = ray.get_actor(
                f"TransferQueueStorageUnit#{number}"
            )
    return found


def take_failures() -> list[dict[str, Any]]:
    """The failed episodes that were noted since the last call, each as status, error, split, key
    and, where it was played, attempts."""
    noted = (tq.kv_list(FAILURES) or {}).get(FAILURES, {})
    if noted:
        tq.kv_clear(keys=list(noted), partition_id=FAILURES)
    return [{**tag, "key": key} for key, tag in noted.items()]


def _plain(extra: Any) -> dict[str, Any]:
    return getattr(extra, "data", extra)  # a tensordict may hand out its wrapper
