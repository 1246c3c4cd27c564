"""The run directory of a run on verl: the files of a native run, written by verl's driver."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from turnwise.data.batch import Batch
from turnwise.data.samples import episode_to_samples
from turnwise.log.events import Evaluated
from turnwise.log.outcome import summary_json
from turnwise.log.store import RunDirectory
from turnwise.train.step import check_ledger, credit_rows


class Recorder:
    """Writes metrics, episodes, credit and the token ledger. Without a directory it only keeps the
    metrics.

    Example:
        >>> recorder = Recorder(None)
        >>> recorder.metrics(0, {"rollout/reward": 1.0, "note": "no number"})
        >>> recorder.history
        [(0, {'rollout/reward': 1.0})]
    """

    def __init__(self, run: RunDirectory | None, *, credit: bool = True) -> None:
        self.run = run
        self.history: list[tuple[int, dict[str, float]]] = []
        """(step, metrics) as they were written."""
        self._credit = credit

    @property
    def path(self) -> Path | None:
        return None if self.run is None else self.run.path

    def metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Keeps and writes the numbers among the metrics; verl's timings go where ours do."""
        numbers: dict[str, float] = {}
        for name, value in metrics.items():
            try:
                number = float(value)
            except (TypeError, ValueError):
                continue
            numbers[
                f"time/{name.removeprefix('timing_s/')}" if name.startswith("timing_s/") else name
            ] = number
        self.history.append((step, numbers))
        if self.run is not None:
            self.run.write_metrics(step, numbers)

    def step(self, step: int, rows: Any, batch: Batch) -> None:
        """Stores a step's episodes and credit where the agent loops sent the episodes, and checks
        every token.

        Raises:
            TrainingError: what would be trained on is not what was sampled.
        """
        episodes = rows.episodes
        if not episodes:
            return
        ledger = check_ledger(step, episodes, batch)
        if self.run is None:
            return
        self.run.write_ledger(ledger)
        self.run.write_episodes(step, episodes)
        if self._credit:
            samples = [sample for episode in episodes for sample in episode_to_samples(episode)]
            self.run.write_credit(step, credit_rows(batch, samples))

    def note(self, kind: str, message: str, *, step: int) -> None:
        """Records an event of the run."""
        if self.run is not None:
            self.run.write_event(kind, message, step=step)

    def finish(
        self,
        *,
        steps: int,
        evaluations: Sequence[Evaluated],
        seconds: float,
        piece: Callable[[int], str],
    ) -> None:
        """Writes the result of the run, and the texts of the tokens that a report shows."""
        if self.run is None:
            return
        labelled = {event.label: event for event in evaluations}
        latest = self.run.checkpoints / "latest_checkpointed_iteration.txt"
        self.run.write_summary(
            summary_json(
                labelled.get("before"),
                labelled.get("after"),
                steps=steps,
                seconds=round(seconds, 3),
                checkpoint=f"checkpoints/global_step_{latest.read_text().strip()}"
                if latest.is_file()
                else None,
            )
        )
        self.run.write_pieces(piece)

    def close(self) -> None:
        if self.run is not None:
            self.run.close()
