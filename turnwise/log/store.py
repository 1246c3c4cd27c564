# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false
"""The run directory: all files of a run, written by one process and readable by any.

    config.yaml            the resolved config
    metrics.jsonl          one object per step
    ledger.jsonl           token fidelity: what was sampled and what was trained on, per step
    events.jsonl           messages to the user: a fallback, a resume, a refused checkpoint
    timings.jsonl          everything measured with a clock
    episodes/step_000012.jsonl, episodes/eval_000012.jsonl
    credit/step_000012.jsonl     advantages, values, returns, gaps, entropies per token
    timings/step_000012.jsonl    seconds per turn, and when they began
    checkpoints/, pieces.json, summary.json, report.html

Two equal runs leave equal metrics, ledgers, episodes and credit, to the byte: nothing measured with
a clock is in them.
"""

import contextlib
import errno
import fcntl
import json
import math
import os
import re
import tempfile
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, TextIO, TypeVar

import yaml

from turnwise.config.known import remember
from turnwise.config.load import load_config
from turnwise.config.schema import Config, LogConfig
from turnwise.json_lines import FileError, read_json, read_json_lines
from turnwise.log.events import Evaluated
from turnwise.log.records import (
    CreditRow,
    LedgerEntry,
    RunDirectoryError,
    checked,
    event_row,
    ledger_entry,
    number_row,
    obj,
    read_lines,
    step_row,
)
from turnwise.types import Episode, Json

__all__ = [
    "CreditRow",
    "LedgerEntry",
    "RunDirectory",
    "RunDirectoryError",
    "RunReader",
    "ledger_entry",
    "read_lines",
]

APPENDED = ("metrics.jsonl", "ledger.jsonl", "timings.jsonl")
"""Truncated on resume. events.jsonl is not: it is a log of what happened, including resumes."""
PER_STEP = ("episodes", "credit", "timings")
K = TypeVar("K")
_STEP = re.compile(r"(?<=_)[0-9]{6,18}$", re.ASCII)
"""In the name of a file of one step."""


class RunReader:
    """Reads a run directory, also while another process writes it. A torn last line is left out.

    Example:
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> with RunDirectory.create(LogConfig(dir=folder.name, name="a"), Config()) as run:
        ...     run.write_metrics(0, {"rollout/reward": 1.5})
        >>> RunReader(run.path).metrics()
        [{'step': 0, 'rollout/reward': 1.5}]
        >>> folder.cleanup()
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if not (self.path / "config.yaml").is_file():
            raise RunDirectoryError(
                f"{self.path} is not a run directory: it has no config.yaml; give a folder of runs/"
            )

    @property
    def config(self) -> Config:
        """The resolved config that the run was started with."""
        try:
            return load_config(self.path / "config.yaml")
        except ValueError as error:
            raise RunDirectoryError(f"{self.path} is not a run directory: {error}") from error

    def metrics(self) -> list[dict[str, float | None]]:
        """One dict per step, in order; rows of a step are merged. Values that were not finite are
        None."""
        return merge_rows(self.rows("metrics.jsonl"))

    def timings(self) -> list[dict[str, float | None]]:
        return merge_rows(self.rows("timings.jsonl"))

    def rows(self, name: str) -> list[dict[str, Json]]:
        """The rows of metrics.jsonl or timings.jsonl as they were written."""
        return read_lines(self.path / name, number_row)

    def curve(self, name: str) -> tuple[list[int], list[float]]:
        """Steps and finite values of one metric."""
        rows = [
            (int(row["step"] or 0), row.get(name)) for row in (*self.metrics(), *self.timings())
        ]
        found = [(step, value) for step, value in rows if value is not None]
        return [step for step, _ in found], [value for _, value in found]

    def ledger(self) -> list[LedgerEntry]:
        return read_lines(self.path / "ledger.jsonl", lambda row: checked(LedgerEntry(**row)))

    def events(self) -> list[dict[str, Json]]:
        return read_lines(self.path / "events.jsonl", event_row)

    def summary(self) -> dict[str, Json]:
        return self._whole("summary.json", summary_of)

    def pieces(self) -> dict[int, str]:
        """Token id -> its text, for the ids that occur in the stored episodes."""
        return self._whole(
            "pieces.json", lambda data: {int(key): str(text) for key, text in obj(data).items()}
        )

    def steps(self, kind: str = "episodes", split: str = "step") -> list[int]:
        """Steps of which a file of this kind (episodes, credit, timings) is stored."""
        names = (path.stem for path in (self.path / kind).glob(f"{split}_*.jsonl"))
        return sorted(int(name[1 + len(split) :]) for name in names if _STEP.search(name))

    def size(self, kind: str, step: int, split: str = "step") -> int:
        """Bytes of one such file."""
        return self._file(kind, split, step).stat().st_size

    def episodes(self, step: int, split: str = "step") -> list[Episode]:
        """The step's episodes, their seconds put back."""
        episodes = read_lines(self._file("episodes", split, step), read_episode)
        file = self._file("timings", split, step)
        seconds = {row.id: row for row in read_lines(file, lambda row: checked(_Seconds(**row)))}
        try:
            return [_with_seconds(episode, seconds.get(episode.id)) for episode in episodes]
        except ValueError as error:
            raise RunDirectoryError(f"{file} tells of other turns than the episodes") from error

    def credit(self, step: int) -> list[CreditRow]:
        return read_lines(
            self._file("credit", "step", step), lambda row: checked(CreditRow.from_json(row))
        )

    def _whole(self, name: str, read: Callable[[Json], dict[K, Json]]) -> dict[K, Json]:
        path = self.path / name
        try:
            return read_json(path, read) if path.is_file() else {}
        except FileError as error:
            raise RunDirectoryError(f"{error}; the file was edited") from error

    def _file(self, kind: str, split: str, step: int) -> Path:
        return self.path / kind / f"{split}_{step:06d}.jsonl"


