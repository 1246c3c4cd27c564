"""Loads a Config from a file, a recipe or a mapping, plus dotted overrides. Reports all problems at
once."""

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml
from pydantic import ValidationError

from turnwise.config.dialects.hydra import compose, needs_hydra, plain_tree
from turnwise.config.dialects.shell import read_script
from turnwise.config.dialects.translate import Noted, Translator
from turnwise.config.schema import Config
from turnwise.config.tree import (
    ConfigError,
    ConfigWarning,
    Tree,
    is_tree,
    known_fields,
    merge,
    nearest,
    set_path,
)
from turnwise.config.yaml_io import dump_yaml, parse_yaml
from turnwise.json_lines import FileError, read_text

_RECIPES = Path(__file__).parent / "recipes"
_RECIPE = "recipe "
"""Prefix of the origin of a layer that comes with turnwise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Layer:
    """The settings of one file, recipe or command line."""

    origin: str
    tree: Tree
    notes: tuple[tuple[str, str], ...] = ()
    """(what stands in the file, what was made of it)."""


def load_config(
    source: str | Path | Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
    *,
    beneath: Callable[[Tree], Tree] | None = None,
) -> Config:
    """The resolved config: the overrides, over the source, over the schema's defaults. `run_config`
    adds defaults that depend on the model, as `turnwise train` does.

    The source is a recipe's name, a YAML file, or a mapping; a file or recipe may extend another
    one with `extends:`. Overrides are `train.max_turn=3` or `--train.max_turn 3`, with YAML values.
    Keys of other projects (`dialects/`) are taken everywhere, and so are their files: Hydra's
    `defaults` and `${...}`, and shell scripts with overrides. What of them is taken without its
    effect is said in a ConfigWarning.

    Args:
        beneath: maps the tree of given settings to defaults that come before the schema's.

    Raises:
        ConfigError: unknown keys, wrong types, contradictions; all of them, each with its path,
            value and remedy.

    Example:
        >>> load_config({"train": {"max_turn": 3}}, ["--train.lr", "5e-7"]).train.lr
        5e-07
    """
    translator = translate(source, overrides)
    tree = translator.finish()
    if translator.notes and not translator.problems:
        warnings.warn(_told(translator), ConfigWarning, stacklevel=2)
    if beneath is not None and not translator.problems:
        tree = merge(beneath(tree), tree)
    config, problems = _validate(tree, translator.spelled)
    problems = [*translator.problems, *problems]
    if problems or config is None:
        raise ConfigError(problems)
    return config


def translate(
    source: str | Path | Mapping[str, Any] | None, overrides: Sequence[str] = ()
) -> Translator:
    """All layers of a source and its overrides, in our names: the tree, what was noted of keys of
    other projects, and what is wrong."""
    layers = _layers(source)
    layers.append(_Layer(origin="command line", tree=parse_overrides(overrides)))
    named = (layer.tree.get("backend") for layer in layers)
    backends = [backend for backend in named if isinstance(backend, str)]
    translator = Translator(backend=backends[-1] if backends else None)
    for layer in layers:
        recipe = layer.origin.startswith(_RECIPE)
        translator.add(layer.tree, origin=layer.origin, recipe=recipe)
        for key, why in layer.notes:
            translator.notes[key] = Noted(value={}, why=why, moot=False)
    return translator


def _told(translator: Translator) -> str:
    """The meaning of other projects' keys, in a few lines."""
    differs = [f"  - {key}: {note.why}" for key, note in translator.notes.items() if not note.moot]
    moot = [key for key, note in translator.notes.items() if note.moot]
    lines = ["keys that mean something else here:", *differs] if differs else []
    if moot:
        lines.append(f"keys without an effect here: {', '.join(moot)}")
    return "\n".join(lines)


def show_config(config: Config) -> str:
    """The whole resolved tree as YAML, which `load_config` reads back to an equal config.

    Example:
        >>> show_config(Config()).splitlines()[:2]
        ['seed: 0', 'backend: native']
    """
    return dump_yaml(config.model_dump(mode="json"))


