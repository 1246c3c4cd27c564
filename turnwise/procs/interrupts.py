"""Distinguishes Ctrl-C from a KeyboardInterrupt that user code raised."""

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

_arrived = 0
_watchers = 0


@contextmanager
def watching_interrupts() -> Generator[None]:
    """Counts interrupts inside the context. The previous handler still handles them; those that it
    ignores do not count.

    Does nothing outside the main thread. If the process ignores SIGINT, as a background job of a
    script does, only interrupts of other signals count (`count_interrupt`).
    """
    global _watchers
    before: Any = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def count(number: int, frame: Any) -> None:
        global _arrived
        try:
            before(number, frame)
        except KeyboardInterrupt:
            _arrived += 1
            raise

    if callable(before):
        signal.signal(signal.SIGINT, count)
    _watchers += 1
    try:
        yield
    finally:
        _watchers -= 1
        if signal.getsignal(signal.SIGINT) is count:
            signal.signal(signal.SIGINT, before)


def count_interrupt() -> None:
    """Counts an interrupt. Handlers of other signals call it before they raise
    KeyboardInterrupt."""
    global _arrived
    _arrived += 1


def interrupts() -> int:
    """How many interrupts were counted."""
    return _arrived


def from_the_user(error: BaseException | None, *, before: int) -> bool:
    """True if the error is, or was caused by, a Ctrl-C after `interrupts()` was `before`. With
    error None: True if such a Ctrl-C was swallowed.

    Outside `watching_interrupts`, every KeyboardInterrupt in the main thread counts as the user's,
    unless the process ignores the signal.

    Example:
        >>> from_the_user(ValueError(), before=interrupts())
        False
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    if _watchers:
        return _arrived != before
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    # `isinstance` would ask the error's own `__class__`, which may be anything.
    return issubclass(type(error), KeyboardInterrupt) and not ignored
