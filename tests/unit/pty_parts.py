"""A command in a real pseudo-terminal, and what a person would see there."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.cells import cell_len

RUN = (sys.executable, "-m", "turnwise")
FRAME = re.compile(r"\x1b\[\?2026h\x1b\[H(.*?)\x1b\[J\x1b\[\?2026l", re.DOTALL)
OWN = re.compile(r"\x1b\[[0-9;]*m|\x1b\[K")
"""The only sequences inside a frame: styles, and the rest of a line cleared."""


class Terminal:
    """A process with a terminal of its own."""

    def __init__(
        self,
        words: Sequence[str],
        *,
        size: tuple[int, int] = (80, 24),
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        self.leader, follower = pty.openpty()
        self.resize(*size)
        plain = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
        self.process = subprocess.Popen(
            words,
            stdin=follower,
            stdout=follower,
            stderr=follower,
            cwd=cwd,
            env={**plain, "TERM": "xterm-256color", "COLUMNS": "", "LINES": "", **(env or {})},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(follower)
        self.seen = b""

    @property
    def text(self) -> str:
        return self.seen.decode(errors="replace")

    def frames(self) -> list[str]:
        """The whole frames, without styles."""
        return [re.sub(r"\r+\n", "\n", OWN.sub("", frame)) for frame in FRAME.findall(self.text)]

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.leader, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def send(self, keys: bytes) -> None:
        os.write(self.leader, keys)

    def until(self, wanted: str, *, columns: int | None = None, seconds: float = 300.0) -> str:
        """The newest frame, as soon as one has the text, and so many columns."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            newest = self.frames()[-1:]
            if newest and wanted in newest[0] and columns in (None, widest(newest[0])):
                return newest[0]
            if not self.read(0.2) and self.process.poll() is not None:
                break
        raise AssertionError(f"{wanted!r} was never shown:\n{self.text[-3000:]}")

    def end(self, *, close: bool = True, seconds: float = 300.0) -> int:
        """The exit status, once everything that it wrote is read."""
        deadline = time.monotonic() + seconds
        while self.read(0.2) or (self.process.poll() is None and time.monotonic() < deadline):
            pass
        if close:
            self.close()
        return self.process.wait(timeout=seconds)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self.leader >= 0:
            os.close(self.leader)
            self.leader = -1

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, seconds: float) -> bool:
        if self.leader < 0 or not select.select([self.leader], [], [], seconds)[0]:
            return False
        try:
            part = os.read(self.leader, 65536)
        except OSError:  # the terminal is gone with its last user
            return False
        self.seen += part
        return bool(part)


def widest(frame: str) -> int:
    return max(cell_len(line) for line in frame.split("\n"))
