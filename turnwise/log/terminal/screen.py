"""A whole terminal to draw on, and what others print meanwhile."""

import io
import os
import time
from collections.abc import Callable, Sequence
from typing import IO, BinaryIO, TextIO

from rich.console import COLOR_SYSTEMS, Console
from rich.segment import Segment
from rich.text import Text

from turnwise.log.terminal.glyphs import Glyphs, glyphs_for

OPEN, CLOSE = "\x1b[?1049h\x1b[?25l\x1b[2J", "\x1b[?25h\x1b[?1049l"
"""Another screen without a cursor, and back."""
BEGIN, END = "\x1b[?2026h\x1b[H", "\x1b[J\x1b[?2026l"
"""Around a frame: terminals that know the mode show it at once."""
REPAINT = 2.0
"""Seconds after which an unchanged frame is drawn again: others may have written over it."""


def can_draw(file: IO[str]) -> bool:
    """Whether the file is a terminal that can move its cursor."""
    return file.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown", "")


class Screen:
    """The terminal's other screen. `close` gives the first one back as it was."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._ink = Ink(file)
        self.glyphs = self._ink.glyphs
        self._shown = ""
        self._when = 0.0
        self._open = False

    @property
    def size(self) -> tuple[int, int]:
        """Columns and rows, as they are now."""
        try:
            columns, rows = os.get_terminal_size(self._file.fileno())
        except (OSError, ValueError):
            columns, rows = 80, 24
        return columns or 80, rows or 24

    def open(self) -> None:
        self._write(OPEN)
        self._open = True

    def draw(self, lines: Sequence[Text]) -> None:
        """Shows the lines from the top; what was there before is gone."""
        _, height = self.size
        text = "\r\n".join(f"{line}\x1b[K" for line in self._ink.lines(lines[:height]))
        now = time.monotonic()
        if text == self._shown and now - self._when < REPAINT:
            return
        self._shown, self._when = text, now
        self._write(f"{BEGIN}{text}{END}")

    def close(self) -> None:
        """May be called twice."""
        if self._open:
            self._open = False
            self._write(CLOSE)

    def _write(self, text: str) -> None:
        self._file.write(text)
        self._file.flush()


class Ink:
    """Turns styled lines into what the file's terminal understands: its colours, its letters."""

    def __init__(self, file: IO[str]) -> None:
        self._terminal = Console(file=file, highlight=False)
        self._plain = not can_draw(file)
        name = self._terminal.color_system
        self._colours = None if name is None else COLOR_SYSTEMS[name]
        self._encoding = self._terminal.encoding
        self.glyphs: Glyphs = glyphs_for(self._encoding, os.environ.get("TERM"))

    def lines(self, lines: Sequence[Text]) -> list[str]:
        """One string per line."""
        return [
            self._known(line.plain.rstrip() if self._plain else self._drawn(line)) for line in lines
        ]

    def _drawn(self, line: Text) -> str:
        # What console.print does for one line, without its layout: a third of the time.
        styled = line.copy()
        styled.stylize_before(line.style)
        pieces = styled.render(self._terminal)
        if self._terminal.no_color:
            pieces = Segment.remove_color(pieces)
        return "".join(
            style.render(text, color_system=self._colours) if style else text
            for text, style, _ in pieces
        )

    def _known(self, text: str) -> str:
        return text.encode(self._encoding, "replace").decode(self._encoding)


class Overheard(io.TextIOBase):
    """Stands in for standard output or error while the screen is open, and keeps what is printed.

    A process that was forked meanwhile writes to the real file.
    """

    def __init__(self, real: TextIO, heard: Callable[[str], None]) -> None:
        self._real = real
        self._heard = heard
        self._owner = os.getpid()
        self._rest = ""

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._real.encoding

    @property
    def buffer(self) -> BinaryIO:
        return self._real.buffer

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self._real.isatty()

    def fileno(self) -> int:
        return self._real.fileno()

    def write(self, text: str) -> int:
        if os.getpid() != self._owner:
            return self._real.write(text)
        # No lock: the handler of a signal may print in the middle of another print.
        whole, newline, rest = (self._rest + text).rpartition("\n")
        self._rest = rest.rpartition("\r")[2]  # a progress bar that is drawn over and over
        if newline:
            for line in whole.split("\n"):
                self._heard(line.rpartition("\r")[2])
        return len(text)

    def flush(self) -> None:
        if os.getpid() != self._owner:
            self._real.flush()

    def finish(self) -> None:
        """Counts an unfinished line as one."""
        if self._rest:
            self.write("\n")
