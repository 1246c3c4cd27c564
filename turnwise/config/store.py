# pyright: reportUnknownVariableType=false
"""ConfigStore: a config that is set attribute by attribute."""

from collections.abc import Iterator, MutableMapping
from typing import Any, cast

from turnwise.config.dialects.keys import RULES
from turnwise.config.dialects.rules import No
from turnwise.config.dialects.translate import target_of
from turnwise.config.load import load_config
from turnwise.config.schema import Config
from turnwise.config.tree import (
    Tree,
    get_path,
    has_path,
    is_tree,
    known_fields,
    nearest,
    section_of,
    set_path,
)


class StoreSection(MutableMapping[str, Any]):
    """A section of a ConfigStore. Attributes and items are the same; iteration covers only keys
    that were set."""

    __slots__ = ("_path", "_store")

    def __init__(self, store: "ConfigStore", path: str) -> None:
        object.__setattr__(self, "_store", store)
        object.__setattr__(self, "_path", path)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._store.read(self._join(name))

    def __setattr__(self, name: str, value: Any) -> None:
        self._store.write(self._join(name), value)

    def __getitem__(self, name: str) -> Any:
        if not has_path(self._store.tree, self._join(name)):
            raise KeyError(name)
        return self._store.read(self._join(name))

    def __setitem__(self, name: str, value: Any) -> None:
        self._store.write(self._join(name), value)

    def __delitem__(self, name: str) -> None:
        del self._own()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._own())

    def __len__(self) -> int:
        return len(self._own())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._path!r}, {self._own()!r})"

    def _own(self) -> Tree:
        return (
            cast(Tree, get_path(self._store.tree, self._path) or {})
            if self._path
            else self._store.tree
        )

    def _join(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name


class ConfigStore(StoreSection):
    """A config under construction: `config.training.num_epochs = 10`, then `to_config()`.

    Accepts turnwise's names and those in dialects/keys.py; any other attribute raises an error that
    suggests the nearest name. An unset setting reads as its default.

    Example:
        >>> config = ConfigStore()
        >>> config.training.num_epochs = 10
        >>> config.to_config().train.steps, config.train.steps, config.algorithm.gamma
        (10, 10, 1.0)
    """

    __slots__ = ("tree",)

    def __init__(self) -> None:
        object.__setattr__(self, "tree", {})
        super().__init__(self, "")

    def to_config(self) -> Config:
        """The typed, frozen config. Raises ConfigError if settings are wrong or contradict each
        other."""
        return load_config(self.tree)

    def read(self, path: str) -> Any:
        """The value at a path, or the section there."""
        if has_path(self.tree, path) and not is_tree(get_path(self.tree, path)):
            return get_path(self.tree, path)
        field = known_fields().get(path)
        if (field is not None and section_of(field) is not None) or _opens(path):
            return StoreSection(self, path)
        if has_path(self.tree, path):
            return get_path(self.tree, path)
        target = path if field is not None else target_of(path)
        if target is None:
            raise AttributeError(
                _unknown(path) if path not in RULES else f"{path} was not set and has no default"
            )
        resolved = self.to_config().model_dump()
        if not has_path(resolved, target):
            raise AttributeError(f"{path} was not set and has no default")
        return get_path(resolved, target)

    def write(self, path: str, value: Any) -> None:
        """Sets a leaf, or every leaf of a section from a mapping."""
        rule = RULES.get(path)
        if isinstance(rule, No):
            raise AttributeError(f"{path} is not supported: {rule.why}")
        field = known_fields().get(path)
        section = (field is not None and section_of(field) is not None) or _opens(path)
        if section and not is_tree(value):
            raise AttributeError(
                f"{path} is a section: set its attributes, or assign a mapping; got {value!r}"
            )
        if section:
            for name, inner in value.items():
                self.write(f"{path}.{name}", inner)
        elif field is None and rule is None:
            raise AttributeError(_unknown(path))
        else:
            set_path(self.tree, path, value)


def _opens(path: str) -> bool:
    return path not in RULES and path != "seed" and any(key.startswith(f"{path}.") for key in RULES)


def _unknown(path: str) -> str:
    guess = nearest(path, [*known_fields(), *RULES, *{key.partition(".")[0] for key in RULES}])
    return f"ConfigStore has no attribute {path}" + (f". Did you mean {guess}?" if guess else "")
