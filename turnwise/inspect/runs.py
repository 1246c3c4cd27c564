"""Runs of the folders that the user named: their names, and what a list shows of each."""

import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import yaml

from turnwise.config.schema import Config
from turnwise.config.yaml_io import parse_yaml
from turnwise.inspect.folder import InspectError, RunFolder, Skips
from turnwise.inspect.follow import read_news
from turnwise.inspect.index import EpisodeIndex
from turnwise.log.doctor import Diagnosis
from turnwise.log.store import is_locked, summary_of
from turnwise.types import Json

DEPTH = 3
"""Folders below a named one in which runs are looked for."""
MAX_RUNS = 5000
MAX_CONFIG = 1024 * 1024
State = Literal["running", "ended", "stopped"]


class Run:
    """One run that the server shows, and what it remembers of it."""

    def __init__(self, path: Path, name: str, *, cache: Path | None = None) -> None:
        self.name = name
        self.folder = RunFolder(path)
        self.index = EpisodeIndex(self.folder, cache=cache)
        self.head = Headline()
        self.findings: list[Diagnosis] | None = None
        """None: not looked for yet, or the run cannot be examined."""
        self.outcome: list[dict[str, Json]] = []
        self.examined: tuple[tuple[int, int], ...] = ()
        """Stamps of the files at the last scan; empty before."""
        self.said: list[str] = []
        """Reasons why files could not be read at the last scan."""
        self._config: tuple[tuple[int, int], str, Config | None, str | None] | None = None
        self._lock = threading.Lock()

    def config(self, skips: Skips) -> tuple[str, Config | None]:
        """(the text of config.yaml, the config; None where it cannot be read)."""
        now = stamp(self.folder, "config.yaml")
        with self._lock:
            if self._config is None or self._config[0] != now:
                text, config, wrong = read_config(self.folder)
                self._config = now, text, config, wrong
            _, text, config, wrong = self._config
        if wrong is not None:
            skips.add(wrong)
        return text, config

    @property
    def known(self) -> bool:
        """Whether the config was read before, so that a list costs nothing."""
        return self._config is not None

    def state(self, *, running: bool | None = None) -> State:
        """Whether the run is being written now, or how it ended.

        Args:
            running: whether it goes on. None: as its lock says.
        """
        if running is None:
            with suppress(OSError), self.folder.open("lock") as lock:
                running = is_locked(lock)
        if running:
            return "running"
        summary = self.summary(Skips())
        return "ended" if summary and not summary.get("stopped") else "stopped"

    def summary(self, skips: Skips) -> dict[str, Json]:
        return self.folder.json("summary.json", summary_of, skips) or {}


@dataclass(slots=True)
class Headline:
    """The numbers of a list, followed as metrics.jsonl grows."""

    step: int = 0
    reward: float | None = None
    first: float | None = None
    """Success of the first evaluation."""
    last: float | None = None
    evaluations: int = 0
    _position: str = field(default="")

    def follow(self, folder: RunFolder, *, until: float) -> None:
        """Reads what is new, as long as there is time."""
        more = True
        while more and time.monotonic() < until:
            news = read_news(folder, "metrics.jsonl", self._position, Skips())
            if news.reset:
                self.step, self.evaluations = 0, 0
                self.reward = self.first = self.last = None
            for row in news.rows:
                self._take(row)
            self._position, more = news.position, news.more

    def _take(self, row: dict[str, Json]) -> None:
        if "rollout/reward" in row:
            self.step = max(self.step, row["step"])
            self.reward = row["rollout/reward"]
        if row.get("eval/success") is not None:
            self.evaluations += 1
            if self.evaluations == 1:
                self.first = row["eval/success"]
            else:
                self.last = row["eval/success"]


class Runs:
    """All runs of the named folders. A run keeps its name as long as the server lives.

    Args:
        roots: run directories, or folders of them.
        cache: where indexes are kept; None: the user's cache.
    """

    def __init__(self, roots: Sequence[Path], *, cache: Path | None = None) -> None:
        self.roots = [root.resolve() for root in roots]
        self._cache = cache
        self._runs: dict[Path, Run] = {}
        self._scanned = -1.0
        self._skipped: list[dict[str, str]] = []
        self._lock = threading.Lock()

    def scan(self, *, seconds: float = 1.0) -> tuple[list[Run], list[dict[str, str]]]:
        """(the runs that are there now, what was passed over). At most once in `seconds`."""
        with self._lock:
            if time.monotonic() - self._scanned > seconds:
                self._skipped = []
                there = dict.fromkeys(path for root in self.roots for path in self._under(root))
                known, self._runs = self._runs, {}
                taken = {run.name for run in known.values()}
                for path in there:
                    run = known.get(path)
                    if run is None:
                        run = Run(path, _free_name(path, taken), cache=self._cache)
                        taken.add(run.name)
                    self._runs[path] = run
                self._scanned = time.monotonic()
            return list(self._runs.values()), list(self._skipped)

    def find(self, name: str) -> Run:
        """The run of this name.

        Raises:
            InspectError: there is none.
        """
        for seconds in (1.0, 0.0):
            for run in self.scan(seconds=seconds)[0]:
                if run.name == name:
                    return run
        raise InspectError(f"there is no run {name[:200]!r}; it may have been deleted")

    def _under(self, root: Path, depth: int = 0) -> Iterator[Path]:
        if (root / "config.yaml").is_file():
            yield root
            return
        if depth == DEPTH:
            return
        try:
            with os.scandir(root) as entries:
                below = sorted(entries, key=lambda entry: entry.name)[:MAX_RUNS]
        except OSError as error:
            if depth == 0:
                self._skip(root, f"cannot be read: {error.strerror or error}")
            return
        for entry in below:
            with suppress(OSError):
                if entry.name.startswith("."):
                    continue
                if entry.is_symlink():
                    if entry.is_dir():
                        self._skip(Path(entry.path), "is a link; name the folder itself")
                elif entry.is_dir():
                    yield from self._under(Path(entry.path), depth + 1)

    def _skip(self, path: Path, reason: str) -> None:
        if len(self._skipped) < 100:
            self._skipped.append({"name": printable(path.name), "reason": reason})


def _free_name(path: Path, taken: set[str]) -> str:
    """A name for the run that no other has."""
    name = printable(path.name) or "run"
    if name in taken:
        name = f"{printable(path.parent.name)} {name}"
    first, number = name, 2
    while name in taken:
        name, number = f"{first} ({number})", number + 1
    return name


def read_config(folder: RunFolder) -> tuple[str, Config | None, str | None]:
    """(the text of config.yaml, the config, what is wrong with it). Nothing is loaded besides this
    file: a stored config is whole."""
    skips = Skips()
    data = folder.whole("config.yaml", skips, limit=MAX_CONFIG)
    if data is None:
        return "", None, (skips.words() or ["config.yaml is missing"])[0]
    text = data.decode("utf-8", "replace")
    try:
        return text, Config.model_validate(parse_yaml(text)), None
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        said = " ".join(str(error).split())
        return text, None, f"config.yaml cannot be read: {said[:300]}"


def stamp(folder: RunFolder, name: str) -> tuple[int, int]:
    """(size, time of change) of a file, zeros where there is none."""
    try:
        about = os.stat(folder.path / name, follow_symlinks=False)
    except OSError:
        return 0, 0
    return about.st_size, about.st_mtime_ns


def printable(name: str) -> str:
    """The name of a folder as a text that a page and a url can hold.

    Example:
        >>> printable("a\\nb\\udcff")
        'a?b?'
    """
    return re.sub(r"[\x00-\x1f\x7f\ud800-\udfff]", "?", name)
