"""A whole run, as the command line starts it: console, trackers, training, report."""

import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from turnwise.config.schema import Config
from turnwise.envs.trust import refuse_foreign_code
from turnwise.inspect.report import ReportSink
from turnwise.log.callbacks import callback_sinks
from turnwise.log.console import ConsoleSink
from turnwise.log.events import Sink
from turnwise.log.store import RunReader
from turnwise.log.trackers import make_trackers
from turnwise.train.sft import SftTrainer
from turnwise.train.stages import StageStopped
from turnwise.train.trainer import PPOTrainer, RunResult

__all__ = ["Estimate", "RunResult", "estimate", "train"]


def train(
    config: Config | None = None,
    *,
    resume: Path | None = None,
    sinks: Sequence[Sink] | None = None,
    trust: bool = False,
    callbacks: object = (),
) -> RunResult:
    """Trains to the end and returns the result.

    Args:
        config: None with `resume`: the config that the run was started with.
        resume: a run directory to resume, from its last valid checkpoint.
        sinks: receivers of progress events. None: the console.
        trust: load the code that the config of a resumed run names, even if another user made it.
        callbacks: the user's own, one or several, besides those that the config names.

    Raises:
        ValueError: the config contradicts itself, the machine, or the run that is resumed.
        TrainingError: training cannot go on; the last checkpoint is intact.
        CallbackError: a callback raised.
    """
    if config is None:
        if resume is None:
            raise ValueError("train needs a config, or a run directory to resume")
        config = RunReader(resume).config
        refuse_foreign_code(config, stored=resume / "config.yaml", trust=trust)
    if config.backend != "native":
        raise ValueError(
            f"this is the native trainer, and the config asks for backend {config.backend!r}"
        )
    listeners: list[Sink] = [
        *([ConsoleSink()] if sinks is None else sinks),
        *make_trackers(config.log),
        *([ReportSink()] if config.log.report else []),
        *callback_sinks(config.log.callbacks),
        *callback_sinks(callbacks),
    ]
    if config.train.steps == 0:
        return SftTrainer(config, resume=resume, sinks=listeners).fit()
    try:
        return PPOTrainer(config, resume=resume, sinks=listeners).fit()
    except StageStopped as stopped:
        return stopped.result


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Time and memory of a whole run, measured on a few of its steps.

    Example:
        >>> print(Estimate(steps=100, measured=2, step_seconds=1.5, start_seconds=10.0,
        ...     eval_seconds=5.0,
        ...                memory_bytes=2**30, step_tokens=8000.0))
        about 2 min 45 s for 100 steps (1.5 s each, measured on 2), 1.0 GiB of memory, 0.8 million tokens trained on
    """  # noqa: E501

    steps: int
    measured: int
    step_seconds: float
    start_seconds: float
    """Loading, and the embedded model's warm start."""
    eval_seconds: float
    """All evaluations together."""
    memory_bytes: int
    """The most memory in use: of the GPU where there is one, else of the process."""
    step_tokens: float

    @property
    def seconds(self) -> float:
        return self.start_seconds + self.eval_seconds + self.steps * self.step_seconds

    def __str__(self) -> str:
        minutes, seconds = divmod(round(self.seconds), 60)
        return (
            f"about {minutes} min {seconds} s for {self.steps} steps ({self.step_seconds:.1f} s "
            "each, measured on "
            f"{self.measured}), {self.memory_bytes / 2**30:.1f} GiB of memory, "
            f"{self.steps * self.step_tokens / 1e6:.1f} million tokens trained on"
        )


def estimate(config: Config, *, steps: int = 1) -> Estimate:
    """Estimates time, memory and tokens of the whole run from a few steps in a temporary directory.

    It measures the initial policy; replies that grow during training are not accounted for, and
    neither is the imitation of `sft.source`.
    """
    if config.train.steps == 0:
        raise ValueError("an estimate measures training steps, and train.steps is 0")
    with tempfile.TemporaryDirectory(prefix="turnwise-estimate-") as folder:
        short = config.model_copy(
            update={
                "train": config.train.model_copy(update={"steps": steps}),
                "sft": config.sft.model_copy(update={"source": ()}),
                "eval": config.eval.model_copy(
                    update={"before": False, "after": False, "every": 0}
                ),
                "log": config.log.model_copy(
                    update={"dir": folder, "name": "estimate", "trackers": (), "report": False}
                ),
            }
        )
        started = time.perf_counter()
        trainer = PPOTrainer(short)
        start_seconds = time.perf_counter() - started
        started = time.perf_counter()
        trainer.evaluate("during")
        evaluations = config.eval.before + config.eval.after
        evaluations += (config.train.steps - 1) // config.eval.every if config.eval.every else 0
        eval_seconds = evaluations * (time.perf_counter() - started)
        started = time.perf_counter()
        trainer.fit()
        step_seconds = (time.perf_counter() - started) / steps
        rows = RunReader(Path(folder) / "estimate").ledger()
        return Estimate(
            steps=config.train.steps,
            measured=steps,
            step_seconds=step_seconds,
            start_seconds=start_seconds,
            eval_seconds=eval_seconds,
            memory_bytes=_peak_memory(),
            step_tokens=sum(row.trained for row in rows) / steps,
        )


def _peak_memory() -> int:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
