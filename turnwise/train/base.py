# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""RunTrainer: what a run has whatever it learns from: a run directory, evaluations, checkpoints, a
clean end after a stop request."""

import contextlib
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Generator as Iterator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from turnwise.config.schema import Config
from turnwise.config.tree import differences
from turnwise.envs.base import EnvFactory
from turnwise.evaluate.evaluation import EvalResult, PolicyPlayer, evaluate
from turnwise.log.callbacks import StopTraining
from turnwise.log.events import (
    CheckpointSaved,
    Evaluated,
    Event,
    Notice,
    RunEnded,
    RunStarted,
    Sink,
    Sinks,
    StepDone,
)
from turnwise.log.outcome import summary_json
from turnwise.log.store import RunDirectory, RunReader
from turnwise.models.policy import Policy
from turnwise.procs.stop import Stopped, StopRequest, say_stopping
from turnwise.train.checkpoint import (
    Checkpoint,
    checkpoint_step,
    latest_checkpoint,
    list_checkpoints,
    write_checkpoint,
)
from turnwise.train.generators import TrainedGenerator
from turnwise.train.networks import save_adapter, save_policy
from turnwise.types import Episode, Json


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """The result of a run."""

    path: Path
    """The run directory."""
    steps: int
    """Training steps done, those before a resume included."""
    before: Evaluated | None
    after: Evaluated | None
    seconds: float
    checkpoint: Path | None
    """The last checkpoint; its `model` folder loads with `from_pretrained`."""
    stopped: str | None = None
    """Cause of an early end: Ctrl-C, SIGTERM or the time limit. None: none of these."""

    @property
    def reader(self) -> RunReader:
        """Reads everything that the run left behind."""
        return RunReader(self.path)

    def metrics(self) -> list[dict[str, float | None]]:
        """One dict per step (step 0: before training); docs/metrics.md defines the names."""
        return self.reader.metrics()

    def episodes(self, step: int | None = None) -> list[Episode]:
        """The stored training episodes of a step; None: of all steps."""
        reader = self.reader
        steps = reader.steps() if step is None else [step]
        return [episode for number in steps for episode in reader.episodes(number)]


class RunTrainer(ABC):
    """Runs to the last step, evaluates, checkpoints and reports. Subclasses say what a step is.

    All randomness is derived from the config's seed and a counter, so a run that is killed and
    resumed continues exactly from its last checkpoint.
    """

    config: Config
    run: RunDirectory
    policy: Policy
    generator: TrainedGenerator
    factories: Mapping[str, EnvFactory]

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = Sinks(sinks)
        self._started = time.perf_counter()
        self._stop = StopRequest()
        self._stopped: str | None = None
        self._last_checkpoint: Path | None = None
        self._enough = False
        """A callback asked for the end."""
        self.evaluations: list[Evaluated] = []
        self._reports: dict[str, bool] = {}
        """Tag -> whether its environment reports success, as far as it is known."""
        self.step: int = 0
        """Training steps done."""

    @property
    @abstractmethod
    def num_steps(self) -> int:
        """Steps of the whole run."""

    @abstractmethod
    def _train(self) -> None:
        """Everything between the first event of the run and its last."""

    @abstractmethod
    def _snapshot(self) -> tuple[dict[str, Tensor], dict[str, Json]]:
        """Contents of a checkpoint besides the model, the file positions and the evaluations."""

    def _facts(self) -> dict[str, str | int]:
        """Shown when the run starts."""
        return {
            "model": self.config.model.path or "embedded",
            "parameters": sum(parameter.numel() for parameter in self.policy.model.parameters()),
            "trained": sum(parameter.numel() for parameter in self.policy.parameters()),
            "device": str(self.policy.precision.device),
        }

    def _outcome(self) -> dict[str, Json]:
        """Entries of the summary besides the evaluations."""
        return {}

    @abstractmethod
    def _close(self) -> None:
        """Releases what the subclass opened."""

    def fit(self) -> RunResult:
        """Trains to the last step.

        Ctrl-C, SIGTERM and train.time_limit end it with a checkpoint of the last full step: a
        rollout or an evaluation is thrown away at once, an update is finished. Resumed, the run
        goes on as if it had never stopped. A second signal ends it at once (KeyboardInterrupt),
        with the checkpoints that are there.
        """
        interrupted = True
        seconds = self._seconds_left()
        try:
            with (
                StopRequest(seconds=seconds, heard=say_stopping) as self._stop,
                determinism(self.config.train.deterministic, self.policy.precision.device.type),
            ):
                self._emit(
                    RunStarted(
                        path=self.run.path,
                        config=self.config,
                        first_step=self.step,
                        facts=self._facts(),
                        steps=self.num_steps,
                    )
                )
                try:
                    self._train()
                except Stopped as stopped:
                    self._stopped = str(stopped)
                    self._keep_last_step()
            interrupted = self._stopped is not None
            return self._result()
        except Exception:
            interrupted = False
            raise
        finally:
            before, after = self._labelled("before"), self._labelled("after")
            seconds = time.perf_counter() - self._started
            self._emit(
                RunEnded(
                    path=self.run.path,
                    seconds=seconds,
                    before=before,
                    after=after,
                    baselines=self._baselines(),
                    interrupted=interrupted,
                    checkpoint=self._last_checkpoint,
                )
            )
            self._close()
            self._sinks.close()
            self.run.close()

    def evaluate(self, label: Literal["before", "during", "after"]) -> EvalResult:
        """Evaluates the current policy on the held-out tasks; stores and reports the result."""
        player = PolicyPlayer(generator=self.generator, tokenizer=self.policy.tokenizer)
        with self._stop.discardable():
            result = evaluate(
                self.config,
                player,
                step=self.step,
                factories=self.factories,
                reports=self._reports,
            )
        event = result.event(self.step, label)
        self.evaluations.append(event)
        self.run.write_metrics(self.step, result.metrics())
        self.run.write_episodes(self.step, result.episodes, split="eval")
        self._write_pieces()
        self._emit(event)
        return result

    def _write_pieces(self) -> None:
        """Lets the inspector show the tokens of a run that goes on."""
        self.run.write_pieces(lambda token: self.policy.tokenizer.decode([token]))

    def save(self) -> Path:
        """Writes a checkpoint of this moment."""
        tensors, state = self._snapshot()
        self._last_checkpoint = write_checkpoint(
            self.run.checkpoints,
            step=self.step,
            tensors=tensors,
            state={
                "positions": self.run.positions(),
                **state,
                "evaluations": [event.to_json() for event in self.evaluations],
                "model": self.config.model.model_dump(mode="json"),
            },
            save_model=save_policy(self.policy),
            save_adapter=save_adapter(self.policy),
            keep=self.config.checkpoint.keep,
        )
        return self._last_checkpoint

    def _evaluate_after(self) -> None:
        """The evaluation after the last step, and a checkpoint even if it fails."""
        try:
            if self.config.eval.after and self._labelled("after") is None:
                self.evaluate("after")
        except Stopped:
            raise
        except BaseException:  # keeps the training result even if it fails
            self._checkpoint()
            raise
        self._checkpoint()

    def _evaluation_is_due(self) -> bool:
        every = self.config.eval.every
        if not every or not self.step or self.step % every:
            return False
        seen = (event for event in self.evaluations if event.label == "during")
        return all(event.step != self.step for event in seen)

    def _checkpoint_is_due(self) -> bool:
        every = self.config.checkpoint.every
        return bool(every) and self.step % every == 0

    def _keep_last_step(self) -> None:
        """A checkpoint as after the last full step, so that a resume plays the next one again.
        Nothing was written since."""
        last = self._last_checkpoint
        if last is None or checkpoint_step(last) != self.step:
            self._checkpoint()

    def _seconds_left(self) -> float | None:
        limit = self.config.train.time_limit
        if limit is None:
            return None
        return 60.0 * limit - (time.perf_counter() - self._started)

    def _checkpoint(self) -> None:
        if self.config.checkpoint.write:
            self._emit(CheckpointSaved(step=self.step, path=self.save()))

    def _out_of_time(self) -> bool:
        limit = self.config.train.max_minutes
        minutes = (time.perf_counter() - self._started) / 60.0
        if limit is None or minutes < limit:
            return False
        message = (
            f"{minutes:.1f} minutes are over (train.max_minutes = {limit:g}): no step after "
            f"{self.step}"
        )
        self._note(Notice(kind="out_of_time", message=message, step=self.step, level="info"))
        return True

    def _tell_step(self, metrics: Mapping[str, float]) -> None:
        """Tells of a step that is done. A callback may ask for the end."""
        try:
            self._emit(StepDone(step=self.step, metrics=metrics))
        except StopTraining as stop:
            self._enough = True
            message = f"a callback ended the run after step {self.step}: {stop}"
            self._note(Notice(kind="stopped", message=message, step=self.step, level="info"))

    def _open_checkpoint(self, notices: Sequence[Notice], *, resumed: bool) -> Checkpoint | None:
        """The last checkpoint of a run that is resumed. Removes what the run wrote after it, then
        records the notices."""
        checkpoint = (
            latest_checkpoint(self.run.checkpoints, refused=self._refused) if resumed else None
        )
        self._last_checkpoint = checkpoint.path if checkpoint else None
        self.run.truncate_to(-1 if checkpoint is None else checkpoint.state["positions"])
        for notice in notices:
            self._note(notice)
        return checkpoint

    def _go_on_after(self, checkpoint: Checkpoint) -> None:
        """Takes over the step and the evaluations of a checkpoint."""
        self.step = checkpoint.step
        self.evaluations = [Evaluated.from_json(event) for event in checkpoint.state["evaluations"]]
        self._note(
            Notice(
                kind="resumed",
                message=f"goes on after step {self.step}",
                step=self.step,
                level="info",
            )
        )

    def _go_on_with(self, config: Config, stored: Config) -> None:
        """Stores the settings that a resumed run goes on with, and says which are new."""
        changed = differences([stored, config])
        self.run.write_config(config, changed=changed)
        listed = ", ".join(f"{path} {old!r} -> {new!r}" for path, (old, new) in changed.items())
        if any(path.startswith(("env.", "envs")) for path in changed):
            listed += "; its earlier evaluations were played with the old ones"
        self._emit(
            Notice(
                kind="config_changed",
                message=f"goes on with other settings: {listed}",
                step=self.step,
            )
        )

    def _result(self) -> RunResult:
        result = RunResult(
            path=self.run.path,
            steps=self.step,
            before=self._labelled("before"),
            after=self._labelled("after"),
            seconds=time.perf_counter() - self._started,
            checkpoint=self._last_checkpoint,
            stopped=self._stopped,
        )
        checkpoint = result.checkpoint
        self.run.write_summary(
            summary_json(
                result.before,
                result.after,
                steps=result.steps,
                baselines=[event.to_json() for event in self._baselines()],
                seconds=round(result.seconds, 3),
                checkpoint=str(checkpoint.relative_to(result.path)) if checkpoint else None,
                stopped=result.stopped,
                **self._outcome(),
            )
        )
        return result

    def _labelled(self, label: str) -> Evaluated | None:
        return next((event for event in self.evaluations if event.label == label), None)

    def _baselines(self) -> tuple[Evaluated, ...]:
        return tuple(event for event in self.evaluations if event.label == "baseline")

    def _refused(self, message: str) -> None:
        self._note(Notice(kind="checkpoint_refused", message=message))

    def _note(self, notice: Notice) -> None:
        self.run.write_event(notice.kind, notice.message, step=notice.step)
        self._emit(notice)

    def _emit(self, event: Event) -> None:
        self._sinks.handle(event)


def open_run(config: Config, resume: Path | None, *, named: Sequence[str]) -> RunDirectory:
    """The run directory to go on with, or a new one. A run without a name gets one from these
    parts and its seed."""
    if resume is not None:
        return RunDirectory.open(resume)
    # Names of parts may be paths or URLs, which a run's name must not contain.
    parts = [re.sub(r"[^\w.-]+", "-", name.rpartition(":")[2]).strip("-.") for name in named]
    return RunDirectory.create(config.log, config, default_name=f"{'-'.join(parts)}-s{config.seed}")


def refuse_another(config: Config, stored: Config, resume: Path, *, fixed: Sequence[str]) -> None:
    """Raises ValueError where the config describes another run than the one that is to go on.

    Args:
        fixed: keys that must not change, besides the model's; one that ends with a dot is a
            section.
    """
    for path, (old, new) in differences([stored, config]).items():
        kept = any(path.startswith(one) if one.endswith(".") else path == one for one in fixed)
        # A part may be named by another path to the same file.
        same = path in ("env.name", "algo.name") and _place(old) == _place(new)
        if (kept or path.startswith("model.")) and not same:
            saved = list_checkpoints(resume / "checkpoints")
            weights = f", from its weights with model.path={saved[-1] / 'model'}" if saved else ""
            raise ValueError(
                f"{resume} was started with {path} = {old!r}, and the config now says {new!r}: a "
                f"run goes on with the {path.partition('.')[0]} that it began with; start a new "
                f"run instead{weights}"
            )


def _place(name: str) -> tuple[Path | str, str]:
    """A part's name, with the file that it leads to."""
    where, _, attribute = name.rpartition(":")
    return Path(where).resolve() if where.endswith(".py") else where, attribute


@contextlib.contextmanager
def determinism(asked: bool | None, device: str) -> Iterator[None]:
    """Deterministic kernels while training: by default on the CPU, where they cost nothing."""
    wanted = device == "cpu" if asked is None else asked
    before = torch.are_deterministic_algorithms_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory  # pyright: ignore[reportAttributeAccessIssue]
    torch.use_deterministic_algorithms(wanted)
    # Filling uninitialised memory only helps to find bugs, and costs time.
    torch.utils.deterministic.fill_uninitialized_memory = not wanted  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.utils.deterministic.fill_uninitialized_memory = filled  # pyright: ignore[reportAttributeAccessIssue]
