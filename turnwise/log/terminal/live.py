"""The dashboard of one run, redrawn: by a thread while training, by a loop in `turnwise watch`."""

import contextlib
import sys
import threading
import time
from collections import deque
from typing import IO, TextIO

from rich.text import Text

from turnwise.log.doctor import Diagnosis
from turnwise.log.terminal.frame import Frame, draw
from turnwise.log.terminal.glyphs import Glyphs
from turnwise.log.terminal.playback import Playback, Scene
from turnwise.log.terminal.screen import Overheard, Screen
from turnwise.log.terminal.view import RunView

FRAME_SECONDS = 0.25
"""Least time between two drawings."""
FINDINGS_SECONDS = 2.0
"""Least time between two visits of the doctor."""
LARGEST_SHARE = 0.01
"""Of the time, for drawing: a slow frame is drawn less often."""
MOST_KEPT = 1000
"""Lines that are printed again when the screen closes."""


class Dashboard:
    """A view, an episode that plays, and the doctor's findings, which are looked for only when the
    view changed."""

    def __init__(self, view: RunView, *, footer: str = "") -> None:
        self.view = view
        self.playback = Playback()
        self.footer = footer
        self._findings: list[Diagnosis] = []
        self._seen = -1
        self._next_visit = 0.0
        self._drawn: tuple[object, ...] = ()
        self._lines: list[Text] = []

    def lines(
        self, size: tuple[int, int], glyphs: Glyphs, *, now: float, final: bool = False
    ) -> list[Text]:
        """The dashboard in columns and rows; the same list as before where nothing changed.

        Args:
            final: the last drawing: the end of the newest episode, and what the doctor says now.
        """
        scene: Scene | None = self.playback.last() if final else self.playback.scene(now)
        if self.view.revision != self._seen and (final or now >= self._next_visit):
            self._seen = self.view.revision
            started = time.monotonic()
            self._findings = self.view.findings()
            took = time.monotonic() - started
            self._next_visit = now + max(FINDINGS_SECONDS, took / LARGEST_SHARE)
        said = tuple(self.view.said)
        drawn = (size, self.view.revision, self._seen, scene, said, int(now), self.footer)
        if final or drawn != self._drawn:
            self._drawn = drawn
            frame = Frame(
                view=self.view,
                scene=scene,
                findings=self._findings,
                now=now,
                footer=self.footer,
            )
            self._lines = draw(frame, width=size[0], height=size[1], glyphs=glyphs, fill=not final)
        return self._lines


class LiveScreen:
    """Draws a dashboard from a thread until it is stopped.

    Output printed meanwhile is shown in the dashboard, and printed again when the screen closes.
    Code that changes the view holds `lock`.
    """

    def __init__(self, dashboard: Dashboard, file: IO[str]) -> None:
        self.lock = threading.Lock()
        self._dashboard = dashboard
        self._file = file
        self._screen = Screen(file)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._draw, name="dashboard", daemon=True)
        self._kept: deque[tuple[IO[str], str]] = deque(maxlen=MOST_KEPT)
        self._real = (sys.stdout, sys.stderr)
        self._ours = (self._overheard(sys.stdout), self._overheard(sys.stderr))

    def start(self) -> None:
        self._screen.open()
        sys.stdout, sys.stderr = self._ours
        self._thread.start()

    def say(self, line: str) -> None:
        """Shows a line, and prints it when the screen closes."""
        self._hear(self._file, line)

    def stop(self) -> None:
        """Gives the terminal back. May be called twice."""
        if self._over.is_set():
            return
        self._over.set()
        self._thread.join(timeout=2.0)
        with contextlib.suppress(OSError, ValueError):  # the terminal is gone
            self._screen.close()
        for ours in self._ours:
            ours.finish()
        if sys.stdout is self._ours[0]:
            sys.stdout = self._real[0]
        if sys.stderr is self._ours[1]:
            sys.stderr = self._real[1]
        for real, line in self._kept:
            with contextlib.suppress(OSError, ValueError):
                print(line, file=real)

    def _overheard(self, real: TextIO) -> Overheard:
        return Overheard(real, lambda line: self._hear(real, line))

    def _hear(self, real: IO[str], line: str) -> None:
        self._dashboard.view.said.append(line)
        if not line.startswith("... "):  # progress is of the moment
            self._kept.append((real, line))

    def _draw(self) -> None:
        wait = 0.0
        while not self._over.wait(wait):
            started = time.thread_time()
            with self.lock:
                lines = self._dashboard.lines(
                    self._screen.size, self._screen.glyphs, now=time.time()
                )
            try:
                self._screen.draw(lines)
            except (OSError, ValueError):  # the terminal is gone; the run goes on without it
                return
            wait = max(FRAME_SECONDS, (time.thread_time() - started) / LARGEST_SHARE)
