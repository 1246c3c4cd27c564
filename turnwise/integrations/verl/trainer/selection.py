"""Selection of a step's rows, the step's metrics, and rewards of user functions."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from turnwise.config.schema import RolloutConfig
from turnwise.data.batch import Batch
from turnwise.data.penalties import Sums, only_penalties
from turnwise.log.metrics import judged

Info = Mapping[str, Any]
"""The agent loop's record of a row: episode, group, member, row, status, turns, reward, success,
attempts; `sums` of its rewards, and `bare`, the row's rewards without penalties if it has any."""


def broken_groups(members: Sequence[Info], config: RolloutConfig) -> set[int]:
    """Groups that lost too many members to be trained on, by rollout.on_failure and
    rollout.min_group_size.

    Example: three of three members are left of group 0, one of group 1
        >>> members = [{"group": 0}, {"group": 0}, {"group": 0}, {"group": 1}]
        >>> broken_groups(members, RolloutConfig(train={"group_size": 3}))
        {1}
    """
    size = config.train.group_size
    smallest = size if config.on_failure == "drop_group" else min(config.min_group_size, size)
    left = Counter(info["group"] for info in members)
    return {group for group, count in left.items() if count < smallest}


def groups_per_mini_batch(rows: int, *, group_size: int, mini_batches: int, ranks: int) -> int:
    """The size of a mini-batch in groups, such that a pass has at most `mini_batches` and every
    rank the same rows.

    Example: 16 rows in groups of 4 on 2 ranks, then 6 rows
        >>> [groups_per_mini_batch(rows, group_size=4, mini_batches=2, ranks=2) for rows in (16, 6)]
        [2, 1]
        >>> groups_per_mini_batch(6, group_size=1, mini_batches=1, ranks=4)
        8
    """
    unit = math.lcm(group_size, ranks) // group_size
    needed = math.ceil(rows / (group_size * mini_batches))
    return math.ceil(needed / unit) * unit


def step_metrics(
    infos: Sequence[Info], failures: Sequence[Info], *, refilled: int
) -> dict[str, float]:
    """Metrics of a step's episodes, under the names of a native run.

    Args:
        infos: one per row; rows 0 stand for their episodes.
        failures: the episodes that failed for good, each with its status.
        refilled: groups that were played again because no member was left.
    """
    members = [info for info in infos if info["row"] == 0]
    statuses = Counter(failure["status"] for failure in failures)
    wins = judged([(info["tag"], info["success"]) for info in members])
    known = [float(success) for success in wins if success is not None]
    metrics = {
        "rollout/episodes": float(len(members)),
        "rollout/failures": float(sum(statuses.values())),
        "rollout/retries": float(sum(one.get("attempts", 1) - 1 for one in (*members, *failures))),
        "rollout/refilled_groups": float(refilled),
        "rollout/reward": sum(info["reward"] for info in members) / len(members),
        "rollout/turns": sum(info["turns"] for info in members) / len(members),
        "rollout/contexts": len(infos) / len(members),
    }
    metrics |= {f"rollout/failures/{status}": float(count) for status, count in statuses.items()}
    if known:
        metrics["rollout/success"] = sum(known) / len(known)
    return metrics


def bare_rewards(batch: Batch, infos: Sequence[Info]) -> tuple[Tensor, int]:
    """(rewards [B, T] without the penalties of groups that differ in nothing else, how many such
    groups there are)."""
    groups: defaultdict[int, list[Sums]] = defaultdict(list)
    for info in infos:
        if info["row"] == 0:
            groups[info["group"]].append(Sums(*info["sums"]))
    found = {group for group, members in groups.items() if only_penalties(members)}
    rewards = batch.rewards.clone()
    for row, info in enumerate(infos):
        if info["group"] in found and info["bare"] is not None:
            start = int(batch.response_mask[row].int().argmax())
            bare = torch.tensor(info["bare"], dtype=rewards.dtype)
            rewards[row, start : start + len(bare)] = bare
    return rewards, len(found)


def rewards_on_tokens(batch: Batch, rewards: Tensor) -> Tensor:
    """Rewards per row ([B]: on each row's last sampled token) or per response token ([B, R]), as
    [B, T].

    Raises:
        ValueError: the shape is neither.
    """
    mask = batch.response_mask
    tokens = torch.zeros_like(batch.rewards)
    if rewards.shape == mask.shape[:1]:
        last = mask.shape[1] - 1 - mask.int().flip(-1).argmax(-1)
        tokens[torch.arange(len(last)), last] = rewards.to(tokens.dtype)
        return tokens
    if rewards.dim() != 2 or rewards.shape[0] != mask.shape[0]:
        raise ValueError(
            f"reward_fn returns one reward per row, [{mask.shape[0]}], or one per response token, "
            "got the shape "
            f"{tuple(rewards.shape)}"
        )
    for row, (sampled, given) in enumerate(zip(mask, rewards, strict=True)):
        start = int(sampled.int().argmax())
        width = min(int(batch.lengths[row]) - start, len(given))
        tokens[row, start : start + width] = given[:width].to(tokens.dtype)
    return torch.where(mask, tokens, 0.0)
