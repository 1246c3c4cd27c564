# pyright: reportUnknownMemberType=false
"""Environments that only the driver knows, by value: their classes travel to the workers."""

import copy
import sys
import traceback
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import turnwise
from turnwise.config.schema import EnvConfig
from turnwise.envs.adapters import as_env
from turnwise.envs.base import Env
from turnwise.envs.registry import find_env, is_registered_here
from turnwise.user_code import is_only_here, load_named

_TURNWISE = Path(turnwise.__file__).resolve().parent
_STDLIB = Path(traceback.__file__).resolve().parent


@dataclass(frozen=True, kw_only=True)
class CarriedEnv:
    """A factory that holds the environment's class, function or object itself, not its name."""

    source: Any
    config: EnvConfig
    name: str
    options: Mapping[str, Any] | None = None
    """Arguments of the source. None: it is an environment itself, and is copied."""

    def __call__(self) -> Env:
        made = copy.deepcopy(self.source) if self.options is None else self.source(**self.options)
        return as_env(made, config=self.config, name=self.name)


def carried(config: EnvConfig) -> CarriedEnv:
    """The environment of this config, for processes that do not find it by its name."""
    spec = find_env(config.name)
    source = load_named(spec.target) if isinstance(spec.target, str) else spec.target
    options = {**spec.given, **config.options}
    return CarriedEnv(source=source, config=config, options=options, name=spec.name)


def travels_by_name(name: str) -> bool:
    """True where another process of this machine finds the environment by its name.

    Example:
        >>> travels_by_name("frozen_lake"), travels_by_name("python:Coin")
        (True, False)
    """
    return not is_only_here(name) and not is_registered_here(name)


@contextmanager
def by_value(things: Iterable[object]) -> Generator[None]:
    """Inside, cloudpickle writes the modules of these classes, objects and functions by value, and
    what was imported from beside them."""
    from ray import cloudpickle

    modules = _own_modules(things)
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


def _own_modules(things: Iterable[object]) -> list[ModuleType]:
    """The modules of these things, and all that lie in their folders, without installed ones."""
    classes = [thing if hasattr(thing, "__qualname__") else type(thing) for thing in things]
    homes = {sys.modules[cls.__module__] for cls in classes if cls.__module__ in sys.modules}
    folders = {folder for home in homes if (folder := _own_folder(home)) is not None}
    return [module for module in list(sys.modules.values()) if _own_folder(module) in folders]


def _own_folder(module: ModuleType) -> Path | None:
    """The folder of a user's module; None for an installed one, turnwise's and the main script's,
    which cloudpickle writes by value in any case."""
    file = getattr(module, "__file__", None)
    if file is None or module.__name__ == "__main__" or not str(file).endswith(".py"):
        return None
    path = Path(file).resolve()
    installed = {"site-packages", "dist-packages"} & set(path.parts)
    if installed or any(path.is_relative_to(folder) for folder in (_TURNWISE, _STDLIB)):
        return None
    return path.parent
