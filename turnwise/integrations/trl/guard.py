"""Calls of a user's environment outside its episodes: before training, and to make tasks."""

import os
import threading
from collections.abc import Callable
from functools import cache
from typing import TypeVar

from turnwise.envs.gate import ask_within
from turnwise.procs.threads import SideThread

T = TypeVar("T")
SECONDS = 60.0
"""The time limit where no `env_timeout` is known."""


def guarded(what: str, function: Callable[[], T], *, limit: float = SECONDS) -> T:
    """The result of foreign code, called in one thread for all: what an environment opens may be
    bound to its thread.

    Raises:
        EnvError: it raised anything, SystemExit included. EnvTimeoutError: it took longer than
            `limit` seconds.

    Example:
        >>> guarded("coin: close", lambda: exit(3))
        Traceback (most recent call last):
        turnwise.envs.base.EnvError: coin: close raised SystemExit: 3
    """
    thread, lock = _of_process(os.getpid())
    with lock:
        return ask_within(what, function, thread=thread, limit=limit)


@cache
def _of_process(pid: int) -> tuple[SideThread, threading.Lock]:
    """A fork, such as a worker of a data loader, has none of its parent's threads."""
    return SideThread("turnwise-trl"), threading.Lock()