def parse_overrides(words: Sequence[str]) -> Tree:
    """The tree of these command-line words. If a key is given twice, its last value counts.

    Example:
        >>> parse_overrides(["train.max_turn=3", "--env.shaping.turn_cost", "-0.5",
        ...     "log.trackers=[wandb]"])
        {'train': {'max_turn': 3}, 'env': {'shaping': {'turn_cost': -0.5}}, 'log': {'trackers': ['wandb']}}
    """  # noqa: E501
    tree: Tree = {}
    problems: list[str] = []
    queue = list(words)
    while queue:
        word = queue.pop(0)
        # Hydra's + and ++ add a key; here every key can be set.
        key, equals, text = word.removeprefix("--").lstrip("+").partition("=")
        if not equals and word.startswith("--"):
            if not queue or queue[0].startswith("--"):
                problems.append(
                    f"{word}: needs a value, as in {word} 3 (switches are written {word} true)"
                )
                continue
            text = queue.pop(0)
        elif not equals:
            problems.append(f"{word!r}: an override is written key=value or --key value")
            continue
        if not key or not all(key.split(".")):
            problems.append(f"{word!r}: {key!r} is not a dotted key")
            continue
        try:
            set_path(tree, key, parse_yaml(text))
        except yaml.YAMLError as error:
            problems.append(
                f"{key}: the value {text!r} is not YAML ({_first_line(error)}); quote it"
            )
    if problems:
        raise ConfigError(problems)
    return tree


def list_recipes() -> dict[str, str]:
    """The recipes that come with turnwise: name -> the comment in its first line."""
    found: dict[str, str] = {}
    for entry in sorted(_RECIPES.glob("*.yaml")):
        first = entry.read_text(encoding="utf-8").partition("\n")[0]
        found[entry.stem] = first.lstrip("# ").strip()
    return found


def _layers(source: str | Path | Mapping[str, Any] | None) -> list[_Layer]:
    if source is None:
        return []
    if isinstance(source, Mapping):
        return _with_bases("mapping", plain_tree(source), Path.cwd(), ())
    return _read(source, Path.cwd(), ())


def _read(source: str | Path, folder: Path, chain: tuple[str, ...]) -> list[_Layer]:
    """The layers of a file or recipe; the ones that it extends come first."""
    name, path = str(source), folder / source
    if path.suffix == ".py" or (re.fullmatch(r".+:\w+", name) and not path.is_file()):
        env = f"{name}:CLASS" if path.suffix == ".py" else name
        raise ConfigError([f"{name!r} is an environment, not a config; write --env.name {env}"])
    if path.is_file():
        try:
            origin, text, inside = name, read_text(path), path.parent
        except FileError as error:
            raise ConfigError([str(error)]) from error
        identity = str(path.resolve())
    elif name in (recipes := list_recipes()):
        origin, text, inside = (
            f"{_RECIPE}{name}",
            (_RECIPES / f"{name}.yaml").read_text(encoding="utf-8"),
            folder,
        )
        identity = f"recipe:{name}"
    elif path.suffix in (".yaml", ".yml"):
        raise ConfigError([f"there is no file {name}"])
    else:
        guess = nearest(name, recipes)
        hint = f"did you mean {guess}?" if guess else f"recipes are {', '.join(recipes)}"
        raise ConfigError([f"{name!r} is neither a file nor a recipe; {hint}"])
    if identity in chain:
        raise ConfigError([f"extends: {origin} extends itself, by way of {' -> '.join(chain)}"])
    if path.suffix in (".sh", ".bash"):
        script = read_script(text, origin)
        return [_Layer(origin=origin, tree=parse_overrides(script.overrides), notes=script.notes)]
    data = _parsed(origin, text)
    if path.is_file() and needs_hydra(data, text):
        return [_Layer(origin=origin, tree=compose(path, _parsed_file))]
    return _with_bases(origin, data, inside, (*chain, identity))


