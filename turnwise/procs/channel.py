"""Child processes, and frames of bytes over the socket to them."""

import contextlib
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence

HEADER = struct.Struct("!I")
MAX_FRAME = 256 * 1024 * 1024
STOP_SECONDS = 20.0


def start_beside(
    module: str,
    *arguments: str,
    sockets: Sequence[socket.socket] = (),
    stderr: int | None = None,
) -> tuple["subprocess.Popen[bytes]", socket.socket]:
    """(a process that runs MODULE.main([FD, *ARGUMENTS]), our end of a socket whose other end is
    its descriptor FD). It also gets `sockets`, under the descriptors that they have here.

    It ends with this process, and its own children end with it (procs/child.py). It has no access
    to our standard input and output, and its libraries use one thread. Its standard error is ours,
    or `stderr` as subprocess.Popen takes it.
    """
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(
        child_command(module, str(theirs.fileno()), *arguments),
        pass_fds=[theirs.fileno(), *(other.fileno() for other in sockets)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        process_group=0,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    theirs.close()
    return process, ours


def child_command(module: str, *arguments: str) -> list[str]:
    """The command of a process that runs MODULE.main(ARGUMENTS) and ends with this one."""
    return [sys.executable, "-m", "turnwise.procs.child", str(os.getpid()), module, *arguments]


def stop(process: "subprocess.Popen[bytes]") -> None:
    """Ends a process of `child_command` and all its children."""
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:  # its guard is suspended, or may not kill its children
        process.kill()
        process.wait()


def frame(data: bytes) -> bytes:
    """The data with its length before it."""
    return HEADER.pack(len(data)) + data


def send_frame(sock: socket.socket, data: bytes) -> None:
    """Sends one frame. Where the other side has closed, `receive_frame` tells: a process may end
    just before or just after it is written to."""
    with contextlib.suppress(OSError):
        sock.sendall(frame(data))


def receive_frame(sock: socket.socket) -> bytes | None:
    """One frame, or None if the other side has closed."""
    header = _receive_exactly(sock, HEADER.size)
    if header is None:
        return None
    (size,) = HEADER.unpack(header)
    if size > MAX_FRAME:
        raise ValueError(f"a frame of {size} bytes is over the limit of {MAX_FRAME}")
    return _receive_exactly(sock, size)


def _receive_exactly(sock: socket.socket, size: int) -> bytes | None:
    parts: list[bytes] = []
    while size:
        try:
            part = sock.recv(min(size, 1 << 20))
        except (ConnectionError, OSError):
            return None
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
