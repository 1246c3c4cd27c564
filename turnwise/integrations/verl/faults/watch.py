# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
"""Detects dead workers, so that the driver does not wait for them."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

INTERVAL = 2.0
"""Seconds between two checks."""
GRACE = 20.0
"""Seconds that verl has to raise on its own, after a worker was found dead, before the driver is
interrupted."""


class WorkerDiedError(RuntimeError):
    """A process of the run is gone. The message names it; the last checkpoint is intact."""


def reason_of(error: BaseException) -> str:
    """An error of Ray in one line: its first line, and after a traceback its last too.

    Example:
        >>> reason_of(RuntimeError("The actor died.\\nTraceback\\n  x\\nValueError: no map"))
        'The actor died. ValueError: no map'
        >>> reason_of(RuntimeError("The actor died.\\n  pid: 3"))
        'The actor died.'
    """
    lines = str(error).strip().splitlines() or [type(error).__name__]
    has_traceback = any("Traceback" in line or line.lstrip().startswith("File ") for line in lines)
    return f"{lines[0]} {lines[-1].strip()}" if has_traceback else lines[0]


class Watchdog:
    """Pings every actor from its own thread. A dead actor fails at once; a busy one answers later,
    so its ping stays open. `check` raises in the polling thread; a driver that is blocked in a call
    is interrupted after `GRACE`.
    """

    def __init__(self, actors: Mapping[str, Any], *, where: Callable[[], str]) -> None:
        self._actors = dict(actors)
        self._where = where
        self._asked: dict[str, Any] = {}
        self._looking = threading.Lock()
        self._error: str | None = None
        self._found = 0.0
        self._interrupted = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="turnwise-watchdog")

    @property
    def error(self) -> str | None:
        """The error, None if all actors are alive."""
        return self._error

    @property
    def interrupted(self) -> bool:
        """True where the driver was interrupted by this watchdog."""
        return self._interrupted

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()

    def check(self) -> None:
        """Raises WorkerDiedError where a worker is known to be dead."""
        if self._error is not None:
            raise WorkerDiedError(self._error)

    def look(self, *, patience: float = 0.0) -> str | None:
        """Checks every actor once, waiting up to `patience` seconds; the error, or None."""
        with self._looking:
            return self._look(patience)

    def _look(self, patience: float) -> str | None:
        import ray
        from ray.exceptions import RayActorError

        if patience:  # an answer that stands from an earlier look may be older than the death
            self._asked.clear()
        for name, actor in self._actors.items():
            if name not in self._asked:
                self._asked[name] = actor.__ray_ready__.remote()
        done, _ = ray.wait(
            list(self._asked.values()), num_returns=len(self._asked), timeout=patience
        )
        answered = set(done)
        for name, asked in list(self._asked.items()):
            if asked not in answered:
                continue
            del self._asked[name]
            try:
                ray.get(asked)
            except RayActorError as error:
                return (
                    f"{name} died in {self._where()}: {reason_of(error)} Nothing after the last "
                    "checkpoint is kept; look into the log of that worker (memory is the usual "
                    "cause), then resume"
                )
        return None

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL):
            if self._error is None:
                # Ray is being shut down: the driver hears of it by itself.
                with contextlib.suppress(Exception):
                    self._error = self.look()
                self._found = time.monotonic()
            elif time.monotonic() - self._found > GRACE:
                self._interrupted = True
                # A signal, for it ends waits on locks and sockets too; the driver's handler raises
                # KeyboardInterrupt.
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                return
