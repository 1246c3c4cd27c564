"""The first lines of a process beside ours: `python -m turnwise.procs.child PARENT MODULE ARGUMENTS`.

It imports the standard library alone, so that the process has asked to end with its parent before
MODULE spends seconds on imports.
"""

import ctypes
import importlib
import os
import signal
import sys
from typing import Any

_PR_SET_PDEATHSIG = 1


def follow(parent: int) -> None:
    """Has this process killed when `parent` ends, even where an environment hangs in it.

    Ctrl-C is left to the parent: it reaches the whole terminal, and the parent ends this process.
    """
    libc: Any = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if os.getppid() != parent:  # it ended before we asked, so nothing would tell us
        os._exit(1)


if __name__ == "__main__":
    follow(int(sys.argv[1]))
    importlib.import_module(sys.argv[2]).main(sys.argv[3:])
