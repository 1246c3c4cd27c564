"""turnwise's command for runs that share a GPU: one of them computes at a time.

    python benchmarks/gpu/turns.py LOCK TIMES BACKEND train RECIPE KEY=VALUE ...

A training step and an evaluation wait for the lock of the file LOCK, which other runs hold in
between. Starts, checkpoints and whatever else needs no GPU go on beside them. So the seconds of a
step are those of a run alone, though the runs do not wait for each other's start. TIMES gets a line
for each step: {"seconds": in the step, "waited": for the lock, "ended": time of day}.
"""

import fcntl
import json
import sys
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any


class Turns:
    """A lock that processes share, by file.

    Args:
        lock: any file; made where it is missing.
        times: gets a line per step. None: nothing is written.
        hold_s: a holder that begins again within so many seconds keeps the lock. Steps of a tenth
            of a second would else wait for another run's seconds each time.
    """

    def __init__(self, lock: Path, times: Path | None = None, *, hold_s: float = 0.0) -> None:
        self._file = lock.open("a")
        self._times, self._hold_s = times, hold_s
        self._held: float | None = None
        self._begun = 0.0
        self._seconds = self._waited = 0.0

    def begin(self) -> None:
        asked = time.perf_counter()
        if self._held is None:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            self._held = time.perf_counter()
        self._begun = time.perf_counter()
        self._waited += self._begun - asked

    def end(self) -> None:
        """The computation is over, for now."""
        assert self._held is not None, "end() without begin()"
        now = time.perf_counter()
        self._seconds += now - self._begun
        if now - self._held >= self._hold_s:
            self.leave()

    def leave(self) -> None:
        """Others may go on, whatever `hold_s` says."""
        fcntl.flock(self._file, fcntl.LOCK_UN)
        self._held = None

    def end_step(self) -> None:
        """A step is over: writes its seconds, in all turns that it took."""
        self.end()
        row = {"seconds": self._seconds, "waited": self._waited, "ended": time.time()}
        if self._times is not None:
            with self._times.open("a", encoding="utf-8") as out:
                out.write(json.dumps(row) + "\n")
        self._seconds = self._waited = 0.0

    def end_other(self) -> None:
        """An evaluation is over, which is no part of a step."""
        self.end()
        self._seconds = self._waited = 0.0


def nothing() -> None:
    """For one side of a call where only the other matters."""


def around(
    owner: type, name: str, before: Callable[[], None], after: Callable[[], None] = nothing
) -> None:
    """Calls `before` and `after` with a method. A method that raises ends its process, and the lock
    with it."""
    method: Callable[..., Any] = getattr(owner, name)

    @wraps(method)
    def wrapped(self: Any, *words: Any, **named: Any) -> Any:
        before()
        found = method(self, *words, **named)
        after()
        return found

    setattr(owner, name, wrapped)


def native_takes(turns: Turns) -> None:
    from turnwise.train.base import RunTrainer
    from turnwise.train.sft import SftTrainer
    from turnwise.train.trainer import PPOTrainer

    around(PPOTrainer, "_one_step", turns.begin, turns.end_step)
    around(SftTrainer, "_one_step", turns.begin, turns.end_step)
    around(RunTrainer, "evaluate", turns.begin, turns.end_other)


def verl_takes(turns: Turns) -> None:
    from turnwise.integrations.verl.trainer.agent_trainer import AgentTrainer

    around(AgentTrainer, "on_step_begin", turns.begin)
    around(AgentTrainer, "_save_checkpoint", turns.end, turns.begin)
    around(AgentTrainer, "on_step_end", nothing, turns.end_step)
    around(AgentTrainer, "_validate", turns.begin, turns.end_other)


def trl_takes(turns: Turns) -> None:
    """TRL's step is an update. The first one of a batch generates."""
    from turnwise.integrations.trl import run

    progress: Any = run._Progress
    around(progress, "on_step_begin", turns.begin)
    around(progress, "on_step_end", nothing, turns.end_step)
    around(run._TRLRun, "_evaluate", turns.begin, turns.end_other)


BACKENDS = {"native": native_takes, "verl": verl_takes, "trl": trl_takes}


def main(words: list[str]) -> None:
    lock, times, backend, *command = words
    BACKENDS[backend](Turns(Path(lock), Path(times)))
    from turnwise.__main__ import main

    sys.argv = ["turnwise", *command]
    main()


if __name__ == "__main__":
    main(sys.argv[1:])
