"""Console output of a run: the live dashboard in a terminal, plain lines elsewhere, and a summary
at the end."""

import contextlib
import itertools
import math
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TextIO

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from turnwise.log.events import (
    EpisodeDone,
    Evaluated,
    Event,
    Notice,
    RunEnded,
    RunStarted,
    StepDone,
)
from turnwise.log.store import RunReader
from turnwise.log.terminal.frame import SHOWN, plot_of
from turnwise.log.terminal.glyphs import Glyphs, glyphs_for
from turnwise.log.terminal.live import Dashboard, LiveScreen
from turnwise.log.terminal.plot import draw_plot
from turnwise.log.terminal.screen import can_draw
from turnwise.log.terminal.text import clean
from turnwise.log.terminal.view import RunView
from turnwise.log.words import duration, evaluated_line, step_line

EIGHTHS = " \u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
SECONDS_BETWEEN_LINES = 2.0
PLOT = (72, 10)
"""Width and height of the plot at the end."""
BAR = 8
"""Characters of the bar that stands for 100 %."""
FOOTER = "Ctrl-C stops with a checkpoint"


class ConsoleSink:
    """Shows a run while it goes on. Falls back to a line every few seconds where the output is not
    a terminal.

    Example:
        >>> import io
        >>> out = io.StringIO()
        >>> sink = ConsoleSink(out)
        >>> sink.handle(Notice(kind="fallback", message="single-turn: no environment"))
        >>> print(out.getvalue().strip())
        WARNING (fallback): single-turn: no environment
    """

    hears_stages = True
    """The imitation before a run's training is shown too."""

    def __init__(self, file: TextIO | None = None, *, console: Console | None = None) -> None:
        self.console = console or Console(file=file, highlight=False, soft_wrap=True)
        self._live: LiveScreen | None = None
        self._dashboard: Dashboard | None = None
        self._first = 0
        self._started = time.monotonic()
        self._last_line = -math.inf

    @property
    def hears_episodes(self) -> bool:
        """Whether there is a screen on which to play them back."""
        return can_draw(self.console.file)

    def handle(self, event: Event) -> None:
        match event:
            case RunStarted():
                self._start(event)
            case EpisodeDone():
                if self._dashboard is not None:
                    with self._lock():
                        self._dashboard.playback.offer(event.episode, step=None)
            case StepDone():
                self._step(event)
            case Evaluated():
                self._evaluated(event)
            case Notice():
                self._notice(event)
            case RunEnded():
                self._stop()
                self._end(event)
            case _:
                pass

    def close(self) -> None:
        """Stops the live display. Also called after a failure."""
        self._stop()

    def _start(self, event: RunStarted) -> None:
        self._stop()  # of the imitation before
        view = RunView(
            path=event.path, config=event.config, done=event.first_step, steps=event.steps
        )
        view.since = time.time()
        self._first, self._last_line = event.first_step, -math.inf
        self._started = time.monotonic()
        if event.first_step:  # the curves cover all steps
            reader = RunReader(event.path)
            for row in (*reader.metrics(), *reader.timings()):
                step = int(row.pop("step") or 0)
                if step <= event.first_step:
                    view.add_row(step, row)
        self._dashboard = Dashboard(view, footer=FOOTER)
        facts = ", ".join(f"{name} {value}" for name, value in event.facts.items())
        again = f" from step {event.first_step}" if event.first_step else ""
        self._print(
            Text(
                clean(f"{event.path}: {view.total} steps{again}" + (f" ({facts})" if facts else ""))
            )
        )
        if can_draw(self.console.file):
            self._live = LiveScreen(self._dashboard, self.console.file)
            self._live.start()

    def _step(self, event: StepDone) -> None:
        if self._dashboard is None:
            return
        view = self._dashboard.view
        with self._lock():
            view.add_row(event.step, event.metrics)
        if self._live is not None:
            return
        spent = time.monotonic() - self._started
        left = spent / max(event.step - self._first, 1) * (view.total - event.step)
        if spent - self._last_line >= SECONDS_BETWEEN_LINES or event.step == view.total:
            self._last_line = spent
            self._print(Text(step_line(event, total=view.total, left=left)))

    def _evaluated(self, event: Evaluated) -> None:
        self._print(Text(clean(evaluated_line(event))))
        if event.label == "before":  # evaluation time is not step time
            self._started = time.monotonic()
        if self._dashboard is not None:
            with self._lock():
                self._dashboard.view.add_evaluation(event)

    def _notice(self, event: Notice) -> None:
        if event.level == "info":
            self._print(Text(clean(event.message)))
            return
        self._print(Text(clean(f"WARNING ({event.kind}): {event.message}"), style="bold yellow"))
        if self._dashboard is not None:
            with self._lock():
                row = {"kind": event.kind, "message": event.message, "step": event.step}
                self._dashboard.view.events.append(row)
                self._dashboard.view.revision += 1

    def _end(self, event: RunEnded) -> None:
        view = None if self._dashboard is None else self._dashboard.view
        rows: list[Text | Table] = []
        if event.before is not None or event.after is not None:
            rows.append(_held_out(event))
        if view is not None:
            rows += _plotted(view, glyphs=glyphs_for(self.console.encoding))
        finished = view is None or view.done >= view.total
        word = "interrupted" if event.interrupted else "done" if finished else "stopped"
        rows.append(Text(f"\n{word} after {duration(event.seconds)}; the run is in {event.path}"))
        report = view is not None and view.config.log.report
        rows += [Text(line) for line in _next_lines(event, report=report, finished=finished)]
        self.console.print(
            Panel(Group(*rows), title="turnwise", expand=False)
            if self.console.is_terminal
            else Group(*rows),
            soft_wrap=not self.console.is_terminal,
        )

    def _print(self, line: Text) -> None:
        if self._live is None:
            self.console.print(line)
            return
        with self.console.capture() as said:
            self.console.print(line)
        self._live.say(said.get().rstrip("\n"))

    def _lock(self) -> AbstractContextManager[object]:
        """Held while the view changes: a thread draws it."""
        return contextlib.nullcontext() if self._live is None else self._live.lock

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def sparkline(values: Sequence[float], width: int = 50) -> str:
    """The values as a line of bars, the newest on the right; too many are averaged.

    Example:
        >>> sparkline([0.0, 0.5, 1.0]) == EIGHTHS[1] + EIGHTHS[4] + EIGHTHS[8]
        True
    """
    points = _squeeze(values, width)
    low, high = min(points), max(points)
    if low == high:
        return EIGHTHS[4] * len(points)
    return "".join(EIGHTHS[1 + int((value - low) / (high - low) * 7)] for value in points)


