"""A package that can be called: `turnwise.train(...)`, though `turnwise.train` is a room too."""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


def make_callable(name: str, target: str) -> None:
    """Makes the module `name` stand for the function `target` (module:function) when it is called.

    A package's name in its parent is the package itself once anything of it was imported, so the
    parent cannot keep a function under the same name.
    """
    where, _, attribute = target.partition(":")

    class CallableModule(ModuleType):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return getattr(import_module(where), attribute)(*args, **kwargs)

    sys.modules[name].__class__ = CallableModule
