# pyright: reportUnknownArgumentType=false
"""Rows of a data set as tasks: loading, and the split into training and validation."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

from turnwise.envs.base import EnvError
from turnwise.envs.gate import read_json
from turnwise.json_lines import FileError, read_json_lines
from turnwise.seeding import derive_seed
from turnwise.types import Json

SCAN_LIMIT = 4096
"""Data sets up to this size are read completely to split them; from larger ones, rows are drawn
until one is in the split."""


@runtime_checkable
class Rows(Protocol):
    """The interface of a data set; lists of dicts and Hugging Face data sets have it."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


def load_rows(source: Any, *, name: str) -> Rows:
    """The rows of a list, of any object with a length and items, or of a JSONL file.

    Example:
        >>> len(load_rows([{"question": "1+1?", "answer": "2"}], name="sums"))
        1
    """
    if isinstance(source, str | Path):
        path = Path(source)
        if not path.is_file():
            raise EnvError(
                f"{name}: no data set at {path}; a data set is a list of rows or the path of a "
                "JSONL file"
            )
        rows = _read_jsonl(str(path.resolve()), path.stat().st_mtime_ns)
    elif isinstance(source, Rows) and not isinstance(source, Mapping):
        rows = source
    else:
        raise EnvError(
            f"{name}: a data set is a list of rows or the path of a JSONL file, got "
            f"{type(source).__name__}"
        )
    if len(rows) == 0:
        raise EnvError(f"{name}: the data set is empty")
    return rows


@lru_cache(maxsize=8)
def _read_jsonl(path: str, _modified: int) -> list[Json]:
    try:
        return [row for _, row in read_json_lines(Path(path), lambda row: row)]
    except FileError as error:
        raise EnvError(str(error)) from error


class RowSplits:
    """Draws rows for a split. A row's prompt decides its split, so no prompt is in both.

    Example:
        >>> rows = [{"question": str(i)} for i in range(100)]
        >>> splits = RowSplits(rows, val_fraction=0.2, name="sums")
        >>> train = {splits.draw(seed, "train")["question"] for seed in range(300)}
        >>> train & {splits.draw(seed, "val")["question"] for seed in range(300)}
        set()
    """

    def __init__(self, rows: Rows, *, val_fraction: float, name: str) -> None:
        if not 0.0 <= val_fraction < 1.0:
            raise ValueError(f"val_fraction must be in [0, 1), got {val_fraction}")
        self._rows = rows
        self._share = val_fraction
        self._name = name
        self._indices: dict[str, list[int]] | None = None

    def draw(self, seed: int, split: str) -> dict[str, Json]:
        """The row of this seed in "train" or in another split. All other splits share the held-out
        rows."""
        side = "train" if split == "train" else "val"
        if len(self._rows) > SCAN_LIMIT:
            for attempt in range(200):
                row = self._row(derive_seed(seed, "row", attempt) % len(self._rows))
                if ("val" if _bucket(row) < self._share else "train") == side:
                    return row
        indices = self._divided()[side]
        if not indices:
            raise EnvError(
                f"{self._name}: none of the {len(self._rows)} rows falls into split {split!r}; "
                "give an eval_dataset, "
                f"more rows, or another val_fraction than {self._share}"
            )
        return self._row(indices[derive_seed(seed, "row") % len(indices)])

    def all(self, split: str) -> list[dict[str, Json]]:
        """Every row of "train" or of another split. All other splits share the held-out rows."""
        return [
            self._row(index) for index in self._divided()["train" if split == "train" else "val"]
        ]

    def _row(self, index: int) -> dict[str, Json]:
        row = self._rows[index]
        if not isinstance(row, Mapping):
            raise EnvError(f"{self._name}: row {index} must be a dict, got {type(row).__name__}")
        return cast(dict[str, Json], read_json(row, what=f"{self._name}: row {index}"))

    def _divided(self) -> dict[str, list[int]]:
        if self._indices is None:
            buckets = [_bucket(self._row(index)) for index in range(len(self._rows))]
            share = self._share
            if share > 0.0 and len(buckets) <= SCAN_LIMIT:
                # A small data set may be in one split only, by chance: move the bound past its
                # lowest or highest prompt.
                ordered = sorted(set(buckets))
                share = min(max(share, ordered[1]), ordered[-1]) if len(ordered) > 1 else 0.0
            self._indices = {
                "train": [index for index, bucket in enumerate(buckets) if bucket >= share],
                "val": [index for index, bucket in enumerate(buckets) if bucket < share],
            }
        return self._indices


def prompt_messages(row: Mapping[str, Json], *, name: str) -> list[dict[str, Json]]:
    """The opening messages of a row: its prompt (text or messages), else its question.

    Example:
        >>> prompt_messages({"question": "1+1?"}, name="sums")
        [{'role': 'user', 'content': '1+1?'}]
    """
    prompt = row.get("prompt", row.get("question"))
    if prompt is None:
        return []
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if isinstance(prompt, Sequence) and all(
        isinstance(message, Mapping) for message in cast(Sequence[Any], prompt)
    ):
        return [dict(message) for message in cast(Sequence[Mapping[str, Json]], prompt)]
    raise EnvError(f"{name}: a prompt is text or a list of messages, got {str(prompt)[:100]!r}")


def row_key(row: Mapping[str, Json]) -> str:
    """A short name of a row's content.

    Example:
        >>> row_key({"question": "1+1?", "answer": "2"}) == row_key({"answer": "2", "question": "1+1?"})
        True
    """  # noqa: E501
    text = json.dumps(row, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def _bucket(row: Mapping[str, Json]) -> float:
    """A number in [0, 1) that depends on the prompt alone."""
    prompt = row.get("prompt", row.get("question"))
    text = json.dumps(row if prompt is None else prompt, sort_keys=True)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big") / 2**56
