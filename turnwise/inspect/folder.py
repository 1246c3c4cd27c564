"""Files of a run directory, read as strangers left them: links are not followed, what cannot be
read is skipped and said."""

import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar, cast

from pydantic_core import from_json

from turnwise.json_lines import UNREADABLE, parse_json
from turnwise.types import Json

T = TypeVar("T")
MAX_LINE = 64 * 1024 * 1024
"""Bytes of a line that is still read; a longer one is skipped."""
MAX_WHOLE = 64 * 1024 * 1024
"""Bytes of a file that is read as a whole."""
MAX_SAID = 20
_STEP_FILE = re.compile(r"(step|eval)_([0-9]{6,18})\.jsonl", re.ASCII)


class InspectError(Exception):
    """A request that cannot be answered: an HTTP status and a message for the person."""

    def __init__(self, message: str, *, status: int = 404) -> None:
        super().__init__(message)
        self.status = status


@dataclass(slots=True)
class Skips:
    """Reasons why data could not be read: the first ones, and the number of others.

    Example:
        >>> skips = Skips()
        >>> for line in range(22):
        ...     skips.add(f"line {line}")
        >>> skips.words()[-2:]
        ['line 19', 'and 2 more']
    """

    first: list[str] = field(default_factory=list[str])
    more: int = 0

    def add(self, words: str) -> None:
        if words in self.first:
            return
        if len(self.first) < MAX_SAID:
            self.first.append(words[:400])
        else:
            self.more += 1

    def words(self) -> list[str]:
        return [*self.first, *([f"and {self.more} more"] if self.more else [])]


class StepFile(NamedTuple):
    """A file of one step, and what tells whether it changed."""

    split: str
    step: int
    size: int
    changed: int
    """Time of the last change in nanoseconds, mixed with the inode."""


class Line(NamedTuple):
    """A whole line of a file."""

    number: int
    """Counted from 0."""
    start: int
    data: bytes | None
    """None: too long to be read."""


