"""`turnwise sft`: imitates demonstrations, from a player, a run, or a file of episodes or
messages."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from turnwise.cli.args import TAKES_OVERRIDES, Trust, fail, refuse_code, split_source, told_shortly
from turnwise.cli.train import config_of_run, run_native, show_plan
from turnwise.config import Config, show_config
from turnwise.config.known import remember
from turnwise.config.load import config_path
from turnwise.config.tree import nearest
from turnwise.train.sft_config import NoSourceError, Words, resolve


def register(app: typer.Typer) -> None:
    app.command(
        "sft",
        context_settings=TAKES_OVERRIDES,
        options_metavar=(
            "SOURCE... [RECIPE|CONFIG.yaml] [KEY=VALUE]... [--best [COUNT]] [OPTIONS]"
        ),
        epilog="Example: turnwise sft expert frozen_lake sft.episodes=500",
    )(sft)


def sft(
    ctx: typer.Context,
    resume: Annotated[
        Path | None, typer.Option(help="Resume this run directory from its last checkpoint.")
    ] = None,
    write: Annotated[
        Path | None,
        typer.Option(
            help="Only write the demonstrations to this file (.jsonl or .jsonl.gz); no model is "
            "needed."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved config and stop.")
    ] = False,
    trust: Trust = False,
) -> None:
    """Imitate demonstrations. SOURCE is a player (expert, random, openai:URL#MODEL,
    script:FILE.py:FUNCTION), a run directory, or a JSONL file of episodes or messages. --best keeps
    the episodes that succeeded, --best 4 the best four of each task."""
    if resume is not None:
        config, stored = config_of_run(ctx.args, resume)
        if config.train.steps:
            fail(f"{resume} is a run of `turnwise train`; write turnwise train --resume {resume}")
        refuse_code(config, stored=stored, trust=trust)
        run_native(config, resume=resume)
        return
    words = read_words(ctx.args)
    with told_shortly((NoSourceError,)):
        config, stored = resolve(words, embedded=False if write is not None else None)
    if stored is not None:
        refuse_code(config, stored=stored, trust=trust)
    if dry_run:
        show_plan(config)
    elif write is not None:
        _write(config, write)
    else:
        run_native(config)


def read_words(words: Sequence[str]) -> Words:
    """The sources, the recipe and the overrides among the words.

    Example:
        >>> read_words(["expert", "bandit", "--best", "2", "seed=1"])
        Words(sources=('expert',), config='bandit', overrides=('seed=1', 'sft.keep=2'))
        >>> read_words(["--best", "random"]).overrides
        ('sft.keep=success',)
    """
    from turnwise.train.sources import is_player

    sources: list[str] = []
    rest: list[str] = []
    best: list[str] = []
    queue = list(words)
    while queue:
        word = queue.pop(0)
        if word == "--best":
            best = [f"sft.keep={queue.pop(0) if queue and queue[0].isdigit() else 'success'}"]
        elif word.startswith("--best="):
            best = [f"sft.keep={word.removeprefix('--best=')}"]
        elif word.startswith("--") and "=" not in word and queue:
            rest += [word, queue.pop(0)]
        elif is_player(word) or _is_stored(word):
            sources.append(word)
        else:
            _refuse_misspelt(word)
            rest.append(word)
    config, overrides = split_source(rest)
    if config is not None and Path(config).is_dir():
        fail(f"{config} is no run directory: it has no config.yaml; give a folder of runs/")
    return Words(sources=tuple(sources), config=config, overrides=(*overrides, *best))


def _refuse_misspelt(word: str) -> None:
    """Ends the command for a word that is nearly a player's name: as a recipe it would be told of
    recipes."""
    guess = nearest(word, ("expert", "random"))
    if guess is not None and "=" not in word and not Path(word).exists():
        fail(f"{word!r} is neither a source nor a recipe; did you mean {guess}?")


def _is_stored(word: str) -> bool:
    """Of a word that has no `=`, or that is a file: env.options.games=a.jsonl is an override."""
    path = Path(word)
    if "=" in word and not path.exists():
        return False
    return (path / "config.yaml").is_file() or word.endswith((".jsonl", ".jsonl.gz"))


def _write(config: Config, path: Path) -> None:
    from turnwise.envs.base import EnvError
    from turnwise.log.records import RunDirectoryError
    from turnwise.train.setup import choose_setting
    from turnwise.train.sources import collect, write_messages

    if not path.name.endswith((".jsonl", ".jsonl.gz")):
        fail(f"--write names a file .jsonl or .jsonl.gz, got {path}")
    with told_shortly((RunDirectoryError, ValueError, OSError), (EnvError,)):
        setting = choose_setting(config)
        found = collect(setting.config, factories=setting.factories, say=print)
        count = write_messages(path, found)
    text = show_config(config)
    config_path(path).write_text(text, encoding="utf-8")
    remember(text)
    print(f"{count} conversations in {path}; learn them with `turnwise sft {path} model.path=DIR`")
