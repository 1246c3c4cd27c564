"""Rows of a list of episodes, read from the stored lines without building whole episodes."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

from turnwise.inspect.folder import (
    Line,
    RunFolder,
    Skips,
    lines,
    said_torn,
    step_name,
    take,
)
from turnwise.types import Json, Status

FIRST_CHARS = 160
"""Characters of the first reply in a list."""
MAX_TEXT = 200_000
"""Characters of one episode that can be searched."""


class EpisodeRow(NamedTuple):
    """One episode in a list."""

    row: int
    """The line of its file, counted from 0."""
    start: int
    """Where that line starts, in bytes."""
    id: str
    group: int
    member: int
    """Which of its group."""
    env: str
    task: str
    status: str
    error: str | None
    success: bool | None
    reward: float | None
    turns: int
    tokens: int
    contexts: int
    first: str

    def to_json(self, split: str, step: int) -> dict[str, Json]:
        return shown_row({"split": split, "step": step, **self._asdict()})


def shown_row(row: Mapping[str, Json]) -> dict[str, Json]:
    """The row as the page takes it."""
    names = {"member": "index"}
    hidden = ("start", "key")
    data = {names.get(name, name): value for name, value in row.items() if name not in hidden}
    return data | {"success": None if row["success"] is None else bool(row["success"])}


def read_rows(
    folder: RunFolder, split: str, step: int, skips: Skips
) -> Iterator[tuple[EpisodeRow, str]]:
    """(the row, its text to be searched) of every episode of a file.

    Raises:
        OSError: the file is not there, or cannot be read.
    """
    name = step_name("episodes", split, step)
    with folder.open(name) as file:
        for line in lines(file, torn=said_torn(name, skips)):
            found = take(line, lambda data, at=line: episode_row(data, at), skips, name=name)
            if found is not None:
                yield found


def episode_row(data: Mapping[str, Json], line: Line) -> tuple[EpisodeRow, str]:
    """The row of a stored episode, and its text.

    Raises:
        ValueError, TypeError, LookupError: it is no episode.
    """
    turns = _objects(data["turns"])
    task = _object(data["task"])
    success = next(
        (bool(info["success"]) for turn in reversed(turns) if "success" in (info := turn["info"])),
        None,
    )
    error = data["error"]
    row = EpisodeRow(
        row=line.number,
        start=line.start,
        id=clean(data["id"]),
        group=_whole(data["group_id"]),
        member=_whole(data["index"]),
        env=clean(data["tag"]),
        task=clean(task["id"]),
        status=Status(data["status"]).value,
        error=None if error is None else clean(error),
        success=success,
        reward=number(sum(float(turn["reward"]) for turn in turns)),
        turns=len(turns),
        tokens=sum(len(turn["completion"]["ids"]) for turn in turns),
        contexts=_contexts(turns),
        first=clean(turns[0]["text"])[:FIRST_CHARS] if turns else "",
    )
    return row, "\n".join(_texts(data, turns, row))[:MAX_TEXT].casefold()


def clean(text: Any) -> str:
    """The text without halves of characters, which neither UTF-8 nor a database can hold.

    Example:
        >>> clean("a\\ud83c")
        'a?'
    """
    if not isinstance(text, str):
        raise ValueError(f"a text is wanted, got {text!r:.40}")
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode("utf-8")
    return text


def number(value: Any) -> float | None:
    """The value as a finite float, None where it is none.

    Example:
        >>> number(3), number(float("inf")), number(10**400), number("3")
        (3.0, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def _texts(
    data: Mapping[str, Json], turns: Sequence[Mapping[str, Json]], row: EpisodeRow
) -> Iterator[str]:
    yield row.task
    yield row.error or ""
    yield from _contents(_objects(data["prompt"]))
    for turn in turns:
        text, action = clean(turn["text"]), turn["action"]
        yield text
        if isinstance(action, str) and action not in text:
            yield clean(action)
        yield from _contents(_objects(turn["messages"]))


def _contents(messages: Iterable[Mapping[str, Json]]) -> Iterator[str]:
    for message in messages:
        content = message.get("content")
        # The system message is the same in all episodes: a search would find all or none.
        if message["role"] != "system" and isinstance(content, str):
            yield clean(content)


def _contexts(turns: Sequence[Mapping[str, Json]]) -> int:
    """How many unbroken contexts the turns have; see `turnwise.data.samples.contexts`."""
    tips: set[int] = set()
    count = 0
    for index, turn in enumerate(turns):
        parent = turn.get("parent")
        parent = index - 1 if parent is None else parent
        if index == 0 or turn["restart"] or parent not in tips:
            count += 1
        else:
            tips.discard(parent)
        tips.add(index)
    return count


def _objects(value: Any) -> list[dict[str, Json]]:
    if not isinstance(value, list):
        raise ValueError(f"a list is wanted, got {value!r:.40}")
    return [_object(one) for one in cast(list[Any], value)]


def _object(value: Any) -> dict[str, Json]:
    if not isinstance(value, dict):
        raise ValueError(f"a JSON object is wanted, got {value!r:.40}")
    return cast(dict[str, Json], value)


def _whole(value: Any) -> int:
    if type(value) is not int or abs(value) >= 2**62:
        raise ValueError(f"a whole number is wanted, got {value!r:.40}")
    return value
