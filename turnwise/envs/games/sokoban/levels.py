"""Level files in Boxoban's text form: a line `; N`, then rows of '#', '@', '$', '.' and spaces.
Gzip too."""

import gzip
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from turnwise.envs.games.sokoban.engine import BOX, Level, LevelError
from turnwise.envs.games.sokoban.solver import UNREACHABLE, push_distances

MAX_BYTES = 256 * 1024 * 1024
"""A level file unpacks to no more than this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """A problem of one level of a file."""

    file: str
    level: str
    """The level's header, or its number in the file."""
    line: int
    """Where it begins."""
    message: str

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}, level {self.level}: {self.message}"


@dataclass(frozen=True, kw_only=True, slots=True)
class LevelReport:
    """The result of a check of level files."""

    path: str
    num_levels: int
    """Levels in the file, good and bad."""
    problems: tuple[Problem, ...]
    duplicates: int
    """Levels whose content stood in the file before. Harmless: a split never separates equal
    levels."""
    sizes: tuple[tuple[int, int], ...]
    """The (width, height) that occur."""
    boxes: tuple[int, ...]
    """The numbers of boxes that occur."""

    @property
    def ok(self) -> bool:
        return self.num_levels > 0 and not self.problems

    def lines(self) -> list[str]:
        """The report for people; the last line is the verdict."""
        lines = [str(problem) for problem in self.problems]
        sizes = ", ".join(f"{width}x{height}" for width, height in self.sizes)
        if self.num_levels == 0:
            return [
                f"{self.path}: no level found; a level is rows of '#', '@', '$', '.' under a line "
                "'; N'"
            ]
        good = self.num_levels - len(self.problems)
        boxes = ", ".join(map(str, self.boxes))
        return [
            *lines,
            f"{self.path}: {good} of {self.num_levels} levels are playable"
            + (f" ({sizes}; {boxes} boxes; {self.duplicates} duplicates)" if good else ""),
        ]


def read_levels(path: str | Path) -> tuple[Level, ...]:
    """All levels of a file, or of every `.txt` and `.txt.gz` file below a directory, in order of
    name.

    Raises:
        LevelError: a level cannot be played; the message names the file and the line.
    """
    levels: list[Level] = []
    for file in _files(path):
        for name, line, rows in _blocks(_read_text(file)):
            try:
                levels.append(Level.from_rows(rows))
            except LevelError as error:
                raise LevelError(f"{file}, line {line}, level {name}: {error}") from error
    if not levels:
        raise LevelError(
            f"no levels in {path}; a level is rows of '#', '@', '$', '.' under a line '; N'"
        )
    return tuple(levels)


def check_levels(path: str | Path) -> LevelReport:
    """The problems of each level of a file or directory: drawing, player, boxes, walls, boxes
    that are stuck.

    A box that stands where no push can bring it to a target makes a level unsolvable; that is found
    without a search.
    """
    problems: list[Problem] = []
    digests: set[bytes] = set()
    sizes: set[tuple[int, int]] = set()
    boxes: set[int] = set()
    count = duplicates = 0
    for file in _files(path):
        for name, line, rows in _blocks(_read_text(file)):
            count += 1
            try:
                level = Level.from_rows(rows)
                _check_stuck(level)
            except LevelError as error:
                problems.append(Problem(file=str(file), level=name, line=line, message=str(error)))
                continue
            digest = level.digest()
            duplicates += digest in digests
            digests.add(digest)
            sizes.add((level.width, level.height))
            boxes.add(level.num_boxes)
    return LevelReport(
        path=str(path),
        num_levels=count,
        problems=tuple(problems),
        duplicates=duplicates,
        sizes=tuple(sorted(sizes)),
        boxes=tuple(sorted(boxes)),
    )


def _files(path: str | Path) -> list[Path]:
    root = Path(path).expanduser()
    if not root.exists():
        raise FileNotFoundError(
            f"no level file at {root}; `levels` is a file or a directory of Boxoban text files"
        )
    if not root.is_dir():
        return [root]
    return sorted(file for file in root.rglob("*") if file.name.endswith((".txt", ".txt.gz")))


def _check_stuck(level: Level) -> None:
    distances = push_distances(level)
    for index, cell in enumerate(level.cells):
        if cell & BOX and distances[index] == UNREACHABLE:
            row, column = divmod(index, level.stride)
            raise LevelError(
                f"every box can reach a target, but the one at row {row + 1}, column {column + 1} "
                "is stuck"
            )


def _read_text(file: Path) -> str:
    data = file.read_bytes()
    if data[:2] == b"\x1f\x8b":
        try:
            with gzip.open(file) as stream:
                data = stream.read(MAX_BYTES + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise LevelError(
                f"{file} begins like a gzip file but cannot be unpacked: {error}"
            ) from error
    if len(data) > MAX_BYTES:
        raise LevelError(
            f"a level file has at most {MAX_BYTES} bytes unpacked, {file} has more; split it"
        )
    try:
        return data.decode("ascii")
    except UnicodeDecodeError as error:
        raise LevelError(
            f"a level file is ASCII text, got byte {data[error.start]:#04x} at offset "
            f"{error.start} of {file}"
        ) from error


def _blocks(text: str) -> Iterator[tuple[str, int, list[str]]]:
    """(name, first line, rows) of each level: rows between headers or empty lines."""
    rows: list[str] = []
    name, start, count = "", 0, 0
    for number, line in enumerate([*text.splitlines(), ""], start=1):
        row = line.rstrip("\r\n")
        header = row.startswith(";")
        if rows and (header or not row.strip()):
            yield name or str(count), start, rows
            count += 1
            rows, name = [], ""
        if header:
            name = row[1:].strip()
        elif row.strip():
            start = start if rows else number
            rows.append(row)
