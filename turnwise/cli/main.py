"""The command `turnwise`. A command is a file of this folder with `register(app)`; files that are absent give none."""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Annotated

import typer

from turnwise.cli.args import fail
from turnwise.config import ConfigError

COMMANDS = {
    "train": "turnwise.cli.train",
    "eval": "turnwise.cli.eval",
    "rollout": "turnwise.cli.rollout",
    "play": "turnwise.cli.play",
    "replay": "turnwise.cli.replay",
    "envs": "turnwise.cli.envs",
    "check-env": "turnwise.cli.check_env",
    "serve-env": "turnwise.cli.serve_env",
    "config": "turnwise.cli.config",
    "doctor": "turnwise.cli.doctor",
}


def available() -> tuple[str, ...]:
    """The commands that this installation has."""
    return tuple(name for name, module in COMMANDS.items() if find_spec(module) is not None)


def build_app(names: Sequence[str]) -> typer.Typer:
    """The app with these commands. Only their files are imported."""
    app = typer.Typer(
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        help="Train language-model agents over many turns.",
    )
    app.callback()(_options)
    for name in names:
        import_module(COMMANDS[name]).register(app)
    return app


def main(argv: Sequence[str] | None = None) -> None:
    """Runs one command and exits: 0 for success, 2 for a mistake in what was asked, 1 for the rest."""
    words = list(sys.argv[1:] if argv is None else argv)
    found = available()
    asked = words[0] if words and words[0] in found else None
    try:
        build_app([asked] if asked else found)(words, prog_name="turnwise")
    except ConfigError as error:
        fail(str(error))


def _show_version(value: bool) -> None:
    if value:
        from turnwise import __version__

        print(__version__)
        raise typer.Exit()


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    # A callback keeps `turnwise NAME` a group even where a single command is registered.
    pass
