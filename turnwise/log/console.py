"""Console output of a run: live progress in a terminal, plain lines elsewhere, and a summary at the
end."""

import itertools
import math
import time
from collections.abc import Sequence
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from turnwise.log.events import Evaluated, Event, Notice, RunEnded, RunStarted, StepDone
from turnwise.log.store import RunReader

EIGHTHS = " \u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
SECONDS_BETWEEN_LINES = 2.0
CURVES = ("rollout/success", "rollout/reward", "sft/loss")
"""Shown while a run goes on; the first one is plotted at its end."""
BAR = 16
"""Characters of the bar that stands for 100 %."""


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
        self._live: Live | None = None
        self._total = 0
        self._first = 0
        self._done = 0
        self._started = time.monotonic()
        self._last_line = -math.inf
        self._curves: dict[str, list[float]] = {}
        self._report = False

    def handle(self, event: Event) -> None:
        match event:
            case RunStarted():
                self._start(event)
            case StepDone():
                self._step(event)
            case Evaluated():
                self._print(evaluated_line(event))
                if event.label == "before":  # evaluation time is not step time
                    self._started = time.monotonic()
            case Notice(level="info"):
                self._print(Text(event.message))
            case Notice():
                self._print(Text(f"WARNING ({event.kind}): {event.message}", style="bold yellow"))
            case RunEnded():
                self._stop()
                self._end(event)
            case _:
                pass

    def close(self) -> None:
        """Stops the live display. Also called after a failure."""
        self._stop()

    def _start(self, event: RunStarted) -> None:
        steps = event.config.train.steps if event.steps is None else event.steps
        self._total, self._first = steps, event.first_step
        self._done = event.first_step
        self._started = time.monotonic()
        self._last_line, self._curves = -math.inf, {}
        self._report = event.config.log.report
        if event.first_step:  # the plot at the end covers all steps
            reader = RunReader(event.path)
            for name in CURVES:
                steps, values = reader.curve(name)
                kept = [v for s, v in zip(steps, values, strict=True) if s <= event.first_step]
                if kept:
                    self._curves[name] = kept
        facts = ", ".join(f"{name} {value}" for name, value in event.facts.items())
        again = f" from step {event.first_step}" if event.first_step else ""
        self._print(
            Text(f"{event.path}: {self._total} steps{again}" + (f" ({facts})" if facts else ""))
        )
        if self.console.is_terminal:
            self._live = Live(console=self.console, refresh_per_second=4, transient=True)
            self._live.start()

    def _step(self, event: StepDone) -> None:
        for name in CURVES:
            if (value := event.metrics.get(name)) is not None and math.isfinite(value):
                self._curves.setdefault(name, []).append(value)
        done = self._done = event.step
        spent = time.monotonic() - self._started
        left = spent / max(done - self._first, 1) * (self._total - done)
        line = step_line(event, total=self._total, left=left)
        if self._live is not None:
            self._live.update(self._dashboard(line, done))
        elif spent - self._last_line >= SECONDS_BETWEEN_LINES or done == self._total:
            self._last_line = spent
            self._print(line)

    def _dashboard(self, line: str, done: int) -> Group:
        bar = ProgressBar(total=self._total, completed=done, width=60)
        curves = [
            f"{name.split('/')[1]:>8} {sparkline(values)}" for name, values in self._curves.items()
        ]
        return Group(bar, Text(line), *(Text(curve) for curve in curves))

    def _end(self, event: RunEnded) -> None:
        name = next(iter(self._curves), None)
        rows: list[Text | Table] = []
        if event.before is not None or event.after is not None:
            rows.append(_held_out(event))
        if name is not None and len(self._curves[name]) > 1:
            unicode = (self.console.encoding or "").lower().startswith("utf")
            rows.append(Text(f"\n{name} by step"))
            first = self._done + 1 - len(self._curves[name])
            rows.append(Text(text_plot(self._curves[name], first=first, unicode=unicode)))
        word = (
            "interrupted"
            if event.interrupted
            else "done"
            if self._done >= self._total
            else "stopped"
        )
        rows.append(Text(f"\n{word} after {duration(event.seconds)}; the run is in {event.path}"))
        rows += [Text(line) for line in self._next_lines(event)]
        self.console.print(
            Panel(Group(*rows), title="turnwise", expand=False)
            if self.console.is_terminal
            else Group(*rows)
        )

    def _next_lines(self, event: RunEnded) -> list[str]:
        """Where the report and the checkpoint are, and what to do next."""
        lines = [f"report: {event.path / 'report.html'}"] if self._report else []
        if event.checkpoint is None:
            return lines
        lines.append(
            f"checkpoint: {event.checkpoint} (its model folder loads with from_pretrained)"
        )
        if event.interrupted or self._done < self._total:
            return [*lines, f"next: turnwise train --resume {event.path}"]
        against = " --against before" if event.before is not None else ""
        return [*lines, f"next: turnwise eval {event.path}{against}"]

    def _print(self, line: str | Text) -> None:
        self.console.print(escape(line) if isinstance(line, str) else line)

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def step_line(event: StepDone, *, total: int, left: float) -> str:
    """The step in a line.

    Example:
        >>> step_line(StepDone(step=5, metrics={"rollout/success": 0.25, "rollout/reward": 0.1,
        ...                                     "time/generated_tokens_per_second": 300.0}),
        ...                                     total=50, left=90.0)
        'step 5/50  success 25.0 %  reward 0.100  300 tokens/s  1 min 30 s left'
    """
    parts = [f"step {event.step}/{total}"]
    if (success := event.metrics.get("rollout/success")) is not None:
        parts.append(f"success {success:.1%}".replace("%", " %"))
    if (reward := event.metrics.get("rollout/reward")) is not None:
        parts.append(f"reward {reward:.3f}")
    if (loss := event.metrics.get("sft/loss")) is not None:
        parts.append(f"loss {loss:.3f}")
    if (accuracy := event.metrics.get("sft/token_accuracy")) is not None:
        parts.append(f"held-out accuracy {accuracy:.1%}".replace("%", " %"))
    name = "trained" if loss is not None else "generated"
    if (speed := event.metrics.get(f"time/{name}_tokens_per_second")) is not None:
        parts.append(f"{speed:.0f} tokens/s")
    parts.append(f"{duration(left)} left")
    return "  ".join(parts)