def _parsed_file(path: Path) -> tuple[str, Tree]:
    """A file's text and data."""
    try:
        text = read_text(path)
    except FileError as error:
        raise ConfigError([str(error)]) from error
    return text, _parsed(str(path), text)


def _parsed(origin: str, text: str) -> Tree:
    try:
        data = parse_yaml(text)
    except yaml.YAMLError as error:
        raise ConfigError([f"{origin} is not YAML: {' '.join(str(error).split())}"]) from error
    if data is not None and not is_tree(data):
        raise ConfigError(
            [
                f"{origin} must hold keys and values, as in train: {{steps: 10}}, got "
                f"{type(data).__name__}"
            ]
        )
    return cast(Tree, data or {})


def _with_bases(origin: str, data: Tree, folder: Path, chain: tuple[str, ...]) -> list[_Layer]:
    base = data.pop("extends", None)
    if base is None:
        return [_Layer(origin=origin, tree=data)]
    if not isinstance(base, str):
        raise ConfigError([f"extends: names one recipe or file, got {base!r} ({origin})"])
    return [*_read(base, folder, chain), _Layer(origin=origin, tree=data)]


def _validate(tree: Tree, spelled: Mapping[str, str]) -> tuple[Config | None, list[str]]:
    """The config, or None, and the problems of the tree. Strict: `true` is not a number and `"3"`
    is not an integer.

    YAML has no tuples, so a list in place of a tuple is converted, and the tree is validated again.
    """
    while True:
        try:
            return Config.model_validate(tree, strict=True), []
        except ValidationError as error:
            errors = error.errors()
        lists = [
            item["loc"]
            for item in errors
            if item["type"] == "tuple_type" and isinstance(item["input"], list)
        ]
        if not lists:
            break
        for loc in lists:
            node: Any = tree
            path = _real_path(tree, loc)
            for part in path[:-1]:
                node = node[part]
            node[path[-1]] = tuple(node[path[-1]])
    by_path: dict[tuple[int | str, ...], list[Any]] = {}
    for item in errors:
        by_path.setdefault(_real_path(tree, item["loc"]), []).append(item)
    return None, [_describe(path, items, spelled) for path, items in by_path.items()]


def _real_path(tree: Tree, loc: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """The location without the names of union members that pydantic adds to it."""
    node: Any = tree
    path: list[int | str] = []
    for part in loc:
        if is_tree(node) and part in node:
            node = node[part]
        elif (
            isinstance(node, list | tuple)
            and isinstance(part, int)
            and part < len(cast("list[Any]", node))
        ):
            node = cast("list[Any]", node)[part]
        else:
            break
        path.append(part)
    return tuple(path)


def _describe(path: tuple[int | str, ...], items: list[Any], spelled: Mapping[str, str]) -> str:
    dotted = ".".join(str(part) for part in path)
    if items[0]["type"] == "extra_forbidden":
        siblings = [name for name in known_fields() if name.startswith("env.")]
        below = ".".join(["env", *(str(part) for part in path[2:])])
        guess = nearest(below, siblings)
        hint = (
            f". Did you mean {'.'.join(str(part) for part in path[:2])}{guess[3:]}?"
            if guess
            else ""
        )
        return f"{dotted}: unknown key{hint}"
    expected = " or ".join(
        dict.fromkeys(item["msg"].removeprefix("Value error, ") for item in items)
    )
    source = spelled.get(dotted, dotted)
    written = f" (written as {source})" if source != dotted else ""
    if items[0]["type"] == "value_error":
        return f"{dotted or 'config'}: {expected}"
    return f"{dotted}: {expected[0].lower()}{expected[1:]}, got {items[0]['input']!r}{written}"


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def config_path(path: Path) -> Path:
    """The path of the config of an episode file.

    Example:
        >>> config_path(Path("a/episodes.jsonl")).name, config_path(Path("b.jsonl.gz")).name
        ('episodes.config.yaml', 'b.config.yaml')
    """
    name = path.name.removesuffix(".gz")
    return path.with_name(f"{Path(name).stem}.config.yaml")