class RunDirectory(RunReader):
    """A run directory opened for writing by one process, which its lock file names.

    Every file that grows is written a line at a time; every file of one step is written to a
    temporary file and renamed. A run that is killed at any moment leaves at most one incomplete
    last line, which the next `open` removes.
    """

    def __init__(self, path: Path) -> None:
        self._lock = _lock(path)
        try:
            super().__init__(path)
            for kind in (*PER_STEP, "checkpoints"):
                (path / kind).mkdir(exist_ok=True)
            self._files = {name: _open_lines(path / name) for name in (*APPENDED, "events.jsonl")}
        except BaseException:
            self._lock.close()
            raise
        self._step = -1
        self._said: set[int] | None = None
        """Ids in the stored episodes. None: they have to be read again."""
        self._pieces: dict[int, str] = {}

    @classmethod
    def create(cls, log: LogConfig, config: Config, *, default_name: str = "run") -> "RunDirectory":
        """A new run directory with the config in it.

        Without a name in the config, a free one is made from `default_name`; a name that is taken
        is refused.
        """
        check_new_run(log)
        root = Path(log.dir)
        root.mkdir(parents=True, exist_ok=True)
        path = _new_folder(root, log.name, default_name)
        _write_whole(path / "config.yaml", _config_text(config))
        remember(_config_text(config))
        run = cls(path)
        run._said = set()
        return run

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> "RunDirectory":
        """An existing run directory, to go on writing. Follow with `truncate_to` what the
        checkpoint knows."""
        path = Path(path)
        if not path.is_dir():
            raise RunDirectoryError(
                f"there is no run directory {path}; `ls {path.parent}` shows what there is"
            )
        return cls(path)

    def write_config(self, config: Config, *, changed: Mapping[str, list[Json]]) -> None:
        """Stores the config that the run goes on with; what changed is an event."""
        self._write_whole("config.yaml", _config_text(config))
        remember(_config_text(config))
        self.write_event(
            "config_changed",
            f"goes on with other settings: {', '.join(changed)}",
            changed=dict(changed),
        )

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def write_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends the step's row. `time/...` goes to timings.jsonl; what is not finite becomes null
        and a note."""
        for name, wanted in (("metrics.jsonl", False), ("timings.jsonl", True)):
            chosen = {
                key: float(value)
                for key, value in metrics.items()
                if key.startswith("time/") == wanted
            }
            if chosen or not wanted:
                self._append(name, step, {"step": step, **_finite(chosen)})

    def write_episodes(
        self, step: int, episodes: Iterable[Episode], *, split: str = "step"
    ) -> None:
        """Stores the episodes of a step ("step") or of an evaluation ("eval"), seconds apart from
        the rest."""
        episodes = list(episodes)
        if self._said is not None:
            self._said |= _ids_of(episodes)
        lines = (without_seconds(episode).to_line() for episode in episodes)
        self._write_step("episodes", split, step, lines)
        began = min((s for one in episodes if (s := one.reset_start) is not None), default=0.0)
        rows = (json.dumps(_seconds(episode, began)) for episode in episodes)
        self._write_step("timings", split, step, rows)

    def write_credit(self, step: int, rows: Iterable[CreditRow]) -> None:
        self._write_step("credit", "step", step, (json.dumps(row.to_json()) for row in rows))

    def write_ledger(self, entry: LedgerEntry) -> None:
        self._append("ledger.jsonl", entry.step, asdict(entry))

    def write_event(
        self, kind: str, message: str, *, step: int | None = None, **facts: Json
    ) -> None:
        """Records a notice for the user. `turnwise doctor` shows it."""
        self._append(
            "events.jsonl", step, {"kind": kind, "message": message, "step": step, **facts}
        )

    def write_summary(self, summary: Mapping[str, Json]) -> None:
        """Stores the result of the run, such as success before and after."""
        self._write_whole("summary.json", json.dumps(_finite_json(summary), indent=2) + "\n")

    def write_pieces(self, piece: Callable[[int], str]) -> None:
        """Stores the text of every token in the stored episodes, so that who shows them needs no
        tokenizer. Cheap where nothing is new, so that it can follow every step."""
        if self._said is None:
            self._said = self._stored_ids()
        new = self._said - self._pieces.keys()
        if not new and (self.path / "pieces.json").is_file():
            return
        self._pieces |= {token: piece(token) for token in new}
        pieces = {str(token): self._pieces[token] for token in sorted(self._pieces)}
        self._write_whole("pieces.json", json.dumps(pieces, ensure_ascii=False) + "\n")

    def positions(self) -> dict[str, int]:
        """The current file sizes, after a sync to disk. Stored in checkpoints for `truncate_to`."""
        sizes: dict[str, int] = {"step": self._step}
        for name in APPENDED:
            file = self._files[name]
            file.flush()
            os.fsync(file.fileno())
            sizes[name] = os.fstat(file.fileno()).st_size
        return sizes

    def truncate_to(self, positions: Mapping[str, int] | int) -> None:
        """Truncates the files to these positions, or to this step, so that a resumed run writes the
        rest again."""
        if isinstance(positions, int):
            step = positions
            sizes = {name: _size_up_to(self.path / name, step) for name in APPENDED}
        else:
            step = positions["step"]
            sizes = {name: positions[name] for name in APPENDED}
        for name, size in sizes.items():
            there = os.fstat(self._files[name].fileno()).st_size
            if there < size:
                raise RunDirectoryError(
                    f"{self.path / name} has {there} bytes, but had {size} when the checkpoint was "
                    "written: the file "
                    "was edited or lost; resume from an earlier checkpoint, or start a new run"
                )
            os.ftruncate(self._files[name].fileno(), size)
        for kind in PER_STEP:
            for path in (self.path / kind).glob("*_*.jsonl"):
                if (found := _STEP.search(path.stem)) and int(found[0]) > step:
                    path.unlink()
        self._step = step
        self._said, self._pieces = None, {}

    def close(self) -> None:
        """Closes the files and releases the lock. May be called twice."""
        for file in self._files.values():
            with contextlib.suppress(OSError):  # a full disk was reported when the line was written
                file.close()
        self._lock.close()

    def __enter__(self) -> "RunDirectory":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _stored_ids(self) -> set[int]:
        ids: set[int] = set()
        for split in ("step", "eval"):
            for step in self.steps(split=split):
                ids |= _ids_of(read_lines(self._file("episodes", split, step), Episode.from_json))
        return ids

    def _append(self, name: str, step: int | None, row: Mapping[str, Json]) -> None:
        line = json.dumps(row, ensure_ascii=False, allow_nan=False)
        with _disk_errors(self.path, self._step):
            self._files[name].write(line + "\n")
        self._step = max(self._step, -1 if step is None else step)

    def _write_step(self, kind: str, split: str, step: int, lines: Iterable[str]) -> None:
        if split not in ("step", "eval"):
            raise ValueError(f"split must be 'step' (training) or 'eval', got {split!r}")
        self._write_whole(
            f"{kind}/{split}_{step:06d}.jsonl", "".join(line + "\n" for line in lines)
        )
        self._step = max(self._step, step)

    def _write_whole(self, name: str, text: str) -> None:
        with _disk_errors(self.path, self._step):
            _write_whole(self.path / name, text)


def _ids_of(episodes: Iterable[Episode]) -> set[int]:
    return {
        token for episode in episodes for turn in episode.turns for token in turn.completion.ids
    }


def merge_rows(rows: Iterable[Mapping[str, Json]]) -> list[dict[str, float | None]]:
    """One dict per step, in order."""
    steps: dict[int, dict[str, float | None]] = {}
    for row in rows:
        found = steps.setdefault(row["step"], {"step": row["step"]})
        found.update(
            {key: value for key, value in row.items() if key not in ("step", "not_finite")}
        )
    return [steps[step] for step in sorted(steps)]


def _finite(values: Mapping[str, float]) -> dict[str, Json]:
    wrong = {key: str(value) for key, value in values.items() if not math.isfinite(value)}
    clean: dict[str, Json] = {key: None if key in wrong else value for key, value in values.items()}
    return {**clean, "not_finite": wrong} if wrong else clean


def _finite_json(data: Any) -> Json:
    if isinstance(data, Mapping):
        return {str(key): _finite_json(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite_json(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def _seconds(episode: Episode, began: float) -> dict[str, Json]:
    """The row of timings/. Starts count from `began`; where one is not known, none is stored."""
    turns = episode.turns
    row: dict[str, Json] = {
        "id": episode.id,
        "generate": [round(turn.generate_seconds, 6) for turn in turns],
        "env": [round(turn.env_seconds, 6) for turn in turns],
    }
    starts = [episode.reset_start, *(at for t in turns for at in (t.generate_start, t.env_start))]
    known = [round(at - began, 6) for at in starts if at is not None]
    if len(known) < len(starts):
        return row
    row |= {"reset_start": known[0], "reset": round(episode.reset_seconds, 6)}
    return row | {"generate_start": known[1::2], "env_start": known[2::2]}


def read_episode(row: Mapping[str, Json]) -> Episode:
    """The episode of a stored row."""
    return checked(Episode.from_json(row))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Seconds:
    """Times of one episode, turn by turn."""

    id: str
    generate: tuple[float, ...]
    env: tuple[float, ...]
    reset_start: float | None = None
    """Seconds since the first episode of the step began; None where starts are not stored."""
    reset: float = 0.0
    generate_start: tuple[float, ...] | None = None
    env_start: tuple[float, ...] | None = None


def summary_of(data: Json) -> dict[str, Json]:
    """The outcome of a run, its evaluations with all their fields."""

    def evaluated(one: Json) -> Json:
        return checked(Evaluated.from_json(obj(one))).to_json()

    summary = obj(data)
    for name in ("before", "after"):
        if summary.get(name) is not None:
            summary[name] = evaluated(summary[name])
    if "baselines" in summary:
        summary["baselines"] = [evaluated(one) for one in summary["baselines"] or ()]
    return summary


def without_seconds(episode: Episode) -> Episode:
    """The episode without anything measured with a clock: equal for equal runs."""
    return _with_seconds(episode, None)


def _with_seconds(episode: Episode, seconds: _Seconds | None) -> Episode:
    zeros, unknown = (0.0,) * len(episode.turns), (None,) * len(episode.turns)
    seconds = seconds or _Seconds(id=episode.id, generate=zeros, env=zeros)
    times = zip(
        seconds.generate,
        seconds.env,
        unknown if seconds.generate_start is None else seconds.generate_start,
        unknown if seconds.env_start is None else seconds.env_start,
        strict=True,
    )
    turns = tuple(
        replace(turn, generate_seconds=ours, env_seconds=theirs, generate_start=asked, env_start=at)
        for turn, (ours, theirs, asked, at) in zip(episode.turns, times, strict=True)
    )
    return replace(
        episode, turns=turns, reset_start=seconds.reset_start, reset_seconds=seconds.reset
    )


def _size_up_to(path: Path, step: int) -> int:
    """Bytes of the lines before the first one of a later step."""
    content = path.read_bytes()
    kept = content.count(b"\n")
    try:
        for number, row in read_json_lines(path, lambda row: step_row(obj(row)), torn=True):
            if row["step"] > step:
                kept = number - 1
                break
    except FileError as error:
        raise RunDirectoryError(f"{error}; the file was edited") from error
    return sum(len(line) + 1 for line in content.split(b"\n")[:kept])


def check_new_run(log: LogConfig) -> None:
    """Makes nothing.

    Raises:
        RunDirectoryError: a new run directory cannot be made with these settings.
    """
    root = Path(log.dir)
    try:
        if log.name is not None and (root / log.name).exists():
            raise _already_there(root / log.name)
        there = next(folder for folder in (root, *root.parents) if folder.exists())
        with tempfile.TemporaryDirectory(prefix=".turnwise-", dir=there):
            pass
    except OSError as error:
        raise RunDirectoryError(
            f"log.dir={log.dir}: a run cannot be written there ({error.strerror}); set log.dir to "
            "a folder that you may write to"
        ) from error


def _already_there(path: Path) -> RunDirectoryError:
    return RunDirectoryError(
        f"{path} exists: a run never writes over another; choose another log.name, remove it, or "
        f"go on with `turnwise train --resume {path}`"
    )


def _new_folder(root: Path, name: str | None, default: str) -> Path:
    for number in range(1, 100_000):
        path = root / (name or (default if number == 1 else f"{default}-{number}"))
        try:
            path.mkdir()
        except FileExistsError:
            if name is not None:
                raise _already_there(path) from None
        else:
            return path
    raise RunDirectoryError(f"{root} is full of runs named {default}; set log.name")


def _open_lines(path: Path) -> TextIO:
    if path.is_fifo():  # opening it would wait for a reader
        raise RunDirectoryError(f"{path} is a pipe, so the run cannot be written to")
    if path.is_file():
        content = path.read_bytes()
        if content and not content.endswith(b"\n"):
            os.truncate(path, content.rfind(b"\n") + 1)
    return path.open("a", buffering=1, encoding="utf-8")


def _config_text(config: Config) -> str:
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _write_whole(path: Path, text: str) -> None:
    beside = path.with_name(path.name + ".tmp")
    with beside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


@contextlib.contextmanager
def _disk_errors(path: Path, step: int) -> Generator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise RunDirectoryError(
            f"no room left on the disk of {path} ({error.strerror}) after step {step}: free some "
            "space, then go on "
            f"from the last checkpoint with `turnwise train --resume {path}`"
        ) from error


_held: weakref.WeakSet[TextIO] = weakref.WeakSet()
"""Locks of this process. A forked worker must not keep one alive when its parent is gone."""


def _drop_locks() -> None:
    for file in list(_held):
        file.close()


os.register_at_fork(after_in_child=_drop_locks)


def is_locked(file: BinaryIO) -> bool:
    """True if a process writes the run whose lock file this is."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(file, fcntl.LOCK_UN)
    return False


def _taken(file: TextIO) -> bool:
    """Takes the lock; False if another process keeps it. One that only looks whether the run is
    written (`is_locked`) holds it for a moment."""
    for wait in (0.0, 0.01, 0.05, 0.1, 0.2):
        time.sleep(wait)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue
        return True
    return False


def has_writer(path: Path) -> bool | None:
    """Whether a process writes this run directory now; None where that cannot be found out."""
    if (path / "lock").is_fifo():  # opening it would wait for a writer
        return None
    try:
        with (path / "lock").open("rb") as file:
            return is_locked(file)
    except FileNotFoundError:
        return False
    except OSError:  # no right to read it, or a file system without locks
        return None


def _lock(path: Path) -> TextIO:
    file = (path / "lock").open("a+", encoding="utf-8")
    if not _taken(file):
        file.seek(0)
        owner = file.read().strip() or "unknown"
        file.close()
        raise RunDirectoryError(
            f"{path} is in use by process {owner}: a run directory has one writer; wait for it, or "
            "stop it"
        )
    file.seek(0)
    file.truncate()
    file.write(f"{os.getpid()}\n")
    file.flush()
    _held.add(file)
    return file
