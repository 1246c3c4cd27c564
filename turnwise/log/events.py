"""Typed events of a training run, for the console, trackers and callbacks."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from turnwise.config.schema import Config
from turnwise.types import Episode, Json, Turn


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStarted:
    """Everything is loaded; the first step comes next."""

    path: Path
    """The run directory."""
    config: Config
    first_step: int = 0
    """Training steps done before; above 0 where the run was resumed."""
    facts: Mapping[str, Json] = field(default_factory=dict[str, Json])
    """Shown once: the model, its parameters, the device."""
    steps: int | None = None
    """Steps of the whole run. None: the config's train.steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepDone:
    """A step is over; its metrics are those of metrics.jsonl and timings.jsonl together."""

    step: int
    """Training steps done, this one included."""
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated:
    """An evaluation on held-out tasks is over. Intervals are 95 %."""

    step: int
    label: Literal["before", "during", "after", "baseline"]
    episodes: int
    success: tuple[float, float, float] | None
    """(low, estimate, high); None where the environment says nothing of success."""
    reward: tuple[float, float, float]
    player: str = "policy"
    """Who played; of a baseline, in words."""
    tasks: int | None = None
    """Different tasks among the episodes. None: as many as episodes."""

    def to_json(self) -> dict[str, Json]:
        return {
            "step": self.step,
            "label": self.label,
            "episodes": self.episodes,
            "success": None if self.success is None else list(self.success),
            "reward": [bound if math.isfinite(bound) else None for bound in self.reward],
            "player": self.player,
            "tasks": self.tasks,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Json]) -> "Evaluated":
        low, estimate, high = data[
            "reward"
        ]  # one episode alone has no bounds, and JSON no infinity
        return cls(
            step=data["step"],
            label=data["label"],
            episodes=data["episodes"],
            success=None if data["success"] is None else tuple(data["success"]),
            reward=(
                -math.inf if low is None else low,
                estimate,
                math.inf if high is None else high,
            ),
            player=data.get("player", "policy"),
            tasks=data.get("tasks"),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Notice:
    """A message to the user, such as the fallback to single-turn training."""

    kind: str
    """Its name in events.jsonl."""
    message: str
    step: int | None = None
    level: Literal["info", "warning"] = "warning"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEnded:
    """The run is over, or was interrupted."""

    path: Path
    seconds: float
    before: Evaluated | None = None
    after: Evaluated | None = None
    baselines: tuple[Evaluated, ...] = ()
    interrupted: bool = False
    checkpoint: Path | None = None
    """The last one, if any."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnDone:
    """A turn of a training episode was played. Told only where a sink hears turns."""

    episode_id: str
    index: int
    turn: Turn


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeDone:
    """A training episode is over. Told only where a sink hears episodes."""

    episode: Episode


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSaved:
    """A checkpoint is on the disk."""

    step: int
    path: Path


Event = (
    RunStarted | StepDone | Evaluated | Notice | RunEnded | TurnDone | EpisodeDone | CheckpointSaved
)


class Sink(Protocol):
    """Listens to a run."""

    def handle(self, event: Event) -> None: ...

    def close(self) -> None:
        """Releases everything. Called once, also after a failure."""
        ...


@dataclass(frozen=True, slots=True)
class Sinks:
    """Several sinks as one.

    Example:
        >>> Sinks(()).handle(Notice(kind="fallback", message="no environment"))
    """

    sinks: Sequence[Sink]

    def hear(self, what: Literal["turns", "episodes"]) -> bool:
        """True if a sink subscribes. Turns and episodes are frequent, so only subscribers get
        them."""
        return bool(self.that_hear(what))

    def that_hear(self, what: Literal["turns", "episodes", "stages"]) -> list[Sink]:
        """The sinks that ask for these, by an attribute such as hears_turns."""
        return [sink for sink in self.sinks if getattr(sink, f"hears_{what}", False)]

    def handle(self, event: Event) -> None:
        for sink in self.sinks:
            sink.handle(event)

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()
