"""One episode with everything that is stored about it: turns, tokens, credit, contexts, times."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from turnwise.data.samples import contexts, parent_of
from turnwise.inspect.boards import find_board, last_board
from turnwise.inspect.episode_rows import number
from turnwise.inspect.folder import (
    InspectError,
    RunFolder,
    Skips,
    lines,
    said_torn,
    step_name,
    take,
    why,
)
from turnwise.json_lines import UNREADABLE, parse_json
from turnwise.log.records import CreditRow, checked
from turnwise.log.store import read_episode
from turnwise.types import Episode, Json, Message, Turn

MAX_TOKENS = 50_000
"""Tokens of one episode that are listed one by one; later turns are shown as text."""
SIGNED, RANGED = ("advantage", "gap"), ("value", "return", "logprob", "entropy")
_CREDIT = {
    "advantage": "advantages",
    "value": "values",
    "return": "returns",
    "gap": "gaps",
    "entropy": "entropies",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """Stored data about one episode, besides the episode itself."""

    credit: tuple[CreditRow, ...] = ()
    generate: tuple[float, ...] = ()
    """Seconds, by turn."""
    env: tuple[float, ...] = ()
    pieces: Mapping[int, str] = field(default_factory=dict[int, str])
    """Token id -> its text."""
    trained: bool = True
    """False for evaluations and failed episodes, which no update sees."""
    credited: bool = False
    """Whether credit of the step is stored: turns without any, such as those of groups that a
    filter dropped, are not trained."""


def read_at(folder: RunFolder, split: str, step: int, row: int, start: int) -> Episode:
    """The episode whose line starts there.

    Raises:
        InspectError: there is none, or it is not an episode.
    """
    name = step_name("episodes", split, step)
    try:
        with folder.open(name) as file:
            file.seek(start)
            line = next(lines(file), None)
    except OSError as error:
        raise InspectError(f"{name} cannot be read: {error.strerror or error}") from None
    if line is None or line.data is None:
        raise InspectError(f"{name} has no episode in line {row + 1} any more")
    try:
        return read_episode(parse_json(line.data.decode("utf-8")))
    except UNREADABLE as error:
        message = f"{name}, line {row + 1} cannot be read: {why(error)}"
        raise InspectError(message, status=422) from None


def read_stored(
    folder: RunFolder,
    split: str,
    step: int,
    episode: Episode,
    pieces: Mapping[int, str],
    skips: Skips,
) -> Stored:
    """Stored data about the episode, from the files of its step."""
    name = step_name("timings", split, step)
    seconds = _rows_of(folder, name, episode.id, lambda data: _seconds(data, episode), skips)
    generate, env = seconds[0] if seconds else ((), ())
    credit: list[CreditRow] = []
    credited = False
    if split == "step":
        credited = any(file[:2] == (split, step) for file in folder.step_files("credit"))
        name = step_name("credit", split, step)
        found = _rows_of(folder, name, episode.id, _credit, skips)
        credit = sorted(found, key=lambda row: row.sample)
    return Stored(
        credit=tuple(credit),
        generate=generate,
        env=env,
        pieces=pieces,
        trained=split == "step" and not episode.status.failed,
        credited=credited,
    )


def read_pieces(folder: RunFolder, skips: Skips) -> dict[int, str]:
    """Token id -> its text, for the ids that the run has stored."""
    found = folder.json(
        "pieces.json", lambda data: {int(key): str(text) for key, text in data.items()}, skips
    )
    return found or {}


def episode_json(
    episode: Episode, stored: Stored, *, siblings: Sequence[Mapping[str, Json]], skips: Skips
) -> dict[str, Json]:
    """The episode as the page shows it."""
    grouped, of_turn = _contexts(episode, skips)
    credit = _credit_by_turn(stored.credit)
    shown: list[dict[str, Json]] = []
    room = MAX_TOKENS
    for at, turn in enumerate(episode.turns):
        trained = turn.trained and stored.trained and (at in credit or not stored.credited)
        tokens = _tokens(turn, credit.get(at, {}), stored.pieces, trained) if room > 0 else []
        room -= len(tokens)
        shown.append(turn_json(turn, at, tokens=tokens, context=of_turn.get(at, 0)))
        shown[-1]["generate_seconds"] = _at(stored.generate, at)
        shown[-1]["env_seconds"] = _at(stored.env, at)
    opening = last_board([message.content for message in episode.prompt])
    _add_boards(episode, shown, opening)
    if room <= 0:
        skips.add(f"only the first {MAX_TOKENS} tokens are listed one by one")
    return {
        "id": episode.id,
        "group": episode.group_id,
        "index": episode.index,
        "env": episode.tag,
        "status": episode.status.value,
        "error": episode.error,
        "reward": number(episode.reward),
        "success": episode.success,
        "task": {
            "id": episode.task.id,
            # As text: a browser's numbers do not hold all 64 bits.
            "seed": str(episode.task.seed),
            "split": episode.task.split,
        },
        "prompt": [message_json(message) for message in episode.prompt],
        "board": opening or (shown[0]["before"] if shown else None),
        "tools": [dict(tool) for tool in episode.tools],
        "contexts": grouped,
        "turns": shown,
        "scales": scales(token for turn in shown for token in turn["tokens"]),
        "siblings": list(siblings),
    }


def turn_json(
    turn: Turn, index: int, *, tokens: Sequence[Mapping[str, Json]], context: int = 0
) -> dict[str, Json]:
    """One turn as the page shows it."""
    return {
        "turn": index,
        "context": context,
        "role": turn.role or None,
        "trained": turn.trained,
        "tokens": list(tokens),
        "text": turn.text,
        "action": turn.action,
        "valid": turn.action is not None,
        "reward": number(turn.reward),
        "reward_parts": dict(turn.reward_parts),
        "messages": [message_json(message) for message in turn.messages],
        "info": dict(turn.info),
        "generate_seconds": turn.generate_seconds,
        "env_seconds": turn.env_seconds,
        "board": last_board([message.content for message in turn.messages]),
    }


def message_json(message: Message) -> dict[str, Json]:
    """One message as the page shows it."""
    return {
        "role": message.role,
        "content": message.content,
        "name": message.name,
        "tool_calls": [
            {"name": call.name, "arguments": call.arguments} for call in message.tool_calls
        ],
    }


def scales(tokens: Iterable[Mapping[str, Json]]) -> dict[str, Json]:
    """The range of each number that some token has.

    Example:
        >>> scales([{"advantage": -2.0, "value": 0.5}, {"advantage": 1.0, "value": None}])
        {'advantage': 2.0, 'value': [0.5, 0.5]}
    """
    known: dict[str, list[float]] = {}
    for token in tokens:
        for name in (*SIGNED, *RANGED):
            if (value := token.get(name)) is not None:
                known.setdefault(name, []).append(value)
    return {
        name: max(map(abs, values)) if name in SIGNED else [min(values), max(values)]
        for name, values in known.items()
    }


def _add_boards(episode: Episode, shown: Sequence[dict[str, Json]], opening: str | None) -> None:
    """Adds the board before every turn: the one after the turn that it continues. Where messages
    draw none, the keys of states do in some environments."""
    for at, turn in enumerate(episode.turns):
        parent = at - 1 if turn.parent is None else turn.parent
        known = 0 <= parent < at
        before = (shown[parent]["board"] if known else opening) or find_board(turn.state_key)
        shown[at]["before"] = before
        if known and shown[parent]["board"] is None:
            shown[parent]["board"] = before


def _contexts(episode: Episode, skips: Skips) -> tuple[list[dict[str, Json]], dict[int, int]]:
    """(the contexts as the page shows them, turn -> its context)."""
    turns = episode.turns
    try:
        found = contexts(turns)
        parents = [parent_of(turns, context.turns[0]) for context in found]
    except ValueError as error:
        skips.add(f"the contexts of {episode.id} are not known: {error}")
        return [{"sample": 0, "from_turn": 0, "parent": None, "why": None}], {}
    of_turn = {turn: at for at, context in enumerate(found) for turn in context.turns}
    shown: list[dict[str, Json]] = []
    for at, (context, parent) in enumerate(zip(found, parents, strict=True)):
        first = context.turns[0]
        reason = None
        if parent is not None:
            reason = f"branches from turn {parent + 1}"
        elif first and turns[first - 1].rewritten is not None:
            reason = "the environment rewrote the conversation"
        elif first:
            reason = "the window moved, or the chat template rewrote what was said before"
        shown.append(
            {
                "sample": at,
                "from_turn": first,
                "parent": None if parent is None else of_turn[parent],
                "why": reason,
            }
        )
    return shown, of_turn


def _tokens(
    turn: Turn, credit: Mapping[str, Sequence[float]], pieces: Mapping[int, str], trained: bool
) -> list[dict[str, Json]]:
    ids = turn.completion.ids
    if any(token not in pieces for token in ids):
        return []
    known = {name: values for name, values in credit.items() if len(values) == len(ids)}
    return [
        {
            "text": pieces[token],
            "logprob": number(turn.completion.logprobs[at]),
            **{name: number(known[name][at]) if name in known else None for name in _CREDIT},
            "mask": trained,
        }
        for at, token in enumerate(ids)
    ]


def _credit_by_turn(rows: Iterable[CreditRow]) -> dict[int, dict[str, list[float]]]:
    found: dict[int, dict[str, list[float]]] = {}
    for row in rows:
        for name, of_row in _CREDIT.items():
            values: tuple[float, ...] = getattr(row, of_row)
            for turn, value in zip(row.turn_ids, values, strict=False):
                found.setdefault(turn, {}).setdefault(name, []).append(value)
    return found


def _rows_of(
    folder: RunFolder,
    name: str,
    episode_id: str,
    read: Callable[[dict[str, Json]], Any],
    skips: Skips,
) -> list[Any]:
    """The rows about this episode, converted by `read`. Rows whose bytes lack its id are not
    parsed."""
    import json

    mark = (
        json.dumps(episode_id).encode(),
        json.dumps(episode_id, ensure_ascii=False).encode("utf-8", "replace"),
    )
    found: list[Any] = []
    try:
        with folder.open(name) as file:
            for line in lines(file, torn=said_torn(name, skips)):
                if line.data is None or not any(one in line.data for one in mark):
                    continue
                row = take(line, lambda data: _about(data, episode_id, read), skips, name=name)
                found += [] if row is None else row
    except FileNotFoundError:
        pass
    except OSError as error:
        skips.add(f"{name} cannot be read: {error.strerror or error}")
    return found


def _about(
    data: dict[str, Json], episode_id: str, read: Callable[[dict[str, Json]], Any]
) -> list[Any]:
    return [read(data)] if episode_id in (data.get("id"), data.get("episode_id")) else []


def _credit(data: Mapping[str, Json]) -> CreditRow:
    return checked(CreditRow.from_json(data))


def _seconds(
    data: Mapping[str, Json], episode: Episode
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    both = tuple(tuple(float(value) for value in data[name]) for name in ("generate", "env"))
    if any(len(part) != len(episode.turns) for part in both):
        raise ValueError(f"it tells of other turns than episode {episode.id} has")
    return both[0], both[1]


def _at(values: Sequence[float], index: int) -> float | None:
    if index >= len(values) or not math.isfinite(values[index]):
        return None
    return values[index]
