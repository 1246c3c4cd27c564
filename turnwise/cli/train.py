"""`turnwise train`: a whole run, from a recipe or a config file to a report."""

import shlex
import signal
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from turnwise.cli.args import (
    TAKES_OVERRIDES,
    Trust,
    fail,
    refuse_code,
    split_source,
    told_shortly,
)
from turnwise.config import Config, load_config, run_config, show_config

if TYPE_CHECKING:
    from turnwise.log.events import Event
    from turnwise.train.trainer import RunResult

STATUS = {"Ctrl-C": 130, "SIGTERM": 143}
"""Exit status of a stopped run; 124 after a time limit, like the command `timeout`."""


def register(app: typer.Typer) -> None:
    app.command(
        "train",
        context_settings=TAKES_OVERRIDES,
        options_metavar="[RECIPE|CONFIG.yaml] [KEY=VALUE]... [OPTIONS]",
        epilog="Example: turnwise train frozen_lake train.steps=50 --train.lr 3e-4",
    )(train)


def train(
    ctx: typer.Context,
    resume: Annotated[
        Path | None, typer.Option(help="Resume this run directory from its last checkpoint.")
    ] = None,
    backend: Annotated[
        str | None, typer.Option(help="native, trl or verl, in place of the config's.")
    ] = None,
    estimate: Annotated[
        bool, typer.Option("--estimate", help="Run one step; print time, memory and tokens.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved config and stop.")
    ] = False,
    nodes: Annotated[int | None, typer.Option(help="verl: machines of the cluster.", min=1)] = None,
    gpus: Annotated[
        int | None, typer.Option(help="verl: GPUs per machine (on the CPU: ranks).", min=1)
    ] = None,
    address: Annotated[
        str | None, typer.Option(help="verl: a running Ray cluster, host:port or auto.")
    ] = None,
    trust: Trust = False,
) -> None:
    """Train: turnwise train RECIPE or CONFIG.yaml, then --train.steps 50 or train.steps=50, and so
    on."""
    config, stored = _config(ctx.args, resume, backend)
    if stored is not None:
        refuse_code(config, stored=stored, trust=trust)
    if dry_run:
        show_plan(config, resume=resume)
        return
    cluster = {
        name: value
        for name, value in (("nodes", nodes), ("gpus", gpus), ("address", address))
        if value
    }
    if cluster and config.backend != "verl":
        fail(
            f"--{' and --'.join(cluster)} only work with backend verl, and this is {config.backend}"
        )
    if config.backend != "native":
        _elsewhere(config, resume=resume, estimate=estimate, cluster=cluster)
        return
    run_native(config, resume=resume, estimate=estimate)


def show_plan(config: Config, *, resume: Path | None = None) -> None:
    """Prints the config and the memory plan, as comments below it."""
    from turnwise.train.early import refuse_early

    if config.backend == "native":
        with told_shortly((ValueError,)):
            refuse_early(config, resume=resume, writes=False)
    print(show_config(config), end="")
    for line in _memory(config):
        print(f"# {line}")


def _config(
    words: list[str], resume: Path | None, backend: str | None
) -> tuple[Config, Path | None]:
    """(the config, the path of the run's stored config or None)."""
    from turnwise.envs.trust import is_run_config

    if backend is not None:
        words = [*words, f"backend={backend}"]
    if resume is not None:
        return config_of_run(words, resume)
    source, overrides = split_source(words)
    place = Path(source or "")
    return run_config(source, overrides), place if is_run_config(place) else None


def config_of_run(words: list[str], resume: Path) -> tuple[Config, Path]:
    """(the config of the run to go on with, overridden by the words; its stored file)."""
    source, overrides = split_source(words)
    if source is not None:
        fail(f"--resume uses the run's own config, so {source} cannot be given too; overrides can")
    if not (resume / "config.yaml").is_file():
        fail(f"{resume} is not a run directory: it has no config.yaml; give a folder of runs/")
    return load_config(resume / "config.yaml", overrides), resume / "config.yaml"


