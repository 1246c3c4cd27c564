"""Shared by the commands: parsing of config words, and reporting of a user's mistakes."""

import os
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from turnwise.config import Config, run_config

Errors = tuple[type[Exception], ...]
Trust = Annotated[
    bool, typer.Option("--trust", help="Load the code that the run's own config names.")
]
# For commands that take overrides: typer leaves unknown words in `ctx.args`.
TAKES_OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True}


def split_source(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """The recipe or file among the words, or None, and the overrides.

    A command that takes both must not declare either as a typer argument, because typer would take
    the 3 of `--train.max_turn 3` for it:

        @app.command("train", context_settings=TAKES_OVERRIDES)
        def train(ctx: typer.Context) -> None:
            config = config_from(ctx.args)

    Example:
        >>> split_source(["--train.max_turn", "3", "mine.yaml", "seed=1"])
        ('mine.yaml', ['--train.max_turn', '3', 'seed=1'])
    """
    sources: list[str] = []
    overrides: list[str] = []
    queue = list(words)
    while queue:
        word = queue.pop(0)
        if word.startswith("--"):
            overrides.append(word)
            if "=" not in word and queue and not queue[0].startswith("--"):
                overrides.append(queue.pop(0))
        elif "=" in word:
            overrides.append(word)
        else:
            sources.append(word)
    if len(sources) > 1:
        fail(
            f"give one recipe or config file, got {', '.join(sources)}; write overrides as "
            "key=value or --key value"
        )
    return (sources[0] if sources else None), overrides


def overrides_from(words: Sequence[str]) -> list[str]:
    """The words as overrides, for commands that take no recipe or file.

    Example:
        >>> overrides_from(["--train.max_turn", "3"])
        ['--train.max_turn', '3']
    """
    source, overrides = split_source(words)
    if source is not None:
        fail(f"{source!r} is not an override; write key=value or --key value")
    return overrides


def config_from(words: Sequence[str]) -> Config:
    """The config that `turnwise train WORDS` runs."""
    return run_config(*split_source(words))


def refuse_code(config: Config, *, stored: Path, trust: bool) -> None:
    """Ends the command if a run's stored config names code that the user has not allowed."""
    from turnwise.envs.trust import UntrustedCodeError, refuse_foreign_code

    try:
        refuse_foreign_code(config, stored=stored, trust=trust)
    except UntrustedCodeError as error:
        fail(str(error))


@contextmanager
def told_shortly(mistakes: Errors, failures: Errors = ()) -> Generator[None]:
    """Ends the command with the error's message if one of these is raised: status 2 for a mistake
    of the user, 1 for a failure during the run. TURNWISE_TRACEBACK=1 shows the traceback."""
    try:
        yield
    except (*mistakes, *failures) as error:
        if os.environ.get("TURNWISE_TRACEBACK"):
            raise
        if isinstance(error, failures):
            print(f"error: {error}", file=sys.stderr)
            raise SystemExit(1) from None
        fail(f"{error}\n(set TURNWISE_TRACEBACK=1 to see where this comes from)")


def fail(message: str) -> NoReturn:
    """Ends the command with a message about a mistake of the user: status 2, no traceback."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)
