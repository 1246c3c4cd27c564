"""Records in the files of a run directory besides metrics and episodes, and how they are read."""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

from turnwise.json_lines import FileError, read_json_lines
from turnwise.types import Json

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    D = TypeVar("D", bound=DataclassInstance)
T = TypeVar("T")


class RunDirectoryError(RuntimeError):
    """A run directory that cannot be used as asked; the message says why and what to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CreditRow:
    """The credit of every token of one sample, in the order of sampling.

    Only tokens that the model produced are listed: those of all turns of the sample's context,
    concatenated.

    Example:
        >>> CreditRow(episode_id="step0/g0/m0", sample=0, turn_ids=(0, 0),
        ...     advantages=(0.5, 1.0)).to_json()["sample"]
        0
    """

    episode_id: str
    sample: int
    """Which of the episode's unbroken contexts, counted from 0."""
    turn_ids: tuple[int, ...]
    advantages: tuple[float, ...]
    values: tuple[float, ...] = ()
    """The critic's, empty where there is none."""
    returns: tuple[float, ...] = ()
    gaps: tuple[float, ...] = ()
    """The trainer's log-prob minus the sampler's."""
    entropies: tuple[float, ...] = ()
    """Nats, before the update; empty where the step did not score its tokens first."""

    def __post_init__(self) -> None:
        for name in ("advantages", "values", "returns", "gaps", "entropies"):
            length = len(getattr(self, name))
            if length not in (0, len(self.turn_ids)):
                raise ValueError(
                    f"credit has one entry per token: {len(self.turn_ids)} turn_ids, {length} "
                    f"{name}"
                )

    def to_json(self) -> dict[str, Json]:
        return {
            "episode_id": self.episode_id,
            "sample": self.sample,
            "turn_ids": list(self.turn_ids),
            "advantages": [_short(value) for value in self.advantages],
            "values": [_short(value) for value in self.values],
            "returns": [_short(value) for value in self.returns],
            "gaps": [_short(value) for value in self.gaps],
            "entropies": [_short(value) for value in self.entropies],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Json]) -> "CreditRow":
        def floats(name: str) -> tuple[float, ...]:
            return tuple(math.nan if value is None else value for value in data[name])

        return cls(
            episode_id=data["episode_id"],
            sample=data["sample"],
            turn_ids=tuple(data["turn_ids"]),
            advantages=floats("advantages"),
            values=floats("values"),
            returns=floats("returns"),
            gaps=floats("gaps"),
            entropies=floats("entropies") if "entropies" in data else (),  # older runs have none
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerEntry:
    """Whether the tokens trained on in a step are the tokens that were sampled.

    Example:
        >>> entry = ledger_entry(3, [((5, 2), (5, 2)), ((7,), (8,))])
        >>> entry.sampled, entry.trained, entry.broken, entry.sampled_sha256 == entry.trained_sha256
        (3, 3, 1, False)
    """

    step: int
    sampled: int
    """Tokens that the generator returned, of the episodes that were trained on."""
    trained: int
    """Tokens under the response mask."""
    sampled_sha256: str
    trained_sha256: str
    broken: int
    """Samples in which the two differ. Anything but 0 must stop the run."""
    contexts: Mapping[str, int] = field(default_factory=dict[str, int])
    """Turns of programs that continued a context, branched from one, or began one, by cause
    (docs/agents.md)."""


def ledger_entry(
    step: int,
    pairs: Iterable[tuple[Sequence[int], Sequence[int]]],
    *,
    contexts: Mapping[str, int] | None = None,
) -> LedgerEntry:
    """The step's entry, from (sampled ids, trained ids) of every sample."""
    sums = hashlib.sha256(), hashlib.sha256()
    counts = [0, 0]
    broken = 0
    for pair in pairs:
        ids = [list(map(int, side)) for side in pair]
        broken += ids[0] != ids[1]
        for index, side in enumerate(ids):
            counts[index] += len(side)
            sums[index].update((",".join(map(str, side)) + ";").encode())
    return LedgerEntry(
        step=step,
        sampled=counts[0],
        trained=counts[1],
        sampled_sha256=sums[0].hexdigest(),
        trained_sha256=sums[1].hexdigest(),
        broken=broken,
        contexts=dict(contexts or {}),
    )


def read_lines(path: Path, read: Callable[[dict[str, Json]], T]) -> list[T]:
    """The objects of a JSONL file, converted by `read`; none where there is no file. A torn last
    line is left out.

    Raises:
        RunDirectoryError: any other line cannot be read; names it.
    """
    if not path.is_file():
        return []
    try:
        return [one for _, one in read_json_lines(path, lambda row: read(obj(row)), torn=True)]
    except FileError as error:
        raise RunDirectoryError(f"{error}; the file was edited") from error


def obj(value: Any) -> dict[str, Json]:
    """The value, which is a JSON object."""
    if not isinstance(value, dict):
        raise ValueError(f"a JSON object is wanted, got {value!r:.80}")
    return cast(dict[str, Json], value)


def number_row(row: dict[str, Json]) -> dict[str, Json]:
    """A row of metrics: a step, and numbers by name."""
    if not isinstance(row.get("not_finite", {}), dict):
        raise ValueError(f"not_finite has names, got {row['not_finite']!r:.80}")
    for name, value in step_row(row).items():
        known = value is None or type(value) in (int, float)
        if name != "not_finite" and not (known and math.isfinite(value or 0)):
            raise ValueError(f"{name} is a number, got {value!r:.80}")
    return row


def step_row(row: dict[str, Json]) -> dict[str, Json]:
    """The row, which has a step."""
    if type(row["step"]) is not int:
        raise ValueError(f"a row has a step, got {row!r:.80}")
    return row


def event_row(row: dict[str, Json]) -> dict[str, Json]:
    """A row of events.jsonl: a kind and a message at least."""
    return row | {"kind": str(row["kind"]), "message": str(row["message"])}


def checked(value: "D") -> "D":
    """The value, once every field has been found to be what its type says: files are edited, and
    what reads them computes.

    Raises:
        ValueError: one is not.

    Example:
        >>> checked(CreditRow(episode_id="e", sample="3", turn_ids=(), advantages=()))
        Traceback (most recent call last):
        ValueError: sample: input should be a valid integer, got '3'
    """
    try:
        return _adapter(type(value)).validate_json(json.dumps(asdict(value)), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        said = f"{first['msg'][0].lower()}{first['msg'][1:]}"
        raise ValueError(f"{where}: {said}, got {first['input']!r:.80}") from error


@cache
def _adapter(kind: type[T]) -> TypeAdapter[T]:
    return TypeAdapter(kind)


def _short(value: float) -> float | None:
    """Six digits, which is what a float32 holds and a third of what JSON would spend on it."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
