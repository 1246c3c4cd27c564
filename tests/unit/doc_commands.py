"""Checks shell commands of the documentation without running them: commands, options, settings,
files, extras and targets of make exist."""

import itertools
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
import typer.main
from doc_pages import ROOT

from turnwise.cli.args import split_source
from turnwise.cli.main import COMMANDS, build_app
from turnwise.cli.sft import read_words
from turnwise.config import ConfigError, list_recipes, run_config
from turnwise.config.tree import known_fields

HEREDOC = re.compile(r"^cat > (\S+) <<-?['\"]?(\w+)['\"]?$|<<-?['\"]?(\w+)['\"]?")
PLACEHOLDER = re.compile(r"[A-Z][A-Z_/]*|\.\.\.")
MODULES = {"turnwise.trainers.ppo_multi_turn": "train"}
"""Modules that are a command under another name."""
USAGE: tuple[type[Exception], ...] = tuple(
    base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException"
)
"""Of click, or of the copy of click that typer brings."""
SHELL = re.compile(r"[|&;()<>]+")


def split_block(text: str) -> tuple[list[list[str]], dict[str, str]]:
    """(commands as words, files that the block writes by `cat > NAME <<END`).

    Example:
        >>> split_block("cat > a.yaml <<'Y'\\nseed: 1\\nY\\nturnwise train a.yaml | tee log  # go")
        ([['cat'], ['a.yaml'], ['Y'], ['turnwise', 'train', 'a.yaml'], ['tee', 'log']], {'a.yaml': 'seed: 1\\n'})
    """  # noqa: E501
    files: dict[str, str] = {}
    commands: list[list[str]] = []
    lines = iter(text.replace("\\\n", " ").splitlines())
    for line in lines:
        here = HEREDOC.search(line)
        if here is not None:
            end = here[2] or here[3]
            body: list[str] = []
            for inner in lines:
                if inner == end:
                    break
                body.append(f"{inner}\n")
            if here[1]:
                files[here[1]] = "".join(body)
        commands.extend(_simple_commands(line))
    return commands, files


def _simple_commands(line: str) -> Iterator[list[str]]:
    """The commands of a line: those between pipes, ampersands, semicolons and redirections."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    for word in lexer:
        if SHELL.fullmatch(word):
            yield from [words] if words else []
            words = []
        elif words or not re.fullmatch(r"[A-Z_]+=.*", word):  # a variable for one command
            words.append(word)
    yield from [words] if words else []


def check_command(words: list[str], folder: Path) -> None:
    """Refuses a command that cannot work. Configs that the block writes are in `folder`.

    Raises:
        ValueError: what is wrong with it.
    """
    program, *rest = words
    if program == "turnwise":
        check_turnwise(rest, folder)
    elif program == "make":
        if rest and rest[0] not in make_targets():
            raise ValueError(f"make has no target {rest[0]}")
    elif program == "pip":
        _check_extras(rest)
    elif re.fullmatch(r"python[\d.]*", program) and rest[:1] == ["-m"]:
        _check_module(rest[1], rest[2:], folder)
    elif re.fullmatch(r"python[\d.]*", program) and rest and rest[0].endswith(".py"):
        _check_script(rest[0], rest[1:])
    for word in words:
        if re.fullmatch(r"(scripts|examples|benchmarks|tests)/[\w/]+\.\w+", word):
            _need_file(word)


def check_turnwise(words: list[str], folder: Path) -> None:
    """Parses the words as the command line does, and loads the settings among them.

    Raises:
        ValueError: a command, option or setting does not exist, or has a wrong value.
    """
    if not words or words[0].startswith("-") or PLACEHOLDER.fullmatch(words[0]):
        return
    name, *rest = words
    if name not in COMMANDS:
        raise ValueError(f"there is no command {name}")
    if not rest and name != "train":  # a mention
        return
    command: Any = typer.main.get_command(build_app([name]))
    command = command.commands[name]
    if name == "config":
        if rest[0] not in command.commands:
            raise ValueError(f"there is no command {name} {rest[0]}")
        command, rest = command.commands[rest[0]], rest[1:]
    # A value in capitals stands for one of the reader's, and 1 is a number as well as a name.
    values = [
        "1" if before.startswith("--") and PLACEHOLDER.fullmatch(word) else word
        for before, word in itertools.pairwise(["", *rest])
    ]
    try:
        context = command.make_context(name, values)
    except typer.Exit:  # --help
        return
    except USAGE as error:
        raise ValueError(f"{name}: {error}") from error
    if context.allow_extra_args and name != "migrate":
        vary = [word.partition(",")[0] for word in context.params.get("vary") or ()]
        given = _without_sources(context.args) if name == "sft" else context.args
        _check_settings([*given, *vary], folder, source_first=name != "check-env")


def _without_sources(words: list[str]) -> list[str]:
    """The recipe and the settings of `turnwise sft`. Stored demonstrations are the reader's."""
    read = read_words([word for word in words if not re.match(r"runs/|.*\.jsonl", word)])
    return [*([] if read.config is None else [read.config]), *read.overrides]


def _check_settings(words: list[str], folder: Path, *, source_first: bool) -> None:
    """Loads the settings as the command would, over the recipe or file that they name. A value in
    capitals stands for one of the reader's: its key is looked up alone."""
    try:
        source, overrides = split_source(words)
    except SystemExit as error:
        raise ValueError(f"{words} are not settings") from error
    given: list[str] = []
    queue = list(overrides)
    while queue:
        word = queue.pop(0)
        key, equals, value = word.partition("=")
        if not equals and queue:
            value = queue.pop(0)
        key = key.removeprefix("--")
        if PLACEHOLDER.fullmatch(value) and key in known_fields():
            continue
        given.append(f"{key}={value}")
    base: str | Path | None = None
    if source is not None and source_first:
        base = source if source in list_recipes() else folder / source
        base = base if isinstance(base, str) or base.is_file() else None
    try:
        run_config(base, given)
    except ConfigError as error:
        raise ValueError(str(error)) from error


def _check_module(module: str, words: list[str], folder: Path) -> None:
    if module.partition(".")[0] != "turnwise":
        return
    place = ROOT / module.replace(".", "/")
    if not place.with_suffix(".py").is_file() and not (place / "__main__.py").is_file():
        raise ValueError(f"there is no module {module}")
    if module in MODULES:
        check_turnwise([MODULES[module], *words], folder)


def _check_script(script: str, words: list[str]) -> None:
    """Options of a script of ours stand in its text; those of examples are settings."""
    if not re.match(r"(scripts|benchmarks)/", script):
        return
    text = _need_file(script).read_text(encoding="utf-8")
    for word in words:
        option = word.partition("=")[0]
        if word.startswith("--") and f'"{option}"' not in text:
            raise ValueError(f"{script} has no option {option}")


def _check_extras(words: list[str]) -> None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    for word in words:
        asked = re.fullmatch(r"(?:turnwise|\.)\[([\w,-]+)\]", word)
        for extra in asked[1].split(",") if asked else ():
            if extra not in known["optional-dependencies"]:
                raise ValueError(f"there is no extra {extra}")


def _need_file(name: str) -> Path:
    if not (ROOT / name).is_file():
        raise ValueError(f"there is no {name}")
    return ROOT / name


def make_targets() -> set[str]:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z][a-z-]*):", text, re.MULTILINE))
