"""Stop requests (Ctrl-C, a scheduler's SIGTERM or a time limit), and when they take effect."""

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Generator
from types import FrameType
from typing import Any

from turnwise.procs.interrupts import count_interrupt

SIGNALS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}
TIME_LIMIT = "the time limit"


class Stopped(KeyboardInterrupt):
    """Raised in work that may be discarded, after a stop request.

    A KeyboardInterrupt, because an event loop propagates it at once.
    """


class StopRequest:
    """Turns the first signal or the end of a time limit into a request, and the second signal into
    a KeyboardInterrupt.

    Work that must finish checks `reason` afterwards. Work that may be discarded runs in
    `discardable()`, which a request ends at once. Outside the main thread there are no signals; the
    time limit then takes effect after the step.

    Example:
        >>> with StopRequest() as stop:
        ...     signal.raise_signal(signal.SIGTERM)
        ...     stop.reason
        'SIGTERM'
    """

    def __init__(
        self,
        *,
        seconds: float | None = None,
        heard: Callable[[str], None] = lambda _: None,
        listen: bool = True,
    ) -> None:
        self.reason: str | None = None
        """The source of the request; None if there is none."""
        self._heard = heard
        self._discardable = False
        self._time_is_up = False
        self._at_once = False
        self._before: dict[int, Any] = {}
        self._listens = listen and threading.current_thread() is threading.main_thread()
        self._timer: threading.Timer | None = None
        if seconds is not None:
            self._timer = threading.Timer(max(seconds, 0.0), self._on_time)
            self._timer.daemon = True

    def __enter__(self) -> "StopRequest":
        if self._listens:
            for number in SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                    self._before[number] = signal.signal(number, self._on_signal)
        if self._timer is not None:
            self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def discardable(self) -> Generator[None]:
        """Inside, a request raises Stopped at once; an earlier request raises on entry."""
        if self.reason is not None:
            raise Stopped(self.reason)
        self._discardable = True
        try:
            yield
        except KeyboardInterrupt as error:  # code in between may have raised a plain one instead
            if self.reason is None or self._at_once:
                raise
            raise Stopped(self.reason) from error
        finally:
            self._discardable = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._time_is_up:
            self._time_is_up = False
            name = TIME_LIMIT
            if self.reason is not None:
                return
        else:
            name = SIGNALS[signal.Signals(number)]
            if self.reason is not None:
                self._at_once = True
                count_interrupt()
                raise KeyboardInterrupt
        self.reason = name
        self._heard(name)
        if self._discardable:
            self._discardable = False  # do not interrupt the cleanup
            count_interrupt()
            raise Stopped(name)

    def _on_time(self) -> None:
        main = threading.main_thread().ident
        if self._before and main is not None:
            self._time_is_up = True
            signal.pthread_kill(main, signal.SIGTERM)  # interrupts a blocking call too
        elif self.reason is None:
            self.reason = TIME_LIMIT
            self._heard(TIME_LIMIT)


def say_stopping(reason: str) -> None:
    """Prints that a stop was requested, and what has to finish first."""
    print(
        f"\n{reason}: stopping with a checkpoint of the last full step; an update that has begun "
        "is finished first. A second Ctrl-C ends at once.",
        file=sys.stderr,
        flush=True,
    )
