"""From a file, a recipe or a mapping, plus dotted overrides, to a Config. All problems are reported at once."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import yaml
from pydantic import ValidationError

from turnwise.config.dialects.translate import Translator
from turnwise.config.schema import Config
from turnwise.config.tree import ConfigError, Tree, is_tree, known_fields, nearest, set_path
from turnwise.config.yaml_io import dump_yaml, parse_yaml

_RECIPES = Path(__file__).parent / "recipes"


def load_config(source: str | Path | Mapping[str, Any] | None = None, overrides: Sequence[str] = ()) -> Config:
    """The resolved config: what the source says, with the overrides on top and the schema's defaults below.

    The source is a recipe's name, a YAML file, or a mapping; a file or recipe may extend another one with `extends:`.
    Overrides are `train.max_turn=3` or `--train.max_turn 3`, with YAML values. Keys of other projects (dialects.py) are
    taken everywhere.

    Raises:
        ConfigError: unknown keys, wrong types, contradictions; all of them, each with its path, value and remedy.

    Example:
        >>> load_config({"train": {"max_turn": 3}}, ["--train.lr", "5e-7"]).train.lr
        5e-07
    """
    layers = _layers(source)
    layers.append(("command line", parse_overrides(overrides)))
    backends = [layer["backend"] for _, layer in layers if isinstance(layer.get("backend"), str)]
    translator = Translator(backend=backends[-1] if backends else "native")
    for origin, layer in layers:
        translator.add(layer, origin=origin)
    tree = translator.finish()
    config, problems = _validate(tree, translator.spelled)
    problems = [*translator.problems, *problems]
    if problems or config is None:
        raise ConfigError(problems)
    return config


def show_config(config: Config) -> str:
    """The whole resolved tree as YAML, which `load_config` reads back to an equal config.

    Example:
        >>> show_config(Config()).splitlines()[:2]
        ['seed: 0', 'backend: native']
    """
    return dump_yaml(config.model_dump(mode="json"))


def parse_overrides(words: Sequence[str]) -> Tree:
    """The tree that command-line words stand for. A key that is given twice has its last value.

    Example:
        >>> parse_overrides(["train.max_turn=3", "--env.shaping.turn_cost", "-0.5", "log.trackers=[wandb]"])
        {'train': {'max_turn': 3}, 'env': {'shaping': {'turn_cost': -0.5}}, 'log': {'trackers': ['wandb']}}
    """
    tree: Tree = {}
    problems: list[str] = []
    queue = list(words)
    while queue:
        word = queue.pop(0)
        key, equals, text = word.removeprefix("--").partition("=")
        if not equals and word.startswith("--"):
            if not queue or queue[0].startswith("--"):
                problems.append(f"{word}: needs a value, as in {word} 3 (switches are written {word} true)")
                continue
            text = queue.pop(0)
        elif not equals:
            problems.append(f"{word!r}: an override is written key=value or --key value")
            continue
        if not key or not all(key.split(".")):
            problems.append(f"{word!r}: {key!r} is no dotted key")
            continue
        try:
            set_path(tree, key, parse_yaml(text))
        except yaml.YAMLError as error:
            problems.append(f"{key}: the value {text!r} is not YAML ({_first_line(error)}); quote it")
    if problems:
        raise ConfigError(problems)
    return tree


def list_recipes() -> dict[str, str]:
    """The recipes that come with turnwise, by name, with what the first line of each says."""
    found: dict[str, str] = {}
    for entry in sorted(_RECIPES.glob("*.yaml")):
        first = entry.read_text(encoding="utf-8").partition("\n")[0]
        found[entry.stem] = first.lstrip("# ").strip()
    return found


def _layers(source: str | Path | Mapping[str, Any] | None) -> list[tuple[str, Tree]]:
    if source is None:
        return []
    if isinstance(source, Mapping):
        return _with_bases("mapping", dict(source), Path.cwd(), ())
    return _read(source, Path.cwd(), ())


def _read(source: str | Path, folder: Path, chain: tuple[str, ...]) -> list[tuple[str, Tree]]:
    """The layers of a file or recipe, those that it extends first."""
    name, path = str(source), folder / source
    if path.is_file():
        origin, text, inside = name, path.read_text(encoding="utf-8"), path.parent
        identity = str(path.resolve())
    elif name in (recipes := list_recipes()):
        origin, text, inside = f"recipe {name}", (_RECIPES / f"{name}.yaml").read_text(encoding="utf-8"), folder
        identity = f"recipe:{name}"
    else:
        guess = nearest(name, recipes)
        hint = f"did you mean {guess}?" if guess else f"recipes are {', '.join(recipes)}"
        raise ConfigError([f"{name!r} is neither a file nor a recipe; {hint}"])
    if identity in chain:
        raise ConfigError([f"extends: {origin} extends itself, by way of {' -> '.join(chain)}"])
    try:
        data = parse_yaml(text)
    except yaml.YAMLError as error:
        raise ConfigError([f"{origin} is not YAML: {' '.join(str(error).split())}"]) from error
    if data is not None and not is_tree(data):
        raise ConfigError([f"{origin} must hold keys and values, got {type(data).__name__}"])
    return _with_bases(origin, cast(Tree, data or {}), inside, (*chain, identity))


def _with_bases(origin: str, data: Tree, folder: Path, chain: tuple[str, ...]) -> list[tuple[str, Tree]]:
    base = data.pop("extends", None)
    if base is None:
        return [(origin, data)]
    if not isinstance(base, str):
        raise ConfigError([f"extends: names one recipe or file, got {base!r} ({origin})"])
    return [*_read(base, folder, chain), (origin, data)]


def _validate(tree: Tree, spelled: Mapping[str, str]) -> tuple[Config | None, list[str]]:
    """The config, or what is wrong with the tree. Strict: `true` is no number and `"3"` is no integer.

    YAML has lists only, so a list where the schema has a tuple is made one, and the tree is tried again.
    """
    while True:
        try:
            return Config.model_validate(tree, strict=True), []
        except ValidationError as error:
            errors = error.errors()
        lists = [item["loc"] for item in errors if item["type"] == "tuple_type" and isinstance(item["input"], list)]
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
        elif isinstance(node, list | tuple) and isinstance(part, int) and part < len(cast("list[Any]", node)):
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
        hint = f". Did you mean {'.'.join(str(part) for part in path[:2])}{guess[3:]}?" if guess else ""
        return f"{dotted}: unknown key{hint}"
    expected = " or ".join(dict.fromkeys(item["msg"].removeprefix("Value error, ") for item in items))
    source = spelled.get(dotted, dotted)
    written = f" (written as {source})" if source != dotted else ""
    if items[0]["type"] == "value_error":
        return f"{dotted or 'config'}: {expected}"
    return f"{dotted}: {expected[0].lower()}{expected[1:]}, got {items[0]['input']!r}{written}"


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
