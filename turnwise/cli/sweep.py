"""`turnwise sweep SOURCE`: runs several seeds and settings, one after the other. Run again, it
continues."""

import itertools
import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from turnwise.cli.args import TAKES_OVERRIDES, Trust, fail, refuse_code, split_source, told_shortly
from turnwise.config import Config, run_config

if TYPE_CHECKING:
    from turnwise.evaluate.statistics import Interval


def register(app: typer.Typer) -> None:
    app.command(
        "sweep",
        context_settings=TAKES_OVERRIDES,
        options_metavar="[RECIPE|CONFIG.yaml] [KEY=VALUE]... [OPTIONS]",
        epilog="Example: turnwise sweep frozen_lake --seeds 3 --vary train.lr=1e-3,3e-4",
    )(sweep)


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One run of a sweep."""

    settings: tuple[str, ...]
    """The varied settings, as overrides."""
    seed: int

    @property
    def label(self) -> str:
        return " ".join(self.settings) or "as given"

    @property
    def name(self) -> str:
        """The name of its run directory.

        Example:
            >>> Point(settings=("train.lr=1e-3",), seed=2).name
            'train.lr-1e-3-s2'
        """
        words = "-".join(self.settings) or "run"
        safe = "".join(c if c.isalnum() or c in "._-" else "-" for c in words)
        return f"{safe}-s{self.seed}"


def sweep(
    ctx: typer.Context,
    seeds: Annotated[str, typer.Option(help="How many seeds (3), or which (0,7,9).")] = "3",
    vary: Annotated[
        list[str] | None,
        typer.Option(
            help="KEY=V1,V2: a run for each value. May be repeated: runs every combination."
        ),
    ] = None,
    folder: Annotated[Path, typer.Option("--dir", help="Folder of the runs.")] = Path("sweep"),
    trust: Trust = False,
) -> None:
    """Run several seeds and settings, and print the mean of each setting with a 95 % interval, and
    its difference from the first one, paired by seed. Run again, it skips finished runs and resumes
    interrupted ones."""
    from turnwise.envs.trust import is_run_config

    source, overrides = split_source(ctx.args)
    points = _points(seeds, vary or [])
    configs = [run_config(source, [*overrides, *settings]) for settings in _settings(points)]
    stored = Path(source or "")
    for config in configs if is_run_config(stored) else ():
        refuse_code(config, stored=stored, trust=trust)
    _refuse(configs)
    failed: list[str] = []
    for number, point in enumerate(points, start=1):
        run = folder / point.name
        if _is_done(run):
            print(f"[{number}/{len(points)}] {run}: already done")
            continue
        print(f"[{number}/{len(points)}] {run}", flush=True)
        words = [*overrides, *point.settings, f"seed={point.seed}"]
        if _train(run, source, words, trust=trust) != 0:
            failed.append(point.name)
    print()
    _tell(folder, points)
    if failed:
        print(f"failed: {', '.join(failed)}; run the same command again to continue")
        raise typer.Exit(1)


def _settings(points: Sequence[Point]) -> list[tuple[str, ...]]:
    return list(dict.fromkeys(point.settings for point in points))


def _refuse(configs: Sequence[Config]) -> None:
    """Reports a mistake in any run before the first starts: an environment that cannot be made."""
    from turnwise.train.setup import choose_setting

    with told_shortly((ValueError,)):
        for config in configs:
            if config.backend == "native":
                choose_setting(config)


def _points(seeds: str, vary: Sequence[str]) -> list[Point]:
    """Every combination of settings and seeds.

    Example:
        >>> [point.name for point in _points("2", ["train.lr=1,2"])]
        ['train.lr-1-s0', 'train.lr-1-s1', 'train.lr-2-s0', 'train.lr-2-s1']
    """
    try:
        chosen = [int(word) for word in seeds.split(",")]
    except ValueError:
        fail(f"--seeds is a number or a list of numbers, got {seeds!r}")
    if len(chosen) == 1 and "," not in seeds:
        chosen = list(range(chosen[0]))
    if not chosen or min(chosen) < 0:
        fail(f"--seeds needs at least one seed, none below 0, got {seeds!r}")
    choices: list[list[str]] = []
    for word in vary:
        key, equals, values = word.partition("=")
        if not equals or not key or not values:
            fail(f"--vary is KEY=V1,V2, as in --vary train.lr=1e-3,3e-4, got {word!r}")
        choices.append([f"{key}={value}" for value in values.split(",")])
    return [
        Point(settings=settings, seed=seed)
        for settings in itertools.product(*choices)
        for seed in chosen
    ]


def _is_done(run: Path) -> bool:
    """True if the run finished. A run stopped by a signal has a summary too."""
    from turnwise.log.records import RunDirectoryError
    from turnwise.log.store import RunReader

    with told_shortly((RunDirectoryError,)):
        return (run / "summary.json").is_file() and not RunReader(run).summary().get("stopped")


def _train(run: Path, source: str | None, overrides: list[str], *, trust: bool) -> int:
    """The exit status of the run. It has its own process, so a crash or its memory ends with it."""
    words = [sys.executable, "-m", "turnwise", "train", *(["--trust"] if trust else [])]
    if (run / "config.yaml").is_file():
        words += ["--resume", str(run)]
    else:
        words += [*([source] if source else []), *overrides]
        words += [f"log.dir={json.dumps(str(run.parent))}", f"log.name={json.dumps(run.name)}"]
    told: list[int] = []
    children: list[subprocess.Popen[bytes]] = []

    def tell() -> None:
        for child in children:
            if signal.SIGTERM in told:  # Ctrl-C reaches the run through the terminal
                child.terminate()

    def hear(number: int, frame: object) -> None:
        told.append(number)
        tell()

    before = {number: signal.signal(number, hear) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        children.append(subprocess.Popen(words))
        tell()  # what came before the child was known
        status = children[0].wait()  # a run that is stopped writes a checkpoint first
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if told:
        raise SystemExit(128 + told[0])
    return status


def _tell(folder: Path, points: Sequence[Point]) -> None:
    from turnwise.evaluate.runs import over_seeds
    from turnwise.log.store import RunReader

    table: list[dict[str, object]] = []
    first: dict[str, dict[int, float]] = {}
    for label in dict.fromkeys(point.label for point in points):
        mine = [point for point in points if point.label == label]
        after = {
            point.seed: summary["after"]
            for point in mine
            if _is_done(folder / point.name)
            and (summary := RunReader(folder / point.name).summary()).get("after")
        }
        row: dict[str, object] = {"setting": label, "runs": len(after)}
        told: list[str] = []
        for what in ("success", "reward"):
            values = {seed: one[what][1] for seed, one in after.items() if one[what] is not None}
            row[what] = _shown(over_seeds([*values.values()]), len(values)) if values else "-"
            told.append(f"{what} {row[what]}")
            pairs = _differences(values, first.setdefault(what, values))
            if table and len(pairs) > 1:
                row[f"{what}_difference"] = str(over_seeds(pairs))
                told.append(f"difference {row[f'{what}_difference']}")
        table.append(row)
        print(f"{label}: {', '.join(told)} ({len(after)} of {len(mine)} runs)")
    if folder.is_dir():
        (folder / "sweep.json").write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")


def _differences(values: Mapping[int, float], others: Mapping[int, float]) -> list[float]:
    """Seed by seed: the seeds that both have.

    Example:
        >>> _differences({0: 0.75, 1: 0.5}, {0: 0.5, 2: 0.5})
        [0.25]
    """
    return [value - others[seed] for seed, value in values.items() if seed in others]


def _shown(interval: "Interval", runs: int) -> str:
    """The mean with its interval; a single run has no interval."""
    return str(interval) if runs > 1 else f"{interval.estimate:.3f} (one run)"
