"""`turnwise train`: a whole run, from a recipe or a config file to a report."""

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from turnwise.cli.args import TAKES_OVERRIDES, fail, split_source, told_shortly
from turnwise.config import Config, load_config, show_config


def register(app: typer.Typer) -> None:
    app.command("train", context_settings=TAKES_OVERRIDES)(train)


def train(
    ctx: typer.Context,
    resume: Annotated[
        Path | None, typer.Option(help="Go on with this run directory, from its last checkpoint.")
    ] = None,
    backend: Annotated[str | None, typer.Option(help="native, trl or verl, in place of the config's.")] = None,
    estimate: Annotated[bool, typer.Option("--estimate", help="Run one step; say time, memory and tokens.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved config and stop.")] = False,
    nodes: Annotated[int | None, typer.Option(help="verl: machines of the cluster.", min=1)] = None,
    gpus: Annotated[int | None, typer.Option(help="verl: GPUs per machine; ranks on the CPU.", min=1)] = None,
    address: Annotated[str | None, typer.Option(help="verl: a running Ray cluster, host:port or auto.")] = None,
) -> None:
    """Train: turnwise train RECIPE or CONFIG.yaml, then --train.steps 50 or train.steps=50, and so on."""
    config = _config(ctx.args, resume, backend)
    if dry_run:
        print(show_config(config), end="")
        for line in _memory(config):
            print(f"# {line}")
        return
    cluster = {name: value for name, value in (("nodes", nodes), ("gpus", gpus), ("address", address)) if value}
    if cluster and config.backend != "verl":
        fail(f"--{' and --'.join(cluster)} mean something to backend verl only, and this is {config.backend}")
    if config.backend != "native":
        _elsewhere(config, resume=resume, estimate=estimate, cluster=cluster)
        return
    _native(config, resume=resume, estimate=estimate)


def _config(words: list[str], resume: Path | None, backend: str | None) -> Config:
    source, overrides = split_source(words)
    if backend is not None:
        overrides = [*overrides, f"backend={backend}"]
    if resume is None:
        return load_config(source or "default", overrides)
    if source is not None:
        fail(f"--resume goes on with the run's own config, so {source} cannot be given too; overrides can")
    if not (resume / "config.yaml").is_file():
        fail(f"{resume} is not a run directory: it has no config.yaml")
    return load_config(resume / "config.yaml", overrides)


def _native(config: Config, *, resume: Path | None, estimate: bool) -> None:
    from turnwise.envs.base import EnvError
    from turnwise.evaluate.evaluation import EvaluationError
    from turnwise.generate.base import GeneratorError
    from turnwise.log.records import RunDirectoryError
    from turnwise.log.trackers import TrackerError
    from turnwise.rollout.proxy import RolloutError
    from turnwise.train import run
    from turnwise.train.checkpoint import CheckpointError
    from turnwise.train.update import TrainingError

    mistakes = (RunDirectoryError, TrackerError, ValueError, ImportError, OSError)
    failures = (CheckpointError, TrainingError, RolloutError, EvaluationError, EnvError, GeneratorError)
    try:
        with told_shortly(mistakes, failures):
            if estimate:
                for line in _memory(config):
                    print(line)
                print(run.estimate(config))
            else:
                run.train(config, resume=resume)
    except KeyboardInterrupt:
        print("interrupted; `turnwise train --resume RUN` goes on from the last checkpoint", file=sys.stderr)
        raise typer.Exit(130) from None


def _memory(config: Config) -> list[str]:
    """What a run of a given model will use memory for; nothing where the model is the embedded one."""
    if config.model.path is None or config.backend != "native":
        return []
    from turnwise.algos.table import build_algorithm
    from turnwise.models.memory import plan_run

    try:
        return ["memory:", *plan_run(config, build_algorithm(config.algo)).lines()]
    except (OSError, ValueError, ImportError) as error:  # a config is shown even where its model is not at hand
        return [f"memory: {line}" for line in str(error).splitlines()]


def _elsewhere(config: Config, *, resume: Path | None, estimate: bool, cluster: dict[str, int | str]) -> None:
    """Hands the config to TRL or verl, which have their own checkpoints."""
    name = config.backend
    if estimate:
        fail(f"--estimate is for the native backend, and this is {name}")
    module = f"turnwise.integrations.{name}"
    if find_spec(module) is None:
        fail(f"this installation has no backend {name}")
    if find_spec(name) is None:
        fail(f"backend {name} needs the package {name}, which is not installed; run: pip install 'turnwise[{name}]'")
    with told_shortly((ValueError, RuntimeError, ImportError)):
        import_module(module).train(config, resume=resume, **cluster)
