"""Episodes with several agents: each agent's replies are credited with its own reward.

An environment of verifiers may have several agents play an episode (two players, a proposer and its
solvers, several attempts). Every change of agent begins a context, so a row holds replies of one
agent alone. Its advantage compares that agent's reward with those of the agents that had the same
seat in the group's other episodes, as GRPO compares episodes.
"""

import math
from collections import defaultdict
from collections.abc import Sequence

from turnwise.integrations.trl.credit import TRL_EPS, TrainRow
from turnwise.types import Episode

Key = tuple[int, str]
"""A group and a seat."""


def has_seats(episodes: Sequence[Episode]) -> bool:
    """True where an episode had several agents."""
    return any(episode.turns and "seats" in episode.turns[-1].info for episode in episodes)


def seat_advantages(
    rows: Sequence[TrainRow], episodes: Sequence[Episode], *, scale: str
) -> list[float]:
    """The advantage of each row, from the rewards of all episodes' agents.

    An agent that is not trained has 0, and so has one that nothing can be compared with. Agents
    that never spoke are in no baseline.
    """
    rewards: dict[Key, list[float]] = defaultdict(list)
    for episode in episodes:
        for key, reward in _spoken(episode).values():
            rewards[key].append(reward)
    everything = [reward for members in rewards.values() for reward in members]
    found: list[float] = []
    for row in rows:
        mine = None if row.sample is None else _spoken(row.episode).get(_agent(row))
        if mine is None:
            found.append(0.0)
            continue
        key, reward = mine
        spread = everything if scale == "batch" else rewards[key]
        divisor = _std(spread) + TRL_EPS if scale in ("group", "batch") else 1.0
        found.append((reward - sum(rewards[key]) / len(rewards[key])) / divisor)
    return found


def _spoken(episode: Episode) -> dict[int, tuple[Key, float]]:
    """By number of the agent: its seat and its reward, of those that are trained and spoke."""
    if episode.status.failed or not episode.turns:
        return {}
    spoke = {turn.info.get("trace", 0) for turn in episode.turns}
    last = episode.turns[-1].info
    alone = {
        "seat": last.get("seat", ""),
        "trace": last.get("trace", 0),
        "reward": episode.reward,
        "trained": True,
    }
    seats = last.get("seats", [alone])
    return {
        seat["trace"]: ((episode.group_id, seat["seat"]), seat["reward"])
        for seat in seats
        if seat["trained"] and seat["trace"] in spoke
    }


def _agent(row: TrainRow) -> int:
    """The number of the agent whose replies the row holds."""
    assert row.sample is not None
    first = next(turn for turn in row.sample.turn_ids if turn >= 0)
    return row.episode.turns[first].info.get("trace", 0)


def _std(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
