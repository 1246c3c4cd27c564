"""`turnwise check-env NAME`: checks an environment against the contract."""

from pathlib import Path
from typing import Annotated, Protocol

import typer

from turnwise.cli.args import TAKES_OVERRIDES, fail, overrides_from


def register(app: typer.Typer) -> None:
    app.command(
        "check-env",
        context_settings=TAKES_OVERRIDES,
        epilog="Example: turnwise check-env mine.py:Env --seeds 20",
    )(check_env)


def check_env(
    ctx: typer.Context,
    name: Annotated[
        str, typer.Argument(help="A name of `turnwise envs`, module:Class or file.py:Class.")
    ],
    seeds: Annotated[int, typer.Option(help="How many seeds to try.", min=1)] = 10,
    levels: Annotated[
        Path | None, typer.Option(help="sokoban: check every level of a Boxoban file (gzip too).")
    ] = None,
    games: Annotated[
        Path | None, typer.Option(help="alfworld: check the games of a JSONL file (gzip too).")
    ] = None,
    walkthroughs: Annotated[
        bool, typer.Option(help="With --games: play every game's walkthrough.")
    ] = False,
) -> None:
    """Check an environment: determinism, finite rewards, legal ends. Exit status 1 if it breaks a
    rule.

    Settings of the environment may follow, such as --env.options.size 3.
    """
    from turnwise.config import load_config
    from turnwise.envs.registry import UnknownEnvError, find_env
    from turnwise.evaluate.check_env import check_beside

    try:
        find_env(name)
    except UnknownEnvError as error:
        fail(str(error))
    if levels is not None or games is not None or walkthroughs:
        _check_files(find_env(name).name, levels=levels, games=games, walkthroughs=walkthroughs)
        return
    config = load_config({"env": {"name": name}}, overrides_from(ctx.args))
    try:
        report = check_beside(name, seeds=seeds, config=config.env, limits=config.rollout)
    except ValueError as error:
        fail(str(error))
    print(report)
    if not report.ok:
        raise typer.Exit(1)


class _Report(Protocol):
    @property
    def ok(self) -> bool: ...
    def lines(self) -> list[str]: ...


def _check_files(name: str, *, levels: Path | None, games: Path | None, walkthroughs: bool) -> None:
    """Checks an environment's level or game file instead of the environment."""
    report: _Report
    if name == "sokoban" and levels is not None and games is None:
        from turnwise.envs.games.sokoban import check_levels

        path, check = levels, check_levels
    elif name == "alfworld" and games is not None and walkthroughs and levels is None:
        from turnwise.envs.games.alfworld import check_games

        path, check = games, check_games
    else:
        fail("--levels FILE goes with sokoban, --games FILE --walkthroughs with alfworld")
    try:
        report = check(path)
    except (OSError, ValueError) as error:
        fail(f"{path}: {error}")
    print("\n".join(report.lines()))
    if not report.ok:
        raise typer.Exit(1)
