"""A curve as inline SVG, for notebooks: axes with ticks, the points as they are, a smoothed line
over them. No library and no script."""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

Point = tuple[float, float | None]
WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 340, 170, 46, 26, 8, 8
COLOUR = "#36c"
SMOOTH_FROM = 12
"""Points from which a smoothed line is drawn."""
MOST_POINTS = 400
"""Points drawn of one curve; more are averaged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Frame:
    """Where a step and a value are in the picture."""

    start: float
    end: float
    low: float
    high: float

    def x(self, step: float) -> float:
        span = (self.end - self.start) or 1.0
        return LEFT + (step - self.start) / span * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return TOP + (self.high - value) / (self.high - self.low) * (HEIGHT - BOTTOM - TOP)

    def at(self, step: float, value: float) -> str:
        return f"{self.x(step):.1f},{self.y(value):.1f}"


def figure(name: str, points: Iterable[Point]) -> str:
    """One curve with its caption; empty where there is no finite value. A value that is None or not
    finite is a gap."""
    known = [(step, value) for step, value in points if value is not None and math.isfinite(value)]
    if not known:
        return ""
    steps, values = [step for step, _ in known], [value for _, value in known]
    margin = (max(values) - min(values)) * 0.05 or max(abs(max(values)) * 0.05, 1e-9)
    frame = _Frame(
        start=min(steps), end=max(steps), low=min(values) - margin, high=max(values) + margin
    )
    return (
        f"<figure><figcaption>{escape(name)} = {values[-1]:.4g}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(name)}">'
        f"{_axes(frame)}{_curve(frame, _fewer(known))}</svg></figure>"
    )


def smoothed(
    points: Sequence[tuple[float, float]], *, share: float = 0.1
) -> list[tuple[float, float]]:
    """A running mean over a tenth of the points, centred, so that it neither lags nor leads.

    Example:
        >>> smoothed([(0, 0.0), (1, 3.0), (2, 0.0)])
        [(0, 1.5), (1, 1.0), (2, 1.5)]
    """
    reach = max(1, round(len(points) * share / 2))
    found: list[tuple[float, float]] = []
    for index, (step, _) in enumerate(points):
        near = [value for _, value in points[max(0, index - reach) : index + reach + 1]]
        found.append((step, math.fsum(near) / len(near)))
    return found


def ticks(low: float, high: float, *, count: int = 4) -> list[float]:
    """Round numbers between two values, about `count` of them.

    Example:
        >>> ticks(0.03, 0.97), ticks(0, 60)
        ([0.2, 0.4, 0.6, 0.8], [0.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0])
    """
    if not high > low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = min((1, 2, 5, 10), key=lambda size: abs(size * power - rough)) * power
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [float(f"{number * step:.10g}") for number in range(first, last + 1)]


def _axes(frame: _Frame) -> str:
    parts: list[str] = []
    for value in ticks(frame.low, frame.high):
        y = frame.y(value)
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#8883"/>'
            + _text(LEFT - 4, y + 3, f"{value:.4g}", "end")
        )
    for step in ticks(frame.start, frame.end):
        if step == int(step):
            parts.append(_text(frame.x(step), HEIGHT - 12, f"{step:g}", "middle"))
    base = HEIGHT - BOTTOM
    parts.append(
        f'<path d="M{LEFT} {TOP}V{base}H{WIDTH - RIGHT}" fill="none" stroke="#888"/>'
        + _text(WIDTH - RIGHT, HEIGHT - 2, "step", "end")
    )
    return "".join(parts)


def _text(x: float, y: float, words: str, anchor: str) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="10" text-anchor="{anchor}" fill="#888">'
        f"{words}</text>"
    )


def _curve(frame: _Frame, points: Sequence[tuple[float, float]]) -> str:
    smooth = len(points) >= SMOOTH_FROM
    line = " ".join(frame.at(*point) for point in points)
    parts = [
        f'<polyline points="{line}" fill="none" stroke="{COLOUR}" stroke-width="1" '
        f'opacity="{0.35 if smooth else 1}"/>'
    ]
    if smooth:
        line = " ".join(frame.at(*point) for point in smoothed(points))
        parts.append(f'<polyline points="{line}" fill="none" stroke="{COLOUR}" stroke-width="2"/>')
    else:
        parts += [
            f'<circle cx="{frame.x(s):.1f}" cy="{frame.y(v):.1f}" r="2" fill="{COLOUR}"/>'
            for s, v in points
        ]
    return "".join(parts)


def _fewer(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """At most MOST_POINTS of them, each the mean of its neighbours."""
    if len(points) <= MOST_POINTS:
        return points
    edges = [round(index * len(points) / MOST_POINTS) for index in range(MOST_POINTS + 1)]
    found: list[tuple[float, float]] = []
    for a, b in itertools.pairwise(edges):
        part = points[a:b]
        found.append((part[-1][0], math.fsum(value for _, value in part) / len(part)))
    return found
