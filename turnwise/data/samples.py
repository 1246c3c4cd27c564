"""Episode -> Sample: masks by construction. A token is trainable because the sampler returned it."""

from collections.abc import Sequence

from turnwise.types import Episode, Sample, Turn


def episode_to_samples(episode: Episode) -> list[Sample]:
    """The episode's samples, one per unbroken context.

    The ids are concatenated as they were seen and sampled; no text is tokenised here, so `ids[response_mask]` is the
    concatenation of the completions by construction, end-of-turn tokens included.

    Raises:
        ValueError: the episode failed (a failure must never be trained on), or has no turns.
    """
    if episode.status.failed:
        raise ValueError(
            f"episode {episode.id} ended as {episode.status.value}: a failure is never trained on; drop it"
        )
    if not episode.turns:
        raise ValueError(f"episode {episode.id} has no turns: nothing to train on")
    samples: list[Sample] = []
    first = 0
    for index in range(1, len(episode.turns) + 1):
        ends = index == len(episode.turns)
        if ends or episode.turns[index].restart:
            samples.append(_one_context(episode, episode.turns[first:index], first, last=ends))
            first = index
    return samples


def _one_context(episode: Episode, turns: Sequence[Turn], first: int, *, last: bool) -> Sample:
    ids: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []
    turn_ids: list[int] = []
    rewards: list[float] = []

    def add(new: Sequence[int], *, turn: int = -1) -> None:
        ids.extend(new)
        mask.extend([turn >= 0] * len(new))
        turn_ids.extend([turn] * len(new))
        rewards.extend([0.0] * len(new))

    for turn_id, turn in enumerate(turns, start=first):
        if not turn.completion.ids:
            raise ValueError(f"episode {episode.id}, turn {turn_id}: a completion is never empty")
        add(turn.prompt_ids)
        logprobs.extend([0.0] * len(turn.prompt_ids))
        add(turn.completion.ids, turn=turn_id)
        logprobs.extend(turn.completion.logprobs)
        rewards[-1] = turn.reward
    truncated = last and episode.status.truncated
    if truncated:
        add(episode.final_ids)
        logprobs.extend([0.0] * len(episode.final_ids))
    return Sample(
        ids=tuple(ids),
        response_mask=tuple(mask),
        loss_mask=tuple(mask),
        logprobs=tuple(logprobs),
        turn_ids=tuple(turn_ids),
        rewards=tuple(rewards),
        state_keys={turn_id: turn.state_key for turn_id, turn in enumerate(turns, start=first)},
        episode_id=episode.id,
        group_id=episode.group_id,
        truncated=truncated,
    )