def _plotted(view: RunView, *, glyphs: Glyphs) -> list[Text]:
    """The first curve that is known, over all steps."""
    for what in SHOWN:
        plot = plot_of(view, what)
        if len(plot.points) > 1:
            lines = draw_plot(plot, width=PLOT[0], height=PLOT[1], glyphs=glyphs)
            return [Text(f"\nrollout/{what} by step"), *lines]
    return []


def _next_lines(event: RunEnded, *, report: bool, finished: bool) -> list[str]:
    """Where the report and the checkpoint are, and what to do next."""
    lines = [f"report: {event.path / 'report.html'}"] if report else []
    if event.checkpoint is None:
        return lines
    lines.append(f"checkpoint: {event.checkpoint} (its model folder loads with from_pretrained)")
    if event.interrupted or not finished:
        return [*lines, f"next: turnwise train --resume {event.path}"]
    against = " --against before" if event.before is not None else ""
    return [*lines, f"next: turnwise eval {event.path}{against}"]


def _held_out(ended: RunEnded) -> Table:
    shown = [event for event in (ended.before, ended.after, *ended.baselines) if event is not None]
    counts = "/".join(dict.fromkeys(str(event.tasks or event.episodes) for event in shown))
    title = f"{counts} held-out tasks (95 % intervals)"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in ("", "success", "", "reward"):
        table.add_column(column, no_wrap=True)
    for event in shown:
        share = event.success
        low, mean, high = event.reward
        table.add_row(
            event.player if event.label == "baseline" else f"{event.label} training",
            "-"
            if share is None
            else f"{share[1]:.1%} [{100 * share[0]:.1f}, {100 * share[2]:.1f}]".replace("%", " %"),
            "" if share is None else "#" * round(share[1] * BAR),
            f"{mean:.3f} [{low:.3f}, {high:.3f}]",
        )
    return table


def _squeeze(values: Sequence[float], width: int) -> list[float]:
    if len(values) <= width:
        return list(values)
    edges = [round(index * len(values) / width) for index in range(width + 1)]
    return [math.fsum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
