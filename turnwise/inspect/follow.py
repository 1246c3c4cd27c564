"""Rows of a file that grows, from where the last answer ended."""

import os
import zlib
from dataclasses import dataclass
from typing import BinaryIO

from turnwise.inspect.folder import MAX_LINE, RunFolder, Skips, lines, take
from turnwise.log.records import number_row
from turnwise.types import Json

MAX_ANSWER = 4 * 1024 * 1024
"""Bytes of a file in one answer."""
TAIL = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class News:
    """The part of a file beyond a position."""

    rows: list[dict[str, Json]]
    position: str
    """Where the next rows begin."""
    reset: bool = False
    """The file was cut or replaced since, so that these rows are in place of all before."""
    more: bool = False
    """The answer is full, and the file has more."""


def read_news(folder: RunFolder, name: str, after: str, skips: Skips) -> News:
    """The whole rows of metrics.jsonl or timings.jsonl beyond a position, "" for all.

    A resumed run cuts the file and writes on, so that a size alone does not tell whether what was
    read is still there: the position holds a checksum of the bytes before it.
    """
    try:
        with folder.open(name) as file:
            start, reset = _resume(file, after)
            rows: list[dict[str, Json]] = []
            end = start
            where = f"{name} from byte {start}" if start else name
            for line in lines(file):
                if end - start >= MAX_ANSWER:
                    break
                row = take(line, numbers, skips, name=where)
                rows += [] if row is None else [row]
                end = file.tell()
            more = end - start >= MAX_ANSWER and end < os.fstat(file.fileno()).st_size
            return News(rows=rows, position=_position(file, end), reset=reset, more=more)
    except FileNotFoundError:
        return News(rows=[], position="", reset=after not in ("", "0"))
    except OSError as error:
        skips.add(f"{name} cannot be read: {error.strerror or error}")
        return News(rows=[], position="", reset=after not in ("", "0"))


def read_all(
    folder: RunFolder, name: str, skips: Skips, *, limit: int = MAX_LINE
) -> list[dict[str, Json]]:
    """All rows of such a file, up to a size."""
    found: list[dict[str, Json]] = []
    after, more = "", True
    while more:
        news = read_news(folder, name, after, skips)
        found = news.rows if news.reset else [*found, *news.rows]
        after, more = news.position, news.more
        if more and int(after.partition("-")[0]) > limit:
            skips.add(f"{name} is read up to byte {after.partition('-')[0]}")
            break
    return found


def numbers(row: dict[str, Json]) -> dict[str, Json]:
    """A row of metrics without what is said of values that were not finite: they are null."""
    return {key: value for key, value in number_row(row).items() if key != "not_finite"}


def _resume(file: BinaryIO, after: str) -> tuple[int, bool]:
    """(where to read on, whether that is from the beginning because the file is another)."""
    if after in ("", "0"):
        return 0, False
    first = after.partition("-")[0]
    start = int(first) if first.isdecimal() and len(first) < 19 else -1
    if start >= 0 and os.fstat(file.fileno()).st_size >= start and _position(file, start) == after:
        file.seek(start)
        return start, False
    file.seek(0)
    return 0, True


def _position(file: BinaryIO, end: int) -> str:
    """The position after `end` bytes.

    Example:
        >>> import io
        >>> _position(io.BytesIO(b"abc"), 2)
        '2-9e83486d'
    """
    start = max(0, end - TAIL)
    file.seek(start)
    return f"{end}-{zlib.crc32(file.read(end - start)):08x}"
