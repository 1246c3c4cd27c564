"""Episodes as a table: plain rows and columns that pandas, polars or a CSV writer take as they
are."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from turnwise.types import Episode, Json

Row = dict[str, Json]


def rows(episodes: Iterable[Episode], *, per: Literal["episode", "turn"] = "episode") -> list[Row]:
    """A dict per episode, or per turn, all with the same keys. `pandas.DataFrame(rows(...))` is a
    data frame.

    A part of the reward is a column of its own, such as reward/format; None where it did not occur.

    Example:
        >>> from turnwise.types import Completion, Status, Task, Turn
        >>> done = Completion(ids=(7, 2), logprobs=(-1.0, -0.5), finish_reason="stop")
        >>> turn = Turn(prompt_ids=(1, 4), completion=done, text="up", reward=1.0, restart=True,
        ...             info={"success": True})
        >>> episode = Episode(id="a", task=Task(id="t", seed=1), group_id=0, index=0, tag="lake",
        ...                   seed=9, noise_seed=8, prompt=(), turns=(turn,),
        ...                   status=Status.COMPLETED)
        >>> row, = rows([episode])
        >>> row["success"], row["reward"], row["tokens"], row["turns"]
        (True, 1.0, 2, 1)
        >>> rows([episode], per="turn")[0]["text"]
        'up'
    """
    if per == "episode":
        found = [_episode_row(episode) for episode in episodes]
    elif per == "turn":
        found = [row for episode in episodes for row in _turn_rows(episode)]
    else:
        raise ValueError(f"per is 'episode' or 'turn', got {per!r}")
    keys = list(dict.fromkeys(key for row in found for key in row))
    return [{key: row.get(key) for key in keys} for row in found]


def columns(table: Sequence[Row]) -> dict[str, list[Json]]:
    """The table by column.

    Example:
        >>> columns([{"reward": 1.0, "turns": 2}, {"reward": 0.0, "turns": 3}])
        {'reward': [1.0, 0.0], 'turns': [2, 3]}
    """
    keys = dict.fromkeys(key for row in table for key in row)
    return {key: [row.get(key) for row in table] for key in keys}


def _episode_row(episode: Episode) -> Row:
    return {
        **_identity(episode),
        "status": episode.status.value,
        "success": episode.success,
        "reward": episode.reward,
        **_parts(episode.reward_parts),
        "turns": len(episode.turns),
        "tokens": sum(len(turn.completion.ids) for turn in episode.turns),
        "prompt_tokens": sum(len(turn.prompt_ids) for turn in episode.turns),
        "logprob": sum(turn.completion.logprob for turn in episode.turns),
        "seconds": sum(turn.generate_seconds + turn.env_seconds for turn in episode.turns),
        "error": episode.error,
    }


def _turn_rows(episode: Episode) -> list[Row]:
    return [
        {
            **_identity(episode),
            "turn": index,
            "text": turn.text,
            "action": turn.action,
            "reward": turn.reward,
            **_parts(turn.reward_parts),
            "observation": "\n".join(message.content for message in turn.messages),
            "tokens": len(turn.completion.ids),
            "prompt_tokens": len(turn.prompt_ids),
            "logprob": turn.completion.logprob,
            "finish_reason": turn.completion.finish_reason,
            "policy_version": turn.completion.policy_version,
            "state": turn.state_key,
        }
        for index, turn in enumerate(episode.turns)
    ]


def _identity(episode: Episode) -> Row:
    return {
        "episode": episode.id,
        "task": episode.task.id,
        "split": episode.task.split,
        "seed": episode.task.seed,
        "env": episode.tag,
        "group": episode.group_id,
        "member": episode.index,
    }


def _parts(parts: Mapping[str, float]) -> Row:
    return {f"reward/{name}": value for name, value in parts.items()}
