"""Functions on nested dicts with dotted paths, and the schema's fields by path."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from functools import cache
from typing import Any, cast

from pydantic.fields import FieldInfo

from turnwise.config.schema import Config, Section

Tree = dict[str, Any]


class ConfigError(ValueError):
    """An invalid config. Lists every problem, not only the first.

    Example:
        >>> ConfigError(["train.lr: must be above 0, got -1"]).problems
        ('train.lr: must be above 0, got -1',)
    """

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(dict.fromkeys(problems))
        count = f"{len(self.problems)} problem" + "s" * (len(self.problems) != 1)
        super().__init__(
            f"the config has {count}:\n" + "\n".join(f"  - {text}" for text in self.problems)
        )


class ConfigWarning(UserWarning):
    """Keys of other projects that were taken without the effect that they have there."""


def is_tree(value: object) -> bool:
    """True if the value is a mapping, so that dotted paths can go through it."""
    return isinstance(value, Mapping)


def get_path(tree: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path, or None if it is not set.

    Example:
        >>> get_path({"train": {"lr": 0.1}}, "train.lr"), get_path({}, "train.lr")
        (0.1, None)
    """
    node: Any = tree
    for part in path.split("."):
        if not is_tree(node) or part not in node:
            return None
        node = node[part]
    return node


def has_path(tree: Mapping[str, Any], path: str) -> bool:
    """True if a value, even None, is set at a dotted path.

    Example:
        >>> has_path({"log": {"name": None}}, "log.name"), has_path({"log": {}}, "log.name")
        (True, False)
    """
    parent, _, leaf = path.rpartition(".")
    node = get_path(tree, parent) if parent else tree
    return is_tree(node) and leaf in node


def set_path(tree: Tree, path: str, value: Any) -> None:
    """Sets the value at a dotted path, in place. A parent that is not a mapping is replaced.

    Example:
        >>> tree = {}
        >>> set_path(tree, "train.lr", 0.1); tree
        {'train': {'lr': 0.1}}
    """
    *parents, leaf = path.split(".")
    node = tree
    for part in parents:
        if not isinstance(node.get(part), dict):
            node[part] = {}
        node = cast(Tree, node[part])
    node[leaf] = value


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> Tree:
    """A new tree in which `over` wins. Mappings are merged, everything else (lists too) is
    replaced.

    Example:
        >>> merge({"a": {"x": 1, "y": [1, 2]}}, {"a": {"y": [3]}})
        {'a': {'x': 1, 'y': [3]}}
    """
    merged: Tree = {
        key: merge(value, {}) if is_tree(value) else value for key, value in base.items()
    }
    for key, value in over.items():
        old = merged.get(key)
        if is_tree(value):
            merged[key] = merge(cast(Tree, old) if is_tree(old) else {}, value)
        else:
            merged[key] = value
    return merged


def iter_fields(
    section: type[Section] = Config, prefix: str = ""
) -> Iterator[tuple[str, FieldInfo]]:
    """Every setting of the schema as (dotted path, field); a section comes before its fields.

    Example:
        >>> [path for path, _ in iter_fields()][:3]
        ['seed', 'backend', 'model']
    """
    for name, field in section.model_fields.items():
        path = f"{prefix}{name}"
        yield path, field
        if (inner := section_of(field)) is not None:
            yield from iter_fields(inner, f"{path}.")


def section_of(field: FieldInfo) -> type[Section] | None:
    """The section class of a field, or None if the field is not a section."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


@cache
def known_fields() -> Mapping[str, FieldInfo]:
    """The schema's fields by dotted path."""
    return dict(iter_fields())


def differences(configs: Sequence[Config]) -> dict[str, list[Any]]:
    """Key -> its value in every config, in their order, for the keys in which they differ.

    Example:
        >>> differences([Config(), Config(seed=1)])
        {'seed': [0, 1]}
    """
    trees = [config.model_dump(mode="json") for config in configs]
    leaves = [path for path, field in known_fields().items() if section_of(field) is None]
    values = {path: [get_path(tree, path) for tree in trees] for path in leaves}
    return {path: found for path, found in values.items() if any(v != found[0] for v in found)}


def default_at(path: str) -> Any:
    """The default of a key.

    Example:
        >>> default_at("rollout.train.group_size"), default_at("rollout.val.group_size")
        (16, 1)
    """
    return get_path(Config().model_dump(), path)


def alike(one: str, other: str) -> float:
    """How much two words are alike; 1: equal."""
    return SequenceMatcher(None, one, other).ratio()


def nearest(path: str, candidates: Iterable[str]) -> str | None:
    """The candidate most similar to a mistyped path; siblings are preferred. None: no candidate is
    similar enough.

    Example:
        >>> nearest("train.max_tun", ["train.max_turn", "train.steps", "env.max_turn"])
        'train.max_turn'
        >>> nearest("algo.max_turn", ["train.max_turn", "train.steps"])
        'train.max_turn'
    """
    parent, _, leaf = path.rpartition(".")
    best, best_score = None, 0.75
    for candidate in candidates:
        other_parent, _, other_leaf = candidate.rpartition(".")
        by_leaf = alike(leaf, other_leaf)
        score = by_leaf + 0.1 if parent == other_parent else 0.9 * by_leaf
        score = max(score, alike(path, candidate))
        if score > best_score:
            best, best_score = candidate, score
    return best
