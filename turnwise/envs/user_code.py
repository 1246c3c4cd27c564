"""Users' own code by name: `module:function`, `package.module:Class`, or `file.py:Class`."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from turnwise.seeding import derive_seed


class UnknownNameError(ValueError):
    """A name leads to nothing, or to nothing that can be called."""


def load_named(target: str) -> Callable[..., Any]:
    """The class or function that `target` names; the module may also be the path of a Python file.

    Raises:
        UnknownNameError: there is nothing of that name. What the code raises while it is imported comes through.

    Example:
        >>> load_named("math:sqrt")(9)
        3.0
    """
    where, separator, attribute = target.rpartition(":")
    if not separator or not where or not attribute:
        raise UnknownNameError(f"{target!r} is not of the form module:name or file.py:name")
    try:
        found: Any = _load_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{where}.".startswith(f"{error.name}."):
            raise  # the module is there, and something that it imports is not
        raise UnknownNameError(
            f"{target!r}: there is no module {error.name!r}; is it installed, or on PYTHONPATH?"
        ) from error
    for part in attribute.split("."):
        if part not in dir(found):
            near = get_close_matches(part, dir(found), n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UnknownNameError(f"{target!r} names nothing: {where} has no {part!r}{hint}")
        found = getattr(found, part)
    if not callable(found):
        raise UnknownNameError(f"{target!r} must name a class or a function, got {type(found).__name__}")
    return found


def _load_file(path: Path) -> Any:
    """The file as a module. It is loaded once, under a name that is the same in every process."""
    resolved = path.resolve()
    name = f"turnwise_file_{resolved.stem}_{derive_seed(0, resolved.as_posix()):x}"
    if name in sys.modules:
        return sys.modules[name]
    if not resolved.is_file():
        raise UnknownNameError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(name, resolved)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
