"""A process of our own beside this one, and objects over the socket between them."""

import asyncio
import os
import pickle
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping

_HEADER = struct.Struct("!Q")
_CHUNK = 1 << 20


def start_beside(
    module: str, *arguments: str, environment: Mapping[str, str] | None = None
) -> tuple["subprocess.Popen[bytes]", socket.socket]:
    """(a process that runs MODULE.main([FD, *ARGUMENTS]), our end of a socket whose other end is its descriptor FD).

    It ends with this process (rollout/child.py). Its environments neither see our standard input nor write into our
    standard output, and it has one thread's share of the cores.
    """
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(
        [sys.executable, "-m", "turnwise.rollout.child", str(os.getpid()), module, str(theirs.fileno()), *arguments],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
    )
    theirs.close()
    return process, ours


class Channel:
    """Sends objects and receives them, pickled, inside an event loop. It never waits: what the socket does not take yet
    is kept.

    It may be attached to one loop after the other. What is sent while it is attached to none goes out with the next.

    Args:
        received: called with every object that came, still pickled, in their order.
        ended: called once, when the other side is gone.
    """

    def __init__(self, sock: socket.socket, *, received: Callable[[bytes], None], ended: Callable[[], None]) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._received = received
        self._ended = ended
        self._loop: asyncio.AbstractEventLoop | None = None
        self._in = bytearray()
        self._out = bytearray()
        self._gone = False

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        self.detach()
        if not self._gone:
            self._loop = loop
            loop.add_reader(self._socket, self._read)
            if self._out:
                loop.add_writer(self._socket, self._write)

    def detach(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
        self._loop = None

    def send(self, message: object) -> None:
        self.send_frame(pickle.dumps(message, protocol=5))

    def send_frame(self, data: bytes) -> None:
        """Sends an object that is pickled already."""
        waiting = bool(self._out)
        self._out += _HEADER.pack(len(data))
        self._out += data
        if self._loop is not None and not waiting:
            self._write()

    def close(self) -> None:
        self.detach()
        self._gone = True
        self._socket.close()

    def _write(self) -> None:
        assert self._loop is not None
        try:
            while self._out:
                del self._out[: self._socket.send(self._out[:_CHUNK])]
        except BlockingIOError:
            self._loop.add_writer(self._socket, self._write)
        except OSError:
            self._end()
        else:
            self._loop.remove_writer(self._socket)

    def _read(self) -> None:
        try:
            data = self._socket.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._in += data
        at = 0
        while len(self._in) - at >= _HEADER.size:
            (size,) = _HEADER.unpack_from(self._in, at)
            end = at + _HEADER.size + size
            if len(self._in) < end:
                break
            self._received(bytes(self._in[at + _HEADER.size : end]))
            at = end
        del self._in[:at]
        if not data:
            self._end()

    def _end(self) -> None:
        if not self._gone:
            self.detach()
            self._gone = True
            self._ended()
