"""LivePlot: curves that grow in a notebook's cell while a run goes on."""

import math
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from turnwise.log.callbacks import Callback
from turnwise.log.events import RunEnded
from turnwise.log.figures import figure


class LivePlot(Callback):
    """Draws metrics under the cell, at most every `seconds`. It needs IPython, which a notebook
    has; no plotting library.

    Example:
        >>> drawn = []
        >>> plot = LivePlot(["rollout/reward"], show=drawn.append)
        >>> plot.on_step(1, {"rollout/reward": 0.5})
        >>> "<svg" in drawn[0]
        True
    """

    def __init__(
        self,
        metrics: Sequence[str] = ("rollout/success", "rollout/reward"),
        *,
        seconds: float = 1.0,
        show: Any = None,
    ) -> None:
        self._points: dict[str, list[tuple[float, float | None]]] = {name: [] for name in metrics}
        self._seconds = seconds
        self._drawn = -math.inf
        self._show = show if show is not None else _cell_output()

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, points in self._points.items():
            if name in metrics:
                points.append((step, metrics[name]))
        if time.monotonic() - self._drawn >= self._seconds:
            self._draw()

    def on_end(self, run: RunEnded) -> None:
        self._draw()

    def html(self) -> str:
        """The curves so far."""
        figures = "".join(figure(name, points) for name, points in self._points.items())
        style = "display: grid; grid-template-columns: repeat(2, minmax(240px, 420px)); gap: 1em"
        return f'<div style="{style}">{figures}</div>'

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        self._show(self.html())


def _cell_output() -> Any:
    """A function that shows HTML in the cell's output, in place of what it showed before."""
    try:
        display = import_module("IPython.display")
    except ImportError as error:
        raise ImportError(
            "LivePlot draws into a notebook's cell and needs IPython; run: pip install ipython, or "
            "pass show=, a function that takes HTML"
        ) from error
    handle = display.display(display.HTML(""), display_id=True)

    def show(html: str) -> None:
        if handle is not None:  # plain IPython outside a notebook has nowhere to draw
            handle.update(display.HTML(html))

    return show
