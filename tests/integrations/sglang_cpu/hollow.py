"""Packages that can be imported and not used."""

import sys
from enum import StrEnum
from types import ModuleType
from typing import Any, NoReturn


class Hollow(ModuleType):
    """A module that holds whatever is asked of it, as classes that cannot be made."""

    InterpolationMode = StrEnum(
        "InterpolationMode",
        ["NEAREST", "NEAREST_EXACT", "BILINEAR", "BICUBIC", "BOX", "HAMMING", "LANCZOS"],
    )
    """torchvision's, whose members transformers lists as soon as it sees a torchvision."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")

        def unusable(*_: object, **__: object) -> NoReturn:
            raise RuntimeError(
                f"{self.__name__}.{name} was called, and only a stand-in is installed"
            )

        return type(name, (), {"__init__": unusable})


def add_modules(package: str, *names: str) -> None:
    """Puts hollow modules below a package that is being imported, outer ones first."""
    for name in names:
        module = Hollow(f"{package}.{name}")
        parent, _, last = module.__name__.rpartition(".")
        sys.modules[module.__name__] = module
        setattr(sys.modules[parent], last, module)
