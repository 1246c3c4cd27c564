"""Config files of Hydra: the files that `defaults` names, merged as Hydra does, and `${...}` filled
in by OmegaConf.

verl's own base files (`ppo_trainer`) are not looked for: what they say of learning stands in
`_VERL`, so that a file is read the same with and without verl.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from turnwise.config.dialects.keys import RULES
from turnwise.config.schema import Config
from turnwise.config.tree import ConfigError, Tree, get_path, is_tree, merge, set_path
from turnwise.config.yaml_io import MAX_NODES

_VERL: Tree = {
    "actor_rollout_ref": {
        "actor": {"optim": {"lr": 1e-6, "weight_decay": 0.01}, "grad_clip": 1.0},
        "rollout": {"temperature": 1.0, "top_p": 1.0, "top_k": -1},
    },
    "critic": {"optim": {"lr": 1e-5}},
}
_OF_VERL = ("ppo_trainer", "ppo_megatron_trainer")
_PACKAGE = re.compile(r"\A\s*#\s*@package\s+(\S+)")
_REFERENCE = re.compile(r"\$\{([^{}]*)\}?")
_KEY = re.compile(r"\w[\w.-]*|oc\.env:\w+")
Parse = Callable[[Path], tuple[str, Tree]]
"""From a file to its text and its data."""


def needs_hydra(data: Mapping[str, Any], text: str) -> bool:
    """Whether a file is one of Hydra's: it has a list of defaults, or keys of other projects that
    refer to others. In a file of our own keys, `${` is text."""
    theirs = {key.partition(".")[0] for key in RULES} - set(Config.model_fields)
    return isinstance(data.get("defaults"), list) or ("${" in text and bool(theirs & set(data)))


def compose(path: Path, parse: Parse) -> Tree:
    """The file with its defaults merged and its references filled in."""
    return _resolve(_merged(path, parse, path.parent, ()), str(path))


def _merged(path: Path, parse: Parse, root: Path, chain: tuple[str, ...]) -> Tree:
    if str(path) in chain:
        raise ConfigError([f"defaults: {path} names itself, by way of {' -> '.join(chain)}"])
    if not path.is_file():
        raise ConfigError([f"defaults: there is no {path} ({chain[-1] if chain else path})"])
    _, data = parse(path)
    entries = data.pop("defaults", [])
    data.pop("hydra", None)  # where Hydra looks and what it writes
    if not isinstance(entries, list):
        raise ConfigError([f"defaults: is a list of files, got {entries!r} ({path})"])
    entries = cast("list[Any]", entries)
    if "_self_" not in entries:
        entries = [*entries, "_self_"]
    tree: Tree = {}
    for entry in entries:
        if entry == "_self_":
            tree = merge(tree, data)
            continue
        group, names, optional = _files(entry, path)
        for name in names:
            file = root / group / f"{name.removesuffix('.yaml')}.yaml"
            if name in _OF_VERL:
                tree = merge(_VERL, tree)
            elif file.is_file() or not optional:
                inner = _merged(file, parse, root, (*chain, str(path)))
                tree = merge(tree, _packed(inner, group, parse(file)[0]))
    return tree


def _files(entry: Any, path: Path) -> tuple[str, list[str], bool]:
    """(group, names, whether they may be absent) of the files that an entry of `defaults` names:
    GROUP/NAME.yaml."""
    group, names, optional = "", [entry], False
    if is_tree(entry) and len(entry) == 1:
        ((key, value),) = cast(Tree, entry).items()
        group, optional = key.removeprefix("optional "), key.startswith("optional ")
        names = cast("list[Any]", value) if isinstance(value, list) else [value]
    elif isinstance(entry, str):
        group, _, name = entry.rpartition("/")
        names = [name]
    group = group.strip("/")
    given = [name for name in names if name is not None]
    if any(not isinstance(name, str) or set(name) & set("@ ") for name in (group, *given)):
        raise ConfigError(
            [
                f"defaults: {entry!r} is more of Hydra than is read here; compose the config with "
                f"Hydra (--cfg job) and give the result ({path})"
            ]
        )
    return group, given, optional


def _packed(tree: Tree, group: str, text: str) -> Tree:
    """The tree below its package: the group, or what its first line says."""
    said = _PACKAGE.match(text)
    own = group.replace("/", ".")
    package = said.group(1).replace("_group_", own) if said else own
    if package in ("", "_global_"):
        return tree
    packed: Tree = {}
    set_path(packed, package, tree)
    return packed


def _resolve(tree: Tree, origin: str) -> Tree:
    """The tree with every `${...}` filled in."""
    _refuse_too_much(tree, origin)
    try:
        from omegaconf import OmegaConf
    except ImportError:
        raise ConfigError(
            [
                f"{origin} refers to other keys as ${{...}}, which OmegaConf reads; run: pip "
                "install 'turnwise[hydra]'"
            ]
        ) from None
    return _filled_in(OmegaConf.create(tree), origin)


def plain_tree(settings: Mapping[str, Any]) -> Tree:
    """The settings as plain dicts and lists. Those of an OmegaConf object, such as the config that
    Hydra hands to a program, are mappings and lists of its own, with `${...}` in them."""
    if not type(settings).__module__.startswith("omegaconf."):
        return dict(settings)
    return _filled_in(settings, "mapping")


def _filled_in(config: Any, origin: str) -> Tree:
    """An OmegaConf object as plain dicts and lists, without references."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return cast(Tree, OmegaConf.to_container(config, resolve=True))
    except OmegaConfBaseException as error:
        reason = " ".join(str(error).split())
        raise ConfigError([f"{origin}: {reason}"]) from error


def _refuse_too_much(tree: Tree, origin: str) -> None:
    """Raises where a reference is more than a key, and where references of references stand for
    more than a person writes."""
    sizes: dict[str, int] = {}

    def size(node: Any) -> int:
        if is_tree(node):
            return 1 + sum(size(value) for value in node.values())
        if isinstance(node, list):
            return 1 + sum(size(value) for value in cast("list[Any]", node))
        if not isinstance(node, str):
            return 1
        return len(node) + sum(size_of(key) for key in _REFERENCE.findall(node))

    def size_of(key: str) -> int:
        if not _KEY.fullmatch(key):
            raise ConfigError(
                [
                    f"{origin}: ${{{key}}} is more than a key; compose the config with Hydra "
                    "(--cfg job --resolve) and give the result"
                ]
            )
        if key not in sizes:
            sizes[key] = 0  # a circle is OmegaConf's to report
            sizes[key] = size(get_path(tree, key))
        if sizes[key] > MAX_NODES:
            raise ConfigError([f"{origin}: ${{{key}}} stands for more than {MAX_NODES} characters"])
        return sizes[key]

    size(tree)
