"""Groups whose episodes differ by nothing but penalties, and their rewards without them."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from turnwise.types import Episode, Turn

PENALTY = "format"
"""The part of a reward that a reply without a legal action costs (env.format.format_penalty)."""
CLIP = "clip"
"""The part that a clip took away. Where all other parts are equal, the penalty alone caused it."""
Group = tuple[int, str]
"""A group's id and the role that is compared in it."""


class Sums(NamedTuple):
    """What the turns of one episode came to."""

    penalty: float
    rest: float
    success: bool | None


def penalty_only_groups(episodes: Sequence[Episode]) -> set[Group]:
    """The groups in which nothing but penalties tells one episode from another.

    Such a group says which failure was better written. A policy that follows it learns one safe
    reply, and stops trying. All of this holds for it:
        - it has two episodes or more, and their penalties differ;
        - no episode succeeded;
        - without penalties all returns are equal, and not above 0.

    Example:
        >>> from turnwise.types import Completion, Status, Task
        >>> def episode(index, **parts):
        ...     said = Completion(ids=(7,), logprobs=(-1.0,), finish_reason="stop")
        ...     turn = Turn(prompt_ids=(1,), completion=said, text="up", restart=True,
        ...                 reward=sum(parts.values()), reward_parts=parts)
        ...     return Episode(id=f"m{index}", task=Task(id="t", seed=1), group_id=3, index=index,
        ...                    tag="lake", seed=9, noise_seed=8, prompt=(), turns=(turn,),
        ...                    status=Status.COMPLETED)
        >>> penalty_only_groups([episode(0, env=0.0), episode(1, env=0.0, format=-0.1)])
        {(3, '')}
        >>> penalty_only_groups([episode(0, env=1.0), episode(1, env=0.0, format=-0.1)])
        set()
    """
    groups: defaultdict[Group, list[Sums]] = defaultdict(list)
    for episode in episodes:
        for role in dict.fromkeys(turn.role for turn in episode.turns):
            groups[episode.group_id, role].append(reward_sums(episode, role))
    return {group for group, members in groups.items() if only_penalties(members)}


def without_penalties(episode: Episode, groups: set[Group]) -> Episode:
    """The episode with the penalties of these groups taken from its rewards."""
    if not any((episode.group_id, turn.role) in groups for turn in episode.turns):
        return episode
    turns = tuple(
        replace(turn, reward=_rest(turn)) if (episode.group_id, turn.role) in groups else turn
        for turn in episode.turns
    )
    return replace(episode, turns=turns)


def reward_sums(episode: Episode, role: str) -> Sums:
    """What the turns of this role came to."""
    turns = [turn for turn in episode.turns if turn.role == role]
    penalty, rest = math.fsum(map(_penalty, turns)), math.fsum(map(_rest, turns))
    return Sums(penalty, rest, episode.success)


def only_penalties(members: Sequence[Sums]) -> bool:
    """True if nothing but penalties tells these members of a group apart."""
    if len(members) < 2 or any(one.success for one in members):
        return False
    rests = [one.rest for one in members]
    return _differ([one.penalty for one in members]) and not _differ(rests) and max(rests) <= 1e-9


def _penalty(turn: Turn) -> float:
    """Below 0; a reward for the right format is a reward like any other."""
    return min(turn.reward_parts.get(PENALTY, 0.0), 0.0)


def _rest(turn: Turn) -> float:
    if not turn.reward_parts:
        return turn.reward
    left_out = {CLIP} | ({PENALTY} if turn.reward_parts.get(PENALTY, 0.0) < 0 else set[str]())
    return math.fsum(value for name, value in turn.reward_parts.items() if name not in left_out)


def _differ(values: Sequence[float]) -> bool:
    return max(values) - min(values) > 1e-9
