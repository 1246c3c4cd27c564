"""Progress lines for long work: the first after two seconds, then at growing intervals."""

import sys
import threading
import time
from collections.abc import Sequence
from types import TracebackType

FIRST_LINE = 2.0
"""Seconds until the first line."""


class Stall:
    """Tells when nothing has changed for so many seconds, and again after as many.

    Example:
        >>> stall = Stall(10.0)
        >>> [stall.look(state, now) for state, now in ((1, 0.0), (1, 9.0), (1, 10.0), (1, 11.0))]
        [None, None, 10.0, None]
        >>> stall.look(2, 12.0), stall.look(2, 22.0)
        (None, 10.0)
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._state: object = None
        self._since = self._said = 0.0

    def look(self, state: object, now: float | None = None) -> float | None:
        """Seconds since the state last changed where that is to be said now, else None."""
        now = time.monotonic() if now is None else now
        if state != self._state:
            self._state, self._since, self._said = state, now, now
        if now - self._said < self.seconds:
            return None
        self._said = now
        return now - self._since


def some_of(names: Sequence[str], *, most: int = 8) -> str:
    """The first names, and how many more there are.

    Example:
        >>> some_of(["a", "b", "c"], most=2)
        'a, b and 1 more'
    """
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


class Progress:
    """`with Progress("playing episodes", total=128) as progress: ... progress.advance()`.

    Prints nothing for work that takes less than two seconds. Otherwise prints a line to standard
    error after 2, 6, 14, 30 seconds and so on, from a thread, so that work that hangs is reported
    too.

    Example:
        >>> with Progress("adding", total=2) as progress:
        ...     progress.advance()
        ...     progress.line(3.2)
        '... adding: 1 of 2, 3 s'
    """

    def __init__(self, what: str, *, total: int | None = None, first: float = FIRST_LINE) -> None:
        self._what = what
        self.total = total
        """The amount of work; None if unknown."""
        self._first = first
        self._done = 0
        self._started = 0.0
        self._over = threading.Event()
        self._timer: threading.Timer | None = None

    def __enter__(self) -> "Progress":
        self._started = time.monotonic()
        self._arm(self._first)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._over.set()
        if self._timer is not None:
            self._timer.cancel()

    def advance(self) -> None:
        """Counts one more of `total` as done."""
        self._done += 1

    def line(self, seconds: float) -> str:
        """The line after this many seconds."""
        count = "" if self.total is None else f" {self._done} of {self.total},"
        return f"... {self._what}:{count} {seconds:.0f} s"

    def _arm(self, seconds: float) -> None:
        self._timer = threading.Timer(seconds, self._say, [seconds])
        self._timer.daemon = True
        self._timer.start()

    def _say(self, waited: float) -> None:
        if self._over.is_set():
            return
        print(self.line(time.monotonic() - self._started), file=sys.stderr, flush=True)
        self._arm(2 * waited)
