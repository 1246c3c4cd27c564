"""A process of our own beside this one, and frames of bytes over the socket between them."""

import os
import socket
import struct
import subprocess
import sys

_HEADER = struct.Struct("!I")
MAX_FRAME = 256 * 1024 * 1024


def start_beside(module: str, *arguments: str) -> tuple["subprocess.Popen[bytes]", socket.socket]:
    """(a process that runs MODULE.main([FD, *ARGUMENTS]), our end of a socket whose other end is its descriptor FD).

    It ends with this process (procs/child.py). Its environments neither see our standard input nor write into our
    standard output, and it has one thread's share of the cores.
    """
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(
        [sys.executable, "-m", "turnwise.procs.child", str(os.getpid()), module, str(theirs.fileno()), *arguments],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    theirs.close()
    return process, ours


def send_frame(sock: socket.socket, data: bytes) -> None:
    sock.sendall(_HEADER.pack(len(data)) + data)


def receive_frame(sock: socket.socket) -> bytes | None:
    """One frame, or None when the other side is gone."""
    header = _receive_exactly(sock, _HEADER.size)
    if header is None:
        return None
    (size,) = _HEADER.unpack(header)
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
