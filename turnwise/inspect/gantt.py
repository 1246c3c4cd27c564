"""Time spent in the engine and in environments by each episode of a rollout: bars on one axis."""

from collections.abc import Mapping, Sequence

from turnwise.inspect.episode_rows import number
from turnwise.inspect.folder import Skips, lines, said_torn, step_name, take
from turnwise.inspect.runs import Run
from turnwise.types import Json

MOST_SECONDS = 1e9
"""A longer time was not measured."""


def gantt_json(
    run: Run, split: str, step: int, rows: Sequence[Mapping[str, Json]]
) -> dict[str, Json]:
    """The bars of a step's episodes, with a start each where it is stored."""
    skips, name = Skips(), step_name("timings", split, step)
    places = {row["id"]: row["row"] for row in rows}
    episodes: list[dict[str, Json]] = []

    def read(data: dict[str, Json]) -> dict[str, Json]:
        return {"row": places.get(data["id"]), "id": str(data["id"]), "bars": bars(data)}

    try:
        with run.folder.open(name) as file:
            for line in lines(file, torn=said_torn(name, skips)):
                found = take(line, read, skips, name=name)
                if found is not None and found["row"] is not None:
                    episodes.append(found)
    except FileNotFoundError:
        skips.add(f"{name} is missing: no times were stored")
    except OSError as error:
        skips.add(f"{name} cannot be read: {error.strerror or error}")
    return {"episodes": episodes, "note": _note(episodes), "skipped": skips.words()}


def bars(data: Mapping[str, Json]) -> list[dict[str, Json]]:
    """Reset, generation and environment of an episode's row of timings/, in their order.

    Example:
        >>> row = {"generate": [2.0], "env": [0.5]}
        >>> [bar["start"] for bar in bars(row)]
        [None, None]
        >>> starts = {"reset_start": 0.0, "generate_start": [1.5], "env_start": [3.5]}
        >>> [bar["start"] for bar in bars(row | {"reset": 1.0} | starts)]
        [0.0, 1.5, 3.5]
    """
    begun = data.get("reset_start") is not None
    found = [_bar("env", data["reset"], data["reset_start"], turn=None)] if begun else []
    unknown = [None] * len(data["generate"])
    asked, stepped = (data[f"{kind}_start"] if begun else unknown for kind in ("generate", "env"))
    columns = zip(data["generate"], asked, data["env"], stepped, strict=True)
    for turn, (generate, asked_at, env, stepped_at) in enumerate(columns):
        found.append(_bar("generate", generate, asked_at, turn=turn))
        found.append(_bar("env", env, stepped_at, turn=turn))
    return found


def _bar(kind: str, seconds: Json, start: Json, *, turn: int | None) -> dict[str, Json]:
    return {"kind": kind, "seconds": _time(seconds), "start": _time(start), "turn": turn}


def _time(value: Json) -> float | None:
    """The value where it can have been measured: a file may be edited."""
    found = number(value)
    return found if found is not None and 0.0 <= found <= MOST_SECONDS else None


def _note(episodes: Sequence[Mapping[str, Json]]) -> str | None:
    """A note about bars without a recorded start: their position is no time."""
    without = sum(any(bar["start"] is None for bar in one["bars"]) for one in episodes)
    if not without:
        return None
    if without == len(episodes):
        return (
            "Bars show measured seconds, one turn after the other. When they started is not "
            "stored, so all episodes begin at 0."
        )
    return (
        f"When the bars of {without} of {len(episodes)} episodes started is not stored: these "
        "follow each other without a gap."
    )
