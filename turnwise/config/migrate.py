"""Another project's config in our own names, with a comment for each key that means something else
here."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

from turnwise.config.dialects.translate import Noted
from turnwise.config.load import load_config, translate
from turnwise.config.tree import ConfigError, Tree, is_tree
from turnwise.config.yaml_io import parse_yaml

WIDTH = 100
_PLAIN = re.compile(r"[A-Za-z_][\w./:@-]*\w")


def migrate(source: str | Path, overrides: Sequence[str] = (), *, leave_out: bool = False) -> str:
    """Our config, as YAML, of a file of another project: what it sets, and nothing else.

    Args:
        leave_out: write what can be taken over, and refused keys as comments.

    Raises:
        ConfigError: a key is refused and `leave_out` is off, or what is left is no config.
    """
    translator = translate(source, overrides)
    tree = translator.finish()
    if translator.problems and not leave_out:
        raise ConfigError(translator.problems)
    differs = {key: note for key, note in translator.notes.items() if not note.moot}
    moot = {key: note for key, note in translator.notes.items() if note.moot}
    lines = [f"# From {' '.join(Path(source).name.split())}, by `turnwise migrate`."]
    lines += _comment("Refused. Nothing here stands for these:", translator.problems)
    lines += _comment("These mean something else here:", _described(differs))
    lines += _comment("These have no effect here:", _described(moot))
    text = "\n".join([*lines, *_with_origins(tree, translator.spelled)]) + "\n"
    load_config(parse_yaml(text))  # raises where our names cannot hold it
    return text


def _described(notes: Mapping[str, Noted]) -> list[str]:
    """Keys with their values; those with one reason stand together."""
    by_reason: dict[str, list[str]] = {}
    for key, note in notes.items():
        value = "" if is_tree(note.value) else f" = {_scalar(note.value)}"
        by_reason.setdefault(note.why, []).append(f"{key}{value}")
    return [f"{', '.join(keys)}: {why}" for why, keys in by_reason.items()]


def _comment(title: str, texts: Sequence[str]) -> list[str]:
    if not texts:
        return []
    lines = ["#", f"# {title}"]
    for text in texts:
        lines += wrap(
            " ".join(text.split()),
            WIDTH,
            initial_indent="# - ",
            subsequent_indent="#   ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    return lines


def _with_origins(tree: Tree, spelled: Mapping[str, str]) -> Iterator[str]:
    """The tree as YAML, with the key that set it behind each line of another name."""
    for path, depth, text in _lines(tree):
        source = spelled.get(path, path)
        yield "  " * depth + text + ("" if source == path else f"  # {source}")


def _lines(
    tree: Mapping[str, Any], prefix: str = "", depth: int = 0
) -> Iterator[tuple[str, int, str]]:
    """(path, depth, line) of each value and section. Lists and empty mappings stand on one line."""
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if is_tree(value) and value:
            yield path, depth, f"{_scalar(key)}:"
            yield from _lines(value, f"{path}.", depth + 1)
        else:
            yield path, depth, f"{_scalar(key)}: {_scalar(value)}"


def _scalar(value: Any) -> str:
    """A value in YAML on one line: a plain word, or JSON, which YAML holds."""
    if isinstance(value, str) and _PLAIN.fullmatch(value) and parse_yaml(value) == value:
        return value
    return json.dumps(value, ensure_ascii=False)
