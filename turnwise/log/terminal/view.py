"""The state of a run, from its events or its directory, for the dashboard."""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from turnwise.config.schema import Config
from turnwise.log.doctor import COLLAPSED_STEPS, Chart, Diagnosis, diagnose
from turnwise.log.events import Evaluated
from turnwise.log.metrics import collapsed_steps
from turnwise.log.records import LedgerEntry
from turnwise.types import Json

State = Literal["running", "done", "stopped", "interrupted"]
PARTS = ("rollout", "score", "update")
"""Parts of a step that the dashboard names; batch, filter and advantages are the rest."""
REST = ("batch", "filter", "advantages")
RECENT = 20
"""Steps whose mean time says how long the others take."""
WHILE_RUNNING = ("unfinished", "no_improvement")
"""Findings that say nothing of a run that goes on."""


@dataclass(slots=True)
class RunView:
    """A run as it stands. One thread changes it; `revision` counts the changes."""

    path: Path
    config: Config
    state: State = "running"
    done: int = 0
    """Training steps."""
    spent: float | None = None
    """Seconds, where the run is over; else the clock goes on from `since`."""
    since: float | None = None
    """When it began, in seconds of the clock that `left` and `elapsed` are asked with."""
    curves: dict[str, dict[int, float]] = field(default_factory=dict[str, dict[int, float]])
    """Metric -> step -> value."""
    not_finite: dict[str, int] = field(default_factory=dict[str, int])
    ledger: list[LedgerEntry] = field(default_factory=list[LedgerEntry])
    events: list[Mapping[str, Json]] = field(default_factory=list[Mapping[str, Json]])
    summary: Mapping[str, Json] = field(default_factory=dict[str, Json])
    said: deque[str] = field(default_factory=lambda: deque[str](maxlen=50))
    """Lines that the run printed, the newest last."""
    skipped: list[str] = field(default_factory=list[str])
    """Reasons why data could not be read."""
    steps: int | None = None
    """Steps of the whole run. None: as the config says."""
    revision: int = 0

    @property
    def total(self) -> int:
        if self.steps is not None:
            return self.steps
        return self.config.train.steps or int(self.curves.get("sft/steps", {}).get(0, 0))

    def add_row(self, step: int, row: Mapping[str, float | None]) -> None:
        """Takes the numbers of a step, of an evaluation after it or of a baseline."""
        for name, value in row.items():
            if value is not None and math.isfinite(value):
                self.curves.setdefault(name, {})[step] = value
        if any(name.startswith(("rollout/", "sft/")) for name in row):
            self.done = max(self.done, step)
        self.revision += 1

    def add_evaluation(self, event: Evaluated) -> None:
        """Takes an evaluation, under the names that metrics.jsonl has for it."""
        row: dict[str, float | None] = {}
        prefix = "eval/"
        if event.label == "baseline":
            known = [name for name in ("random", "blind") if name in event.player]
            prefix = f"baseline/{known[0] if known else 'expert'}_"
        for name, interval in (("success", event.success), ("reward", event.reward)):
            if interval is not None:
                low, row[f"{prefix}{name}"], high = interval
                if prefix == "eval/":
                    row |= {f"eval/{name}_low": low, f"eval/{name}_high": high}
        self.add_row(event.step, row)

    def points(self, name: str) -> list[tuple[float, float]]:
        """(step, value) of a metric, by step."""
        return sorted((float(step), value) for step, value in self.curves.get(name, {}).items())

    def last(self, name: str) -> float | None:
        """The metric's newest value."""
        found = self.curves.get(name)
        return found[max(found)] if found else None

    def baselines(self, what: str) -> dict[str, float]:
        """Player -> success or reward, the weakest first."""
        found: dict[str, float] = {}
        for name in self.curves:
            player, _, of = name.removeprefix("baseline/").rpartition("_")
            value = self.last(name)
            if name.startswith("baseline/") and of == what and value is not None:
                found[player] = value
        return dict(sorted(found.items(), key=lambda item: item[1]))

    def shares(self) -> dict[str, float]:
        """Part of a step -> its share of the time, over the last steps; empty where unknown."""
        seconds = {part: self._recent(f"time/{part}") for part in PARTS}
        seconds["rest"] = sum(self._recent(f"time/{part}") for part in REST)
        total = sum(seconds.values())
        return {part: value / total for part, value in seconds.items()} if total else {}

    def elapsed(self, now: float) -> float | None:
        """Seconds since the run began, or that it took."""
        if self.spent is not None:
            return self.spent
        return None if self.since is None else max(now - self.since, 0.0)

    def left(self) -> float | None:
        """Seconds until the last step, from the times of the newest ones; None where unknown."""
        each = sum(self._recent(f"time/{part}") for part in (*PARTS, *REST))
        return each * max(self.total - self.done, 0) if each else None

    def findings(self) -> list[Diagnosis]:
        """The doctor's diagnoses, without the run's own notices unless they are problems."""
        kinds = {str(event["kind"]) for event in self.events}
        running = self.state == "running"
        return [
            one
            for one in diagnose(self.chart())
            if (one.name not in kinds or one.severity == "problem")
            and not (running and one.name in WHILE_RUNNING)
        ]

    def chart(self) -> Chart:
        """The input of the doctor."""
        return Chart(
            config=self.config,
            steps=self.done,
            curves={
                name: [values[step] for step in sorted(values)]
                for name, values in self.curves.items()
                if not name.startswith("time/")
            },
            not_finite=dict(self.not_finite),
            ledger=tuple(self.ledger),
            events=tuple(self.events),
            summary=self.summary,
            collapsed=self._collapsed(),
        )

    def _collapsed(self) -> int:
        steps = sorted(self.curves.get("rollout/episodes", {}))[-COLLAPSED_STEPS:]
        rollout = [name for name in self.curves if name.startswith("rollout/")]
        rows = (
            {name: self.curves[name][step] for name in rollout if step in self.curves[name]}
            for step in steps
        )
        return collapsed_steps(rows)

    def _recent(self, name: str) -> float:
        values = self.curves.get(name, {})
        last = sorted(values)[-RECENT:]
        return math.fsum(values[step] for step in last) / len(last) if last else 0.0