def run_native(config: Config, *, resume: Path | None = None, estimate: bool = False) -> None:
    """Runs the config in this process, and ends the command with the run's status."""
    from turnwise.envs.base import EnvError
    from turnwise.generate.base import GeneratorError
    from turnwise.log.callbacks import CallbackError
    from turnwise.log.records import RunDirectoryError
    from turnwise.log.trackers import TrackerError
    from turnwise.procs.progress import Progress
    from turnwise.train.early import refuse_early

    mistakes = (RunDirectoryError, TrackerError, ValueError, ImportError, OSError)
    with told_shortly(mistakes):
        refuse_early(config, resume=resume, writes=not estimate)
    started = _Started(resume)
    try:
        with Progress("loading libraries"):
            from turnwise.evaluate.evaluation import EvaluationError
            from turnwise.log.console import ConsoleSink
            from turnwise.rollout.proxy import RolloutError
            from turnwise.train import run
            from turnwise.train.checkpoint import CheckpointError
            from turnwise.train.update import TrainingError

        failures = (
            CheckpointError,
            TrainingError,
            RolloutError,
            EvaluationError,
            EnvError,
            GeneratorError,
            CallbackError,
        )
        # Until training sets its own handler.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with told_shortly(mistakes, failures):
            if estimate:
                for line in _memory(config):
                    print(line)
                print(run.estimate(config))
                return
            result = run.train(config, resume=resume, sinks=[ConsoleSink(), started])
    except KeyboardInterrupt:
        print(started.interrupted(), file=sys.stderr)
        raise typer.Exit(130) from None
    _end(result)


class _Started:
    """Hears where the run is, for the message of a run that is interrupted at once."""

    hears_stages = True

    def __init__(self, path: Path | None) -> None:
        self.path = path

    def handle(self, event: "Event") -> None:
        from turnwise.log.events import RunStarted

        if isinstance(event, RunStarted):
            stage = event.path.name == "imitation"  # in the folder of the whole run
            self.path = event.path.parent if stage else event.path

    def close(self) -> None:
        """Nothing to release."""

    def interrupted(self) -> str:
        if self.path is None:
            return "interrupted; nothing was written yet: start it again"
        command = f"turnwise train --resume {shlex.quote(str(self.path))}"
        return f"interrupted; resume from the last full checkpoint with: {command}"


def _end(result: "RunResult") -> None:
    """Prints how to resume a stopped run, and exits with its status."""
    if result.stopped is not None:
        print(_stopped(result))
        raise typer.Exit(STATUS.get(result.stopped, 124))


def _stopped(result: "RunResult") -> str:
    """The message of a stopped run: its checkpoint, and the command to resume."""
    said = f"stopped by {result.stopped} after step {result.steps}"
    if result.checkpoint is None:
        return f"{said}; there is no checkpoint to resume from, because checkpoint.write is false"
    return (
        f"{said}; the checkpoint is {result.checkpoint}\n"
        f"resume with: turnwise train --resume {shlex.quote(str(result.path))}"
    )


def _memory(config: Config) -> list[str]:
    """The memory plan of a run with a given model; empty for the embedded model."""
    if config.model.path is None or config.backend != "native":
        return []
    from turnwise.algos.table import build_algorithm
    from turnwise.models.memory import plan_run

    algorithm = build_algorithm(config.algo) if config.train.steps else None
    try:
        return ["memory:", *plan_run(config, algorithm).lines()]
    except (
        OSError,
        ValueError,
        ImportError,
    ) as error:  # show a config even if its model is not available
        return [f"memory: {line}" for line in str(error).splitlines()]


def _elsewhere(
    config: Config, *, resume: Path | None, estimate: bool, cluster: dict[str, int | str]
) -> None:
    """Runs the config with TRL or verl, which have their own checkpoints."""
    name = config.backend
    if estimate:
        fail(f"--estimate needs the native backend, and this is {name}")
    module = f"turnwise.integrations.{name}"
    if find_spec(module) is None:
        fail(f"this installation has no backend {name}")
    if find_spec(name) is None:
        fail(
            f"backend {name} needs the package {name}, which is not installed; run: pip install "
            f"'turnwise[{name}]'"
        )
    with told_shortly((ValueError, RuntimeError, ImportError)):
        result = import_module(module).train(config, resume=resume, **cluster)
    from turnwise.train.trainer import RunResult

    if isinstance(result, RunResult):
        _end(result)