class RunFolder:
    """A run directory, read only.

    Args:
        path: where it is. Links on the way to it are the user's; links inside it are not followed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def open(self, name: str) -> BinaryIO:
        """A regular file of the directory, opened for reading.

        Raises:
            OSError: it is not there, is a link, or may not be read.
        """
        *folders, last = name.split("/")
        here = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for folder in folders:
                flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
                below = os.open(folder, flags, dir_fd=here)
                os.close(here)
                here = below
            # Without O_NONBLOCK, opening a pipe waits for its writer.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            file = os.open(last, flags, dir_fd=here)
        finally:
            os.close(here)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise OSError(f"{name} is not a regular file")
        return os.fdopen(file, "rb")

    def whole(self, name: str, skips: Skips, *, limit: int = MAX_WHOLE) -> bytes | None:
        """The content of a file; None where it is missing, too large, or cannot be read."""
        try:
            with self.open(name) as file:
                data = file.read(limit + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            skips.add(f"{name} cannot be read: {error.strerror or error}")
            return None
        if len(data) > limit:
            skips.add(f"{name} has more than {limit} bytes, so it is not read")
            return None
        return data

    def json(self, name: str, read: Callable[[Any], T], skips: Skips) -> T | None:
        """A JSON file, converted by `read`; None where it is missing or cannot be read."""
        data = self.whole(name, skips)
        if data is None:
            return None
        try:
            return read(parse_json(data.decode("utf-8")))
        except UNREADABLE as error:
            skips.add(f"{name} cannot be read: {why(error)}")
            return None

    def rows(
        self, name: str, read: Callable[[dict[str, Json]], T], skips: Skips, *, whole: bool = False
    ) -> list[T]:
        """The objects of a file of JSON lines, converted by `read`, without those that cannot be
        read. Empty where there is no file.

        Args:
            whole: the file is complete, so a torn line at its end is damage.
        """
        try:
            with self.open(name) as file:
                return [
                    one
                    for line in lines(file, torn=said_torn(name, skips) if whole else None)
                    if (one := take(line, read, skips, name=name)) is not None
                ]
        except FileNotFoundError:
            return []
        except OSError as error:
            skips.add(f"{name} cannot be read: {error.strerror or error}")
            return []

    def is_torn(self, name: str) -> bool:
        """Whether the file ends in the middle of a line."""
        with suppress(OSError), self.open(name) as file:
            size = file.seek(0, os.SEEK_END)
            return size > 0 and file.seek(size - 1) >= 0 and file.read(1) != b"\n"
        return False

    def step_files(self, kind: str) -> list[StepFile]:
        """The files of episodes, credit or timings, in order. Empty where there is no folder."""
        found: list[StepFile] = []
        with suppress(OSError), os.scandir(self.path / kind) as entries:
            if os.path.islink(self.path / kind):
                return []
            for entry in entries:
                match = _STEP_FILE.fullmatch(entry.name)
                if match is None or entry.name != f"{match[1]}_{int(match[2]):06d}.jsonl":
                    continue
                with suppress(OSError):  # deleted meanwhile
                    if not entry.is_file(follow_symlinks=False):
                        continue
                    about = entry.stat(follow_symlinks=False)
                    changed = (about.st_mtime_ns ^ (about.st_ino << 20)) & (2**62 - 1)
                    found.append(StepFile(match[1], int(match[2]), about.st_size, changed))
        return sorted(found)


def step_name(kind: str, split: str, step: int) -> str:
    """The name of a file of one step.

    Example:
        >>> step_name("episodes", "eval", 12)
        'episodes/eval_000012.jsonl'
    """
    return f"{kind}/{split}_{step:06d}.jsonl"


def said_torn(name: str, skips: Skips) -> Callable[[int], None]:
    """Says that a file ends in the middle of a line, given its number from 0. Files of a step are
    written whole and renamed: there it is damage."""
    return lambda number: skips.add(f"{name} ends in the middle of line {number + 1}")


def lines(file: BinaryIO, *, torn: Callable[[int], None] | None = None) -> Iterator[Line]:
    """The whole lines from the file's position on. A last one without a newline is left out: it is
    still being written, or torn.

    Args:
        torn: is told the number of such a line.
    """
    start, number, limit = file.tell(), 0, MAX_LINE
    while data := file.readline(limit):
        size = len(data)
        long = not data.endswith(b"\n") and size >= limit
        while long and not data.endswith(b"\n"):
            data = file.readline(1024 * 1024)
            size += len(data)
            if not data:
                break
        if not data.endswith(b"\n"):
            if torn is not None:
                torn(number)
            return
        yield Line(number, start, None if long else data)
        start, number = start + size, number + 1


def take(line: Line, read: Callable[[dict[str, Json]], T], skips: Skips, *, name: str) -> T | None:
    """The line's object, converted by `read`; None where it is blank or cannot be read."""
    where = f"{name}, line {line.number + 1}"
    if line.data is None:
        skips.add(f"{where} is longer than {MAX_LINE} bytes")
        return None
    if not line.data.strip():
        return None
    try:
        value = _parse(line.data)
        if not isinstance(value, dict):
            raise ValueError(f"it is no JSON object but {value!r:.40}")
        return read(cast(dict[str, Json], value))
    except UNREADABLE as error:
        skips.add(f"{where} cannot be read: {why(error)}")
        return None


def _parse(data: bytes) -> Any:
    """The value of a line of JSON. pydantic's parser is three times as fast as Python's, and
    stricter: on an error the line is parsed again with `parse_json`, for its error message."""
    try:
        return from_json(data, allow_inf_nan=False)
    except ValueError:
        return parse_json(data.decode("utf-8"))


def why(error: Exception) -> str:
    """An error of reading, in words.

    Example:
        >>> why(KeyError("turns"))
        "it has no 'turns'"
    """
    if isinstance(error, KeyError):
        return f"it has no {error}"
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