def evaluated_line(event: Evaluated) -> str:
    """An evaluation in a line.

    Example:
        >>> evaluated_line(Evaluated(step=0, label="before", episodes=256,
        ...                          success=(0.08, 0.11, 0.15), reward=(-0.1, 0.0, 0.1)))
        'evaluation before training: success 11.0 % [8.0 %, 15.0 %], reward 0.000 [-0.100, 0.100], 256 episodes'
    """  # noqa: E501
    whens = {"during": f"at step {event.step}", "baseline": f"of the {event.player}"}
    when = whens.get(event.label, f"{event.label} training")
    success = "" if event.success is None else f"success {_share(event.success)}, "
    low, mean, high = event.reward
    return f"evaluation {when}: {success}reward {mean:.3f} [{low:.3f}, {high:.3f}], {played(event)}"


def played(event: Evaluated) -> str:
    """How much was played, in words.

    Example:
        >>> played(Evaluated(step=0, label="after", episodes=8, tasks=2, success=None,
        ...                  reward=(0, 0, 0)))
        '8 episodes of only 2 tasks'
    """
    few = event.tasks is not None and event.tasks < event.episodes
    return f"{event.episodes} episodes" + (f" of only {event.tasks} tasks" if few else "")


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


def text_plot(
    values: Sequence[float],
    *,
    first: int = 0,
    width: int = 60,
    height: int = 8,
    unicode: bool = True,
) -> str:
    """The values as bars over steps, `height` lines high, with the scale on the left.

    Example:
        >>> print(text_plot([0.0, 1.0, 2.0, 3.0], height=3, unicode=False))
             3 |   #
               |  ##
             0 | ###
               +----
                0..3
    """
    points = _squeeze(values, width)
    low, high = min(points), max(points)
    span = (high - low) or 1.0
    lines: list[str] = []
    for row in range(height, 0, -1):
        label = f"{high:.3g}" if row == height else f"{low:.3g}" if row == 1 else ""
        cells = [min(max((value - low) / span * height - (row - 1), 0.0), 1.0) for value in points]
        bars = "".join(
            EIGHTHS[round(cell * 8)] if unicode else "#" if cell >= 0.5 else " " for cell in cells
        )
        lines.append(f"{label:>6} |{bars}")
    steps = f"{first}..{first + len(values) - 1}"
    return "\n".join([*lines, f"{'':>6} +{'-' * len(points)}", f"{'':>8}{steps}"])


def duration(seconds: float) -> str:
    """Seconds for people.

    Example:
        >>> duration(3.4), duration(200), duration(7500)
        ('3 s', '3 min 20 s', '2 h 5 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


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


def _share(interval: tuple[float, float, float]) -> str:
    low, middle, high = (f"{100 * value:.1f} %" for value in interval)
    return f"{middle} [{low}, {high}]"


def _squeeze(values: Sequence[float], width: int) -> list[float]:
    if len(values) <= width:
        return list(values)
    edges = [round(index * len(values) / width) for index in range(width + 1)]
    return [math.fsum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
