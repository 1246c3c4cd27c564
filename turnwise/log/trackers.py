"""Experiment trackers as sinks. Each is imported when used; one that is not installed is an error
before the run."""

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from turnwise.config.schema import Config, LogConfig
from turnwise.log.events import Evaluated, Event, RunStarted, Sink, StepDone

PACKAGES = {
    "tensorboard": ("torch.utils.tensorboard", "tensorboard"),
    "wandb": ("wandb", "wandb"),
    "mlflow": ("mlflow", "mlflow"),
    "trackio": ("trackio", "trackio"),
}
"""Tracker -> the module that is imported, the package that installs it."""


class TrackerError(RuntimeError):
    """A tracker that cannot be used; the message names the package."""


def make_trackers(log: LogConfig) -> list[Sink]:
    """The trackers that the config names, each ready to start.

    Raises:
        TrackerError: a package is missing. Call this before a model is loaded.
    """
    return [_MAKERS[name](_load(name)) for name in log.trackers]


def _load(name: str) -> Any:
    module, package = PACKAGES[name]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise TrackerError(
            f"log.trackers names {name}, which needs the package {package!r} ({error}); "
            f"run: pip install {package}, or remove it from log.trackers"
        ) from error


class _Tracker:
    """Base class of trackers: logs the metrics of steps and evaluations."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def handle(self, event: Event) -> None:
        match event:
            case RunStarted():
                self.start(event.path, event.config, event.first_step)
            case StepDone():
                self.log(
                    event.step,
                    {name: value for name, value in event.metrics.items() if value == value},
                )
            case Evaluated():
                low_mean_high = {
                    "reward": event.reward,
                    **({"success": event.success} if event.success else {}),
                }
                self.log(
                    event.step, {f"eval/{name}": value[1] for name, value in low_mean_high.items()}
                )
            case _:
                pass

    def start(self, path: Path, config: Config, first_step: int) -> None:
        raise NotImplementedError

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class TensorBoard(_Tracker):
    """Event files under RUN/tensorboard."""

    writer: Any = None

    def start(self, path: Path, config: Config, first_step: int) -> None:
        self.writer = self.module.SummaryWriter(
            str(path / "tensorboard"), purge_step=first_step or None
        )
        self.writer.add_text("config", f"```json\n{config.model_dump_json(indent=1)}\n```")

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()


class Wandb(_Tracker):
    """Weights & Biases. Offline, under RUN/wandb, unless WANDB_API_KEY or WANDB_MODE is set (`wandb
    sync` uploads)."""

    run: Any = None

    def start(self, path: Path, config: Config, first_step: int) -> None:
        asked = os.environ.get("WANDB_MODE") or os.environ.get("WANDB_API_KEY")
        mode: Literal["offline"] | None = None if asked else "offline"
        self.run = self.module.init(
            project="turnwise",
            name=path.name,
            id=path.name,
            dir=str(path),
            config=config.model_dump(mode="json"),
            mode=mode,
            resume="allow" if first_step else None,
        )

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self.run.log(dict(numbers), step=step)

    def close(self) -> None:
        if self.run is not None:
            self.run.finish()


class MLflow(_Tracker):
    """MLflow, at MLFLOW_TRACKING_URI, else in `mlflow.db` beside the run directories (view it with
    `mlflow ui`)."""

    active = False

    def start(self, path: Path, config: Config, first_step: int) -> None:
        root = path.parent.absolute()
        if not os.environ.get("MLFLOW_TRACKING_URI"):
            self.module.set_tracking_uri(f"sqlite:///{root / 'mlflow.db'}")
        if self.module.get_experiment_by_name("turnwise") is None:
            self.module.create_experiment("turnwise", artifact_location=(root / "mlflow").as_uri())
        self.module.set_experiment("turnwise")
        self.module.start_run(run_name=path.name)
        self.active = True
        self.module.log_dict(config.model_dump(mode="json"), "config.json")

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self.module.log_metrics(dict(numbers), step=step)

    def close(self) -> None:
        if self.active:
            self.module.end_run()


class Trackio(_Tracker):
    """trackio, in its own local store."""

    active = False

    def start(self, path: Path, config: Config, first_step: int) -> None:
        resume = "allow" if first_step else "never"
        self.module.init(
            project="turnwise", name=path.name, config=config.model_dump(mode="json"), resume=resume
        )
        self.active = True

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self.module.log(dict(numbers), step=step)

    def close(self) -> None:
        if self.active:
            self.module.finish()


_MAKERS = {"tensorboard": TensorBoard, "wandb": Wandb, "mlflow": MLflow, "trackio": Trackio}
