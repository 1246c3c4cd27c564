"""Episode -> Sample: masks by construction. A token is trainable because the sampler returned
it."""

from collections.abc import Sequence
from dataclasses import dataclass

from turnwise.types import Episode, Sample, Turn


def require_one_role(episode: Episode, *, backend: str) -> None:
    """Raises ValueError where a backend that compares whole episodes is given one with several
    trained roles, each of which has its own reward."""
    roles = sorted({turn.role for turn in episode.turns if turn.trained})
    if len(roles) > 1:
        raise ValueError(
            f"episode {episode.id} has the trained roles {', '.join(map(repr, roles))}, and "
            f"backend {backend} credits one per episode; train one of them "
            "(env.options.trained_roles), or use backend native"
        )


def episode_to_samples(episode: Episode) -> list[Sample]:
    """The episode's samples, one per unbroken context.

    The ids are concatenated as they were seen and sampled; no text is tokenised here, so
    `ids[response_mask]` is the concatenation of the completions by construction, end-of-turn tokens
    included.

    Raises:
        ValueError: the episode failed (a failure must never be trained on), or has no turns.
    """
    if episode.status.failed:
        raise ValueError(
            f"episode {episode.id} ended as {episode.status.value}: a failure is never trained on; "
            "drop it"
        )
    if not episode.turns:
        raise ValueError(f"episode {episode.id} has no turns: nothing to train on")
    last = {turn.role: index for index, turn in enumerate(episode.turns)}
    return [
        _one_context(episode, context, last=context.turns[-1] in last.values())
        for context in contexts(episode.turns)
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """Turns that continue each other in one unbroken context."""

    turns: tuple[int, ...]
    prefix: tuple[int, ...] = ()
    """Ids before the first of them: those of a turn that another context continues already. They
    are trained there."""


def contexts(turns: Sequence[Turn]) -> list[Context]:
    """The contexts of an episode, in the order of their first turns. Every turn is in one.

    A turn continues the context that ends with its parent. Where that context went on with another
    turn before, the conversation branches: a new context begins with the parent's ids.
    """
    members: list[list[int]] = []
    prefixes: list[tuple[int, ...]] = []
    tips: dict[int, int] = {}  # the last turn of a context -> the context
    for index in range(len(turns)):
        parent = parent_of(turns, index)
        place = None if parent is None else tips.pop(parent, None)
        if place is None:
            place = len(members)
            members.append([])
            prefixes.append(() if parent is None else path_ids(turns, parent))
        members[place].append(index)
        tips[index] = place
    return [
        Context(turns=tuple(found), prefix=prefix)
        for found, prefix in zip(members, prefixes, strict=True)
    ]


def parent_of(turns: Sequence[Turn], index: int) -> int | None:
    """The turn that a turn continues, None where a new context began."""
    turn = turns[index]
    if turn.restart or index == 0:
        return None
    parent = index - 1 if turn.parent is None else turn.parent
    if not 0 <= parent < index:
        raise ValueError(f"turn {index} continues turn {parent}, which is no earlier turn")
    return parent


def path_ids(turns: Sequence[Turn], index: int) -> tuple[int, ...]:
    """All ids that the model had seen and said when a turn was over."""
    path: list[int] = []
    at: int | None = index
    while at is not None:
        path.append(at)
        at = parent_of(turns, at)
    ids: list[int] = []
    for at in reversed(path):
        ids += turns[at].prompt_ids
        ids += turns[at].completion.ids
    return tuple(ids)


def _one_context(episode: Episode, context: Context, *, last: bool) -> Sample:
    ids: list[int] = []
    mask: list[bool] = []
    loss: list[bool] = []
    logprobs: list[float] = []
    turn_ids: list[int] = []
    rewards: list[float] = []

    def add(new: Sequence[int], *, turn: int = -1, trained: bool = False) -> None:
        ids.extend(new)
        mask.extend([turn >= 0] * len(new))
        loss.extend([trained] * len(new))
        turn_ids.extend([turn] * len(new))
        rewards.extend([0.0] * len(new))
        if turn < 0:
            logprobs.extend([0.0] * len(new))

    add(context.prefix)
    for turn_id in context.turns:
        turn = episode.turns[turn_id]
        if not turn.completion.ids:
            raise ValueError(f"episode {episode.id}, turn {turn_id}: a completion is never empty")
        add(turn.prompt_ids)
        add(turn.completion.ids, turn=turn_id, trained=turn.trained)
        logprobs.extend(turn.completion.logprobs)
        rewards[-1] = turn.reward
    truncated = last and episode.status.truncated
    if truncated and context.turns[-1] == len(episode.turns) - 1:
        add(episode.final_ids)
    return Sample(
        ids=tuple(ids),
        response_mask=tuple(mask),
        loss_mask=tuple(loss),
        logprobs=tuple(logprobs),
        turn_ids=tuple(turn_ids),
        rewards=tuple(rewards),
        state_keys={turn_id: episode.turns[turn_id].state_key for turn_id in context.turns},
        episode_id=episode.id,
        group_id=episode.group_id,
        truncated=truncated,
        role=episode.turns[context.turns[0]].role,
    )
