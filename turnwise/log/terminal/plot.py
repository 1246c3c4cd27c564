"""Curves in a terminal: an axis, marked reference lines, evaluations as points."""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from rich.text import Text

from turnwise.log.terminal.glyphs import Glyphs

Points = Sequence[tuple[float, float]]
LABEL = 6
"""Cells of the scale on the left."""
CROWDING = 2.5
"""How much higher than the curve a plot may become to show a reference line."""
BRAILLE = 0x2800
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bits of the dots in a braille cell, by row and column."""
COLOURS = {"random": "red", "blind": "yellow", "expert": "green"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Plot:
    """The content of one plot."""

    points: Points
    """(step, value), by step."""
    marks: Points = ()
    """Single points on top, such as evaluations."""
    lines: Mapping[str, float] = field(default_factory=dict[str, float])
    """Reference lines by name."""
    percent: bool = False
    style: str = "cyan"


def draw_plot(plot: Plot, *, width: int, height: int, glyphs: Glyphs) -> list[Text]:
    """The plot in `height` lines of `width` cells, its axis of steps on the last.

    Example:
        >>> from turnwise.log.terminal.glyphs import ASCII
        >>> plot = Plot(points=[(1, 0.0), (2, 0.5), (3, 1.0)], lines={"random": 0.5}, percent=True)
        >>> for line in draw_plot(plot, width=32, height=6, glyphs=ASCII):
        ...     print(line.plain.rstrip())
         100 % |              ***
               |           ***
               |------*****------ random
               |   ***
           0 % |***
               +1---------------3
    """
    low, high = _scale(plot)
    names = sorted(
        (name for name, value in plot.lines.items() if math.isfinite(value)),
        key=lambda name: -plot.lines[name],
    )
    words = {name: f"{name} {glyphs.up}" if plot.lines[name] > high else name for name in names}
    margin = max((len(word) + 1 for word in words.values()), default=0)
    margin = margin if width - LABEL - 2 - margin >= 12 else 0
    columns, rows = max(width - LABEL - 2 - margin, 1), max(height - 1, 1)
    known = [*plot.points, *plot.marks]
    first, last = min(step for step, _ in known), max(step for step, _ in known)

    def row_of(value: float) -> int:
        return min(max(round((high - value) / (high - low) * (rows - 1)), 0), rows - 1)

    cells = [[(" ", "")] * columns for _ in range(rows)]
    for name in names:
        if plot.lines[name] > high:  # far above: a word says so
            continue
        row = row_of(plot.lines[name])
        cells[row] = [(glyphs.reference, f"dim {COLOURS.get(name, 'blue')}")] * columns
    _draw_curve(plot, cells, span=(first, last), scale=(low, high), dots=glyphs.dots)
    for step, value in plot.marks:
        column = round((step - first) / ((last - first) or 1.0) * (columns - 1))
        cells[row_of(value)][column] = (glyphs.mark, "bold")
    labels = _labels([(name, row_of(plot.lines[name])) for name in names], rows) if margin else {}
    scale = _ticks(low, high, rows, percent=plot.percent)
    lines: list[Text] = []
    for row in range(rows):
        line = Text(f"{scale.get(row, ''):>{LABEL}} {glyphs.side}", style="")
        line.stylize("dim")
        for style, same in groupby(cells[row], key=lambda cell: cell[1]):
            line.append("".join(sign for sign, _ in same), style=style or None)
        if name := labels.get(row):
            line.append(f" {words[name]}", style=COLOURS.get(name, "blue"))
        lines.append(line)
    lines.append(_axis(first, last, columns, glyphs))
    return lines


def _scale(plot: Plot) -> tuple[float, float]:
    """The least and the largest value shown. A reference line that would press the curve into a
    corner is left out."""
    values = [value for _, value in (*plot.points, *plot.marks)]
    low, high = min(values), max(values)
    for value in sorted(value for value in plot.lines.values() if math.isfinite(value)):
        low = min(low, value)
        if value - low <= CROWDING * (high - low) or len(plot.points) < 2:
            high = max(high, value)
        elif not plot.percent and value > high:  # room for its name
            high += 0.15 * (high - low)
    if plot.percent:  # steps of ten points, from zero: small changes look small
        return 0.0, max(math.ceil(high * 10 - 1e-9) / 10, 0.1)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _ticks(low: float, high: float, rows: int, *, percent: bool) -> dict[int, str]:
    def written(value: float) -> str:
        if percent:
            return f"{100 * value:.0f} %"
        return _number(value, span=high - low)

    found = {0: written(high), rows - 1: written(low)}
    if rows >= 7 and rows % 2:
        found[rows // 2] = written((low + high) / 2)
    return found


def _number(value: float, *, span: float) -> str:
    """The value in at most LABEL cells. What is small against the span of its axis is 0.

    Example:
        >>> _number(1.2e-3, span=1.0), _number(1.2e-3, span=2e-3), _number(-1.2e-3, span=2e-3)
        ('0.00', '1.2e-3', '-1e-3')
        >>> _number(-12.345, span=40.0), _number(1234.5, span=40.0), _number(-2e9, span=4e9)
        ('-12.35', '1234', '-2.0e9')
    """
    size = abs(value)
    if size < 0.005 * span:
        return "0.00"
    if 0.005 <= size < 99.995:
        return f"{value:.2f}"
    if 99.995 <= size < 99999:
        return f"{value:.0f}"
    for digits in (1, 0):
        mantissa, _, exponent = f"{value:.{digits}e}".partition("e")
        text = f"{mantissa}e{int(exponent)}"
        if len(text) <= LABEL:
            break
    return text[:LABEL]


def _labels(wanted: Sequence[tuple[str, int]], rows: int) -> dict[int, str]:
    """The names by row, each as near to its line as there is a free row; the first come first."""
    found: dict[int, str] = {}
    for name, row in wanted:
        free = [place for place in range(rows) if place not in found]
        if free:
            found[min(free, key=lambda place: (abs(place - row), -place))] = name
    return found


def _axis(first: float, last: float, columns: int, glyphs: Glyphs) -> Text:
    start, end = f"{first:.0f}", f"{last:.0f}" if last > first else ""
    middle = max(columns - len(start) - len(end), 0)
    ruled = f"{start}{glyphs.rule * middle}{end}"[: max(columns, len(start))]
    return Text(f"{'':>{LABEL}} {glyphs.corner}{ruled}", style="dim")


def _draw_curve(
    plot: Plot,
    cells: list[list[tuple[str, str]]],
    *,
    span: tuple[float, float],
    scale: tuple[float, float],
    dots: bool,
) -> None:
    """Puts the curve over the cells: a column of dots per value, joined to the one before."""
    if not plot.points:
        return
    rows, columns = len(cells), len(cells[0])
    across, down = (2 * columns, 4 * rows) if dots else (columns, rows)
    (first, last), (low, high) = span, scale
    width = (last - first) or 1.0
    begin = round((plot.points[0][0] - first) / width * (across - 1))
    finish = round((plot.points[-1][0] - first) / width * (across - 1))
    bits: dict[tuple[int, int], int] = {}
    before: int | None = None
    for x in range(begin, finish + 1):
        value = _value_at(plot.points, x, first=first, step=width / max(across - 1, 1))
        y = min(max(round((high - value) / (high - low) * (down - 1)), 0), down - 1)
        start, end = (y, y) if before is None or abs(y - before) < 2 else _joined(before, y)
        for place in range(start, end + 1):
            cell = (place // 4, x // 2) if dots else (place, x)
            bits[cell] = bits.get(cell, 0) | (_DOTS[place % 4][x % 2] if dots else 1)
        before = y
    for (row, column), mask in bits.items():
        cells[row][column] = (chr(BRAILLE + mask) if dots else "*", plot.style)


def _joined(before: int, y: int) -> tuple[int, int]:
    """The rows that join two heights, without the first, which is drawn already."""
    return (before + 1, y) if y > before else (y, before - 1)


def _value_at(points: Points, x: int, *, first: float, step: float) -> float:
    """The mean of the points in this column, else the value between its neighbours."""
    left, right = first + (x - 0.5) * step, first + (x + 0.5) * step
    begin = bisect_left(points, left, key=lambda point: point[0])
    end = begin
    while end < len(points) and points[end][0] < right:
        end += 1
    if end > begin:
        return math.fsum(value for _, value in points[begin:end]) / (end - begin)
    (a, low), (b, high) = points[max(begin - 1, 0)], points[min(begin, len(points) - 1)]
    share = (first + x * step - a) / (b - a) if b > a else 0.0
    return low + (high - low) * min(max(share, 0.0), 1.0)
