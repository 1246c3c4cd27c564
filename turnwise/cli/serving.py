"""Serves in the foreground until the user stops it."""

import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

PATIENCE = 0.2
"""Seconds after which a signal is noticed at the latest."""


class Server(AbstractContextManager[Any], Protocol):
    """Serves inside its context."""

    def wait(self, seconds: float) -> bool:
        """True once the server has ended; waits for at most so long."""
        ...


def serve_until_stopped(server: Server, started: Callable[[], None]) -> None:
    """Serves, and calls `started` once it does. INT and TERM stop the server; a second signal ends
    the process at once.

    The signals raise nothing. A KeyboardInterrupt within an import can leave the import lock
    locked, and the server's thread would wait for it forever.
    """
    told = False
    heard = [
        number
        for number in (signal.SIGINT, signal.SIGTERM)
        if signal.getsignal(number) is not signal.SIG_IGN  # as in the background of a script
    ]

    def stop(number: int, frame: Any) -> None:
        nonlocal told
        told = True
        for number in heard:
            signal.signal(number, signal.SIG_DFL)

    for number in heard:
        signal.signal(number, stop)
    with server:
        started()
        while not told and not server.wait(PATIENCE):
            pass
        if told:
            print("stopping", flush=True)
