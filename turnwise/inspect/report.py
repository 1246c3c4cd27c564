"""report.html: the inspector's page of a run, written into its directory while it goes on and when
it ends."""

import logging
import time
from collections.abc import Sequence
from pathlib import Path

from turnwise.inspect.export import MOST_STEPS, Chosen, export_run, open_run
from turnwise.log.events import Event, RunEnded, RunStarted, StepDone
from turnwise.log.store import RunReader

logger = logging.getLogger(__name__)


def write_report(
    run: RunReader | str | Path,
    *,
    episodes: int = 6,
    steps: Sequence[int] | None = None,
    running: bool = False,
) -> Path:
    """The path of the report, written into the run directory.

    Args:
        episodes: how many episodes of a step are shown.
        steps: the steps whose episodes are shown. None: some from the first to the last.
        running: the run goes on, so that what is still missing is no finding.
    """
    folder = run.path if isinstance(run, RunReader) else Path(run)
    chosen = Chosen(episodes=episodes, steps=steps, most=2 if running else MOST_STEPS)
    page = export_run(open_run(folder), chosen, running=running)
    path, beside = folder / "report.html", folder / "report.tmp"
    beside.unlink(missing_ok=True)
    with beside.open("x", encoding="utf-8") as file:  # never through a link that a stranger left
        file.write(page)
    beside.replace(path)
    return path


class ReportSink:
    """Rewrites the report while a run goes on and when it ends, however it ends.

    It takes about 2 % of the run's time at most: reports are at least `seconds` apart, and at least
    fifty times the duration of the last one.
    """

    def __init__(self, *, seconds: float = 20.0) -> None:
        self._seconds = seconds
        self._path: Path | None = None
        self._next = 0.0

    def handle(self, event: Event) -> None:
        match event:
            case RunStarted():
                self._path = event.path
                self._next = time.monotonic() + self._seconds
            case StepDone() if time.monotonic() >= self._next:
                self._write(running=True)
            case RunEnded():
                self._write(running=False)
            case _:
                pass

    def close(self) -> None:
        """Nothing to release."""

    def _write(self, *, running: bool) -> None:
        if self._path is None:
            return
        started = time.monotonic()
        try:
            write_report(self._path, running=running)
        except Exception as error:  # a page must not end a run of hours
            logger.warning("the report could not be written: %s: %s", type(error).__name__, error)
        now = time.monotonic()
        self._next = now + max(self._seconds, 50.0 * (now - started))
