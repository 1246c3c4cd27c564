"""The index of a run's episodes: one SQLite file per run in the user's cache, built a step file at
a time. The run directory itself is never written.

A step's file is written at once and renamed, so that its size and time of change tell whether its
rows are still right.
"""

import contextlib
import fcntl
import hashlib
import os
import sqlite3
import tempfile
import threading
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from turnwise.inspect.episode_rows import EpisodeRow, read_rows, shown_row
from turnwise.inspect.folder import RunFolder, Skips, StepFile, step_name
from turnwise.types import Json, Status

VERSION = 2
"""Of the tables. It is part of an index's name: another turnwise has an index of its own."""
KEPT_DAYS = 30
"""Age after the last use at which an index is deleted."""
BATCH = 256
_TABLES = """
CREATE TABLE IF NOT EXISTS files(split TEXT, step INTEGER, size INTEGER, changed INTEGER,
    episodes INTEGER, skipped TEXT, PRIMARY KEY(split, step));
CREATE TABLE IF NOT EXISTS episodes(key INTEGER PRIMARY KEY, split TEXT, step INTEGER, row INTEGER,
    start INTEGER, id TEXT, "group" INTEGER, member INTEGER, env TEXT, task TEXT, status TEXT,
    error TEXT, success INTEGER, reward REAL, turns INTEGER, tokens INTEGER,
    contexts INTEGER, first TEXT);
CREATE UNIQUE INDEX IF NOT EXISTS places ON episodes(split, step, row);
CREATE TABLE IF NOT EXISTS texts(key INTEGER PRIMARY KEY, text TEXT);
"""
_COLUMNS = ", ".join(f'"{name}"' for name in EpisodeRow._fields)
SORTS = {
    "order": "step, row",
    "reward": "reward, step, row",
    "tokens": "tokens, step, row",
    "turns": "turns, step, row",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Filter:
    """Which episodes are asked for."""

    split: str = "step"
    step: int | None = None
    """None: all."""
    status: str | None = None
    env: str | None = None
    success: bool | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    text: str = ""
    sort: str = "order"
    """A key of SORTS, with a leading minus for descending order."""
    offset: int = 0
    limit: int = 100

    def where(self) -> tuple[str, list[Any]]:
        """The condition on the episodes' own columns, and its values."""
        tests = {
            "split = ?": self.split,
            "step = ?": self.step,
            "status = ?": self.status,
            "env = ?": self.env,
            "success = ?": self.success,
            "reward >= ?": self.min_reward,
            "reward <= ?": self.max_reward,
        }
        known = {test: value for test, value in tests.items() if value is not None}
        return " AND ".join(known), list(known.values())

    def order(self) -> str:
        down = self.sort.startswith("-")
        columns = SORTS[self.sort.removeprefix("-")].split(", ")
        return ", ".join(f"{name} {'DESC' if down else 'ASC'}" for name in columns)


class EpisodeIndex:
    """The index of one run. Used by several threads; every use has a connection of its own.

    Args:
        cache: the folder of indexes; None: `cache_folder()`.
    """

    def __init__(self, folder: RunFolder, *, cache: Path | None = None) -> None:
        self.folder = folder
        self._cache = cache
        self._building = threading.Lock()

    @cached_property
    def path(self) -> Path:
        """Where the index is, once it is used."""
        name = hashlib.sha256(os.fsencode(self.folder.path)).hexdigest()[:32]
        return cache_folder(self._cache) / f"{name}-{VERSION}.sqlite"

    def stale(self) -> list[StepFile]:
        """The files of episodes that are not indexed as they are now."""
        there = self.folder.step_files("episodes")
        with self._connected() as database:
            known = {
                (split, step): (size, changed)
                for split, step, size, changed in database.execute(
                    "SELECT split, step, size, changed FROM files"
                )
            }
            gone = known.keys() - {(file.split, file.step) for file in there}
            if gone:
                with self._building, database:
                    for split, step in gone:
                        self._forget(database, split, step)
        return [
            file
            for file in there
            if known.get((file.split, file.step)) != (file.size, file.changed)
        ]

    def progress(self) -> tuple[int, int]:
        """(files that are indexed, all files)."""
        count = len(self.folder.step_files("episodes"))
        return count - len(self.stale()), count

    def add(self, file: StepFile) -> None:
        """Indexes one file, in place of what was known of it."""
        skips = Skips()
        with self._building, self._connected() as database, database:
            self._forget(database, file.split, file.step)
            count, batch = 0, list[tuple[EpisodeRow, str]]()
            try:
                for found in read_rows(self.folder, file.split, file.step, skips):
                    batch.append(found)
                    count += 1
                    if len(batch) == BATCH:
                        _insert(database, file, batch)
                        batch.clear()
            except OSError as error:
                name = step_name("episodes", file.split, file.step)
                skips.add(f"{name} cannot be read: {error.strerror or error}")
            _insert(database, file, batch)
            _judge(database, file)
            said = "\n".join(words.replace("\n", " ") for words in skips.words())
            database.execute(
                "INSERT INTO files VALUES(?, ?, ?, ?, ?, ?)",
                (file.split, file.step, file.size, file.changed, count, said),
            )

    def fresh(self, split: str, step: int) -> None:
        """Indexes the file of one step if it is not indexed as it is now."""
        for file in self.stale():
            if (file.split, file.step) == (split, step):
                self.add(file)

    def search(self, query: Filter) -> tuple[int, list[dict[str, Json]]]:
        """(how many episodes match, the asked page of them)."""
        where, values = query.where()
        with self._connected() as database:
            if query.text:
                tables = "episodes JOIN texts USING(key)"
                where, values = f"{where} AND instr(text, ?)", [*values, query.text.casefold()]
            else:
                tables = "episodes"
            database.execute("BEGIN")  # a file that is indexed again meanwhile gets other keys
            keys = [
                key
                for (key,) in database.execute(
                    f"SELECT key FROM {tables} WHERE {where} ORDER BY {query.order()}", values
                )
            ]
            page = keys[query.offset : query.offset + query.limit]
            found = {row["key"]: row for row in _select(database, page)}
        return len(keys), [shown_row(found[key]) for key in page]

    def counts(self, column: str, *, split: str, step: int | None) -> dict[str, int]:
        """How many episodes have each value of `status` or `env`."""
        assert column in ("status", "env")
        where, values = Filter(split=split, step=step).where()
        with self._connected() as database:
            query = f"SELECT {column}, count(*) FROM episodes WHERE {where} GROUP BY {column}"
            return dict(database.execute(query, values).fetchall())

    def rows(self, split: str, step: int) -> list[dict[str, Json]]:
        """All rows of one step, in order."""
        return self.search(Filter(split=split, step=step, limit=2**31))[1]

    def start(self, split: str, step: int, row: int) -> int | None:
        """Where an episode's line starts in its file; None if there is no such episode."""
        query = "SELECT start FROM episodes WHERE split = ? AND step = ? AND row = ?"
        with self._connected() as database:
            found = database.execute(query, (split, step, row)).fetchone()
        return None if found is None else int(found[0])

    def errors(self, *, most: int = 3) -> list[tuple[str, int]]:
        """The most frequent errors of failed training episodes."""
        query = (
            "SELECT status || ': ' || substr(error, 1, 200), count(*) FROM episodes "
            "WHERE split = 'step' AND error IS NOT NULL GROUP BY 1 ORDER BY 2 DESC LIMIT ?"
        )
        with self._connected() as database:
            return [(str(text), int(count)) for text, count in database.execute(query, (most,))]

    def skipped(self, split: str | None = None, step: int | None = None) -> Skips:
        """Reasons why data could not be read, of all files or of one."""
        query = "SELECT skipped FROM files WHERE skipped != '' AND (? IS NULL OR split = ?) "
        query += "AND (? IS NULL OR step = ?) ORDER BY split, step"
        skips = Skips()
        with self._connected() as database:
            for (words,) in database.execute(query, (split, split, step, step)):
                for line in str(words).split("\n"):
                    skips.add(line)
        return skips

    @contextlib.contextmanager
    def _connected(self) -> Generator[sqlite3.Connection]:
        database = self._open()
        try:
            yield database
        finally:
            database.close()

    def _open(self) -> sqlite3.Connection:
        try:
            with _locked(self.path.parent):
                try:
                    return _prepared(self.path)
                except sqlite3.OperationalError:
                    raise
                except sqlite3.DatabaseError:
                    self.delete()  # a torn or foreign file
                    return _prepared(self.path)
        except OSError as error:  # of the lock: no index either
            raise sqlite3.OperationalError(str(error)) from error

    def delete(self) -> None:
        """Removes the index. The next use builds another: it is only a cache."""
        for end in ("", "-wal", "-shm"):
            self.path.with_name(self.path.name + end).unlink(missing_ok=True)

    def _forget(self, database: sqlite3.Connection, split: str, step: int) -> None:
        place = (split, step)
        keys = "SELECT key FROM episodes WHERE split = ? AND step = ?"
        database.execute(f"DELETE FROM texts WHERE key IN ({keys})", place)
        database.execute("DELETE FROM episodes WHERE split = ? AND step = ?", place)
        database.execute("DELETE FROM files WHERE split = ? AND step = ?", place)


def cache_folder(folder: Path | None = None) -> Path:
    """The folder, or else `$XDG_CACHE_HOME/turnwise/inspect`, made if needed and cleared of old
    indexes; a temporary folder where that cannot be written or locked."""
    if folder is None:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(home) / "turnwise" / "inspect"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(folder):
            for old in folder.glob("*.sqlite*"):
                with contextlib.suppress(OSError):
                    if time.time() - old.stat().st_mtime > KEPT_DAYS * 86400:
                        old.unlink()
    except OSError:
        return Path(tempfile.mkdtemp(prefix="turnwise-inspect-"))
    return folder


@contextlib.contextmanager
def _locked(folder: Path) -> Generator[None]:
    """Holds the lock of the folder. Threads and processes make and delete indexes one at a time, so
    that none meets an index that is half made, or deletes one that another has just made. SQLite's
    own locks do not see to that: they end with the file, and a change to WAL does not wait."""
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:  # not by closing: a process that was forked meanwhile has the file open too
            fcntl.flock(file, fcntl.LOCK_UN)


def _prepared(path: Path) -> sqlite3.Connection:
    path.touch()  # so that its age is that of its last use
    database = sqlite3.connect(path, timeout=30.0)
    try:
        database.executescript(f"PRAGMA synchronous = OFF; PRAGMA journal_mode = WAL; {_TABLES}")
    except BaseException:
        database.close()
        raise
    return database


def _insert(
    database: sqlite3.Connection, file: StepFile, found: Sequence[tuple[EpisodeRow, str]]
) -> None:
    marks = ", ".join("?" * (2 + len(EpisodeRow._fields)))
    query = f"INSERT INTO episodes(split, step, {_COLUMNS}) VALUES({marks})"
    for row, text in found:
        key = database.execute(query, (file.split, file.step, *row)).lastrowid
        database.execute("INSERT INTO texts VALUES(?, ?)", (key, text))


def _judge(database: sqlite3.Connection, file: StepFile) -> None:
    """Counts episodes as failed that heard nothing of success where others of their environment
    did, as `turnwise.log.metrics.judged` does."""
    failed = ", ".join(f"'{status.value}'" for status in Status if status.failed)
    played = f"split = ? AND step = ? AND status NOT IN ({failed})"
    speaking = f"SELECT env FROM episodes WHERE {played} AND success IS NOT NULL"
    query = f"UPDATE episodes SET success = 0 WHERE {played} AND success IS NULL"
    database.execute(f"{query} AND env IN ({speaking})", (file.split, file.step) * 2)


def _select(database: sqlite3.Connection, keys: Sequence[int]) -> list[dict[str, Json]]:
    names = ("key", "split", "step", *EpisodeRow._fields)
    columns = ", ".join(f'"{name}"' for name in names)
    found: list[dict[str, Json]] = []
    for at in range(0, len(keys), 500):
        part = keys[at : at + 500]
        query = f"SELECT {columns} FROM episodes WHERE key IN ({', '.join('?' * len(part))})"
        found += [dict(zip(names, row, strict=True)) for row in database.execute(query, part)]
    return found
