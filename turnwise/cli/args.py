"""What commands share: config words on the command line, and how a user's mistake is reported."""

import os
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from turnwise.config import Config, load_config

Errors = tuple[type[Exception], ...]
# For commands that take overrides: typer leaves words that it does not know in `ctx.args`.
TAKES_OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True}


def split_source(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """The recipe or file among the words (None: there is none), and the overrides.

    A command that takes both declares neither as an argument, because `--train.max_turn 3` would give its 3 away:

        @app.command("train", context_settings=TAKES_OVERRIDES)
        def train(ctx: typer.Context) -> None:
            config = config_from(ctx.args, default="default")

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
            f"one recipe or config file is taken, got {', '.join(sources)}; write overrides as key=value or --key value"
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
        fail(f"{source!r} is no override; write key=value or --key value")
    return overrides


def config_from(words: Sequence[str], *, default: str | None = None) -> Config:
    """The config that the words stand for; `default` is the recipe where none is named."""
    source, overrides = split_source(words)
    return load_config(source or default, overrides)


@contextmanager
def told_shortly(mistakes: Errors, failures: Errors = ()) -> Generator[None]:
    """Ends the command with the error's own words where one of these is raised: status 2 for a mistake in what was
    asked, 1 for what failed on the way. TURNWISE_TRACEBACK=1 shows where it comes from."""
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
    """Ends the command with an error that is the user's to mend, status 2 and no traceback."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)
