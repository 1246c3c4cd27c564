"""The command `turnwise`. Each subcommand is a file in this folder with `register(app)`; a missing
file means no subcommand."""

import sys
import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Annotated, Any

import typer

from turnwise.cli.args import fail
from turnwise.config import ConfigError, ConfigWarning

COMMANDS = {
    "train": "turnwise.cli.train",
    "watch": "turnwise.cli.watch",
    "sft": "turnwise.cli.sft",
    "eval": "turnwise.cli.eval",
    "rollout": "turnwise.cli.rollout",
    "play": "turnwise.cli.play",
    "replay": "turnwise.cli.replay",
    "envs": "turnwise.cli.envs",
    "check-env": "turnwise.cli.check_env",
    "serve": "turnwise.cli.serve",
    "serve-policy": "turnwise.cli.serve_policy",
    "work": "turnwise.cli.work",
    "serve-env": "turnwise.cli.serve_env",
    "config": "turnwise.cli.config",
    "migrate": "turnwise.cli.migrate",
    "inspect": "turnwise.cli.inspect",
    "doctor": "turnwise.cli.doctor",
    "report": "turnwise.cli.report",
    "compare": "turnwise.cli.compare",
    "export": "turnwise.cli.export",
    "push": "turnwise.cli.push",
    "sweep": "turnwise.cli.sweep",
    "init": "turnwise.cli.init",
    "completion": "turnwise.cli.completion",
}


def available() -> tuple[str, ...]:
    """The commands of this installation."""
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
    """Runs one command and exits: 0 for success, 2 for a mistake of the user, 1 for other
    failures."""
    words = list(sys.argv[1:] if argv is None else argv)
    found = available()
    asked = words[0] if words and words[0] in found else None
    try:
        with _notes_shown():
            build_app([asked] if asked else found)(words, prog_name="turnwise")
    except ConfigError as error:
        fail(str(error))


@contextmanager
def _notes_shown() -> Generator[None]:
    """Prints what a config's keys mean here as a note, without the place in our code."""
    before = warnings.showwarning

    def show(message: Any, category: type[Warning], *where: Any, **more: Any) -> None:
        if issubclass(category, ConfigWarning):
            print(f"note: {message}", file=sys.stderr)
        else:
            before(message, category, *where, **more)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = before


def _show_version(value: bool) -> None:
    if value:
        from turnwise import __version__

        print(__version__)
        raise typer.Exit()


def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    # The callback keeps `turnwise NAME` a group even if only one command is registered.
    pass
