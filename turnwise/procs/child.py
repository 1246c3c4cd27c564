"""The entry point of a child process: `python -m turnwise.procs.child PARENT MODULE ARGUMENTS`.

It imports only the standard library and forks. The fork runs MODULE as the leader of a new process
group. The first process stays as its guard: it kills MODULE's process and all its descendants when
PARENT ends, on SIGTERM, and when MODULE's process has ended. That works even if MODULE hangs.
"""

import contextlib
import ctypes
import importlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

PATIENCE = 0.5
"""Seconds between two checks that the parent is alive. PR_SET_PDEATHSIG cannot be used: it fires
when the parent's thread ends."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_ENDS = {signal.SIGTERM, signal.SIGHUP}
_CHILDREN = Path(f"/proc/self/task/{os.getpid()}/children")


def main(parent: int, module: str, arguments: list[str]) -> None:
    """Runs MODULE.main(ARGUMENTS) in a process that ends with `parent`."""
    libc: Any = ctypes.CDLL(None)
    # Ctrl-C reaches all processes of the terminal, and only the parent handles it; a process in the
    # background may write to the terminal.
    for ignored in (signal.SIGINT, signal.SIGTTOU):
        signal.signal(ignored, signal.SIG_IGN)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDS | {signal.SIGCHLD})
    guard = os.getpid()
    if _CHILDREN.exists():  # needed to find the orphans that become our children
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    worker = os.fork()
    if worker:
        _leave_as(_watch(worker, parent))
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guard:  # the guard ended before the signal was set
        os._exit(1)
    os.setpgid(0, 0)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    importlib.import_module(module).main(arguments)


def _watch(worker: int, parent: int) -> int:
    """The wait status of the worker, once it and everything that it started have ended."""
    while os.waitid(os.P_PID, worker, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        told = signal.sigtimedwait(_ENDS | {signal.SIGCHLD}, PATIENCE)
        if os.getppid() != parent or (told is not None and told.si_signo in _ENDS):
            break
        for orphan in _children():
            if orphan != worker:
                os.waitpid(orphan, os.WNOHANG)
    # The worker has not been waited for, so its id still names its group.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(worker, signal.SIGKILL)
    os.kill(worker, signal.SIGKILL)  # it may not be in its group yet
    result = os.waitpid(worker, 0)[1]
    # Processes in other sessions became our children when their parent ended.
    while orphans := _children():
        for orphan in orphans:
            with contextlib.suppress(PermissionError):
                os.kill(orphan, signal.SIGKILL)
        os.wait()
    return result


def _children() -> list[int]:
    try:
        return [int(word) for word in _CHILDREN.read_text().split()]
    except OSError:
        return []


def _leave_as(status: int) -> None:
    """Exits with the worker's status, so that the parent sees it."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
