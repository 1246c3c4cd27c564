"""A run directory, followed: every look reads what was written since the last one, and nothing
twice."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from turnwise.json_lines import UNREADABLE, FileError, parse_json
from turnwise.log.records import (
    LedgerEntry,
    RunDirectoryError,
    checked,
    event_row,
    number_row,
    obj,
)
from turnwise.log.store import RunReader, has_writer, read_episode
from turnwise.log.terminal.view import RunView
from turnwise.types import Episode, Json

LONGEST_LINE = 64 * 2**20
"""Bytes of an episode that are read back."""
MOST_SKIPPED = 20
_BLOCK = 2**16
_WITNESS = 64
"""Bytes before the last read position: if they changed, the file was rewritten."""


@dataclass(slots=True)
class Tail:
    """A file of lines, read as it grows. A line that is not whole yet waits for the next look."""

    path: Path
    place: int = 0
    number: int = 0
    """Lines read."""
    witness: bytes = b""

    def new_lines(self) -> list[tuple[int, bytes]] | None:
        """(number, line) of every line since the last look; None where the file was cut or
        replaced, so that everything is read again."""
        if self.path.is_fifo():  # opening it would wait for a writer
            return []
        try:
            with self.path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size == self.place:
                    return []
                file.seek(self.place - len(self.witness))
                if size < self.place or file.read(len(self.witness)) != self.witness:
                    self.place, self.number, self.witness = 0, 0, b""
                    return None
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self.place += len(whole)
        self.witness = (self.witness + whole)[-_WITNESS:]
        lines = whole.split(b"\n")[:-1]
        first = self.number + 1
        self.number += len(lines)
        return [(first + index, line) for index, line in enumerate(lines) if line.strip()]


@dataclass(slots=True)
class Follower:
    """Reads a run into a view, again and again.

    Unreadable lines are skipped, and the view says so: the files may be torn by a full disk, or
    edited.
    """

    reader: RunReader
    view: RunView = field(init=False)
    episode: tuple[Episode, int] | None = None
    """The last episode of the newest stored step, with the step."""
    _tails: dict[str, Tail] = field(init=False)
    _stamps: dict[str, int] = field(default_factory=dict[str, int])
    """File or folder -> when it last changed, as far as it was read."""
    _unreadable: set[int] = field(default_factory=set[int])
    """Steps whose last episode cannot be read."""

    def __post_init__(self) -> None:
        self._start()

    def look(self) -> None:
        """Takes what is new into the view."""
        # First, so that the last lines of a run that ends meanwhile are read.
        writes = has_writer(self.reader.path)
        readers: dict[str, Callable[[dict[str, Json]], None]] = {
            "metrics.jsonl": self._take_numbers,
            "timings.jsonl": self._take_numbers,
            "ledger.jsonl": self._take_ledger,
            "events.jsonl": self._take_event,
        }
        if any(not self._read(name, take) for name, take in readers.items()):
            self._start()  # a resume cut the files back: everything from the beginning
            for name, take in readers.items():
                self._read(name, take)
        self._read_config()
        self._read_summary()
        self._read_episode()
        self._judge(writes)

    def _start(self) -> None:
        self.view = RunView(path=self.reader.path, config=self.reader.config)
        self._tails = {
            name: Tail(self.reader.path / name)
            for name in ("metrics.jsonl", "timings.jsonl", "ledger.jsonl", "events.jsonl")
        }
        self._stamps = {}

    def _read(self, name: str, take: Callable[[dict[str, Json]], None]) -> bool:
        try:
            lines = self._tails[name].new_lines()
        except OSError as error:
            self._skip(f"{name}: {error.strerror or error}")
            return True
        for number, line in lines or ():
            try:
                take(obj(parse_json(line.decode("utf-8"))))
            except UNREADABLE as error:
                self._skip(f"{name}, line {number}: {error}")
            self.view.revision += 1
        return lines is not None

    def _take_numbers(self, row: dict[str, Json]) -> None:
        numbers = number_row(row)
        step: int = numbers.pop("step")
        for name in numbers.pop("not_finite", {}):
            self.view.not_finite.setdefault(str(name), step)
        self.view.add_row(step, numbers)

    def _take_ledger(self, row: dict[str, Json]) -> None:
        self.view.ledger.append(checked(LedgerEntry(**row)))

    def _take_event(self, row: dict[str, Json]) -> None:
        self.view.events.append(event_row(row))

    def _read_config(self) -> None:
        if not self._changed("config.yaml"):
            return
        try:
            config = self.reader.config  # a resume may have raised train.steps
        except RunDirectoryError as error:
            self._skip(str(error))
            return
        if config != self.view.config:
            self.view.config = config
            self.view.revision += 1

    def _read_summary(self) -> None:
        if not self._changed("summary.json"):
            return
        try:
            summary = self.reader.summary()
        except RunDirectoryError as error:
            self._skip(str(error))
            return
        if summary != self.view.summary:
            self.view.summary = summary
            self.view.revision += 1

    def _read_episode(self) -> None:
        if not self._changed("episodes"):
            return
        for step in reversed(self.reader.steps()):
            if self.episode is not None and self.episode[1] == step:
                return
            if step in self._unreadable:
                continue
            path = self.reader.path / "episodes" / f"step_{step:06d}.jsonl"
            try:
                episode = read_episode(obj(parse_json(last_line(path).decode("utf-8"))))
            except (OSError, FileError, *UNREADABLE) as error:
                self._unreadable.add(step)
                self._skip(f"episodes/{path.name}: {error}")
                continue
            self.episode = episode, step
            self.view.revision += 1
            return

    def _judge(self, writes: bool | None) -> None:
        """Whether the run goes on, and how long it has."""
        view, before = self.view, self.view.state
        stopped = view.summary.get("stopped")
        if writes or (writes is None and not view.summary):
            view.state, view.spent = "running", None
            view.since = self._began()
        else:
            seconds = view.summary.get("seconds")
            view.spent = float(seconds) if isinstance(seconds, int | float) else None
            view.since = None
            finished = view.summary.get("steps") == view.done and view.summary != {}
            view.state = (
                "interrupted" if not finished else "stopped" if stopped is not None else "done"
            )
        if view.state != before:
            view.revision += 1

    def _began(self) -> float | None:
        """When the process that writes took the lock."""
        try:
            return (self.reader.path / "lock").stat().st_mtime
        except OSError:
            return None

    def _changed(self, name: str) -> bool:
        try:
            stamp = (self.reader.path / name).stat().st_mtime_ns
        except OSError:
            return False
        if self._stamps.get(name) == stamp:
            return False
        # A file system may count time in ticks: what changes twice in one is seen by a later look.
        if time.time_ns() - stamp > 2 * 10**9:
            self._stamps[name] = stamp
        return True

    def _skip(self, problem: str) -> None:
        if problem not in self.view.skipped and len(self.view.skipped) < MOST_SKIPPED:
            self.view.skipped.append(problem)
            self.view.revision += 1


def last_line(path: Path) -> bytes:
    """The last whole line of a file, read from its end: its other episodes may be large.

    Raises:
        ValueError: there is none, or it is longer than anything that is shown.
    """
    if path.is_fifo():
        raise ValueError("it is a pipe")
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        found = b""
        while end > 0 and found.rstrip(b"\n").count(b"\n") < 1:
            start = max(end - max(_BLOCK, len(found)), 0)
            file.seek(start)
            found = file.read(end - start) + found
            end = start
            if len(found) > LONGEST_LINE:
                raise ValueError("its last line is too long to be shown")
    lines = [line for line in found.split(b"\n") if line.strip()]
    if not lines:
        raise ValueError("it is empty")
    return lines[-1]
