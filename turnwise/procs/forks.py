"""Forks of this process that come back from code that should not have returned twice."""

import os
from contextlib import suppress


def end_fork(pid: int, what: str) -> None:
    """Ends this process if it is a fork of the process `pid`, made since by foreign code.

    A fork that comes back has its parent's sockets and files, and would do the same work again.

    Example:
        >>> end_fork(os.getpid(), "coin: step")
    """
    if os.getpid() == pid:
        return
    with suppress(OSError):
        os.write(2, f"{what} forked, and the child came back: ended it\n".encode())
    os._exit(1)
