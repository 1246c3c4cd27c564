"""Users' own code by name: `module:function`, `file.py:Class`, a registered name, or `python:name`
for an object that only this process knows."""

import contextlib
import importlib
import importlib.util
import inspect
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from turnwise.seeding import derive_seed

Kind = Literal["algorithm", "loss", "shaper", "generator", "agent", "callback"]
"""Kinds of parts that a user can replace."""
HERE = "python"
"""The module of objects that were given as such: `python:Coin`."""
PLUGINS = "turnwise.plugins"
"""Entry points of installed packages: modules that register parts when they are imported."""
T = TypeVar("T")

_parts: dict[tuple[str, str], Any] = {}
_given: dict[str, Any] = {}
_loading = threading.RLock()


class UnknownNameError(ValueError):
    """A name leads to nothing, or to nothing that can be called."""


def register_part(kind: Kind, name: str) -> Callable[[T], T]:
    """A decorator that makes a part known by name, for a config (`algo.name: mine`) and for
    `turnwise.train`. The part is checked when a run is built with it.

    Raises:
        ValueError: the name is taken by something else, or is no plain name.

    Example:
        >>> @register_part("shaper", "doctest-short")
        ... def short(text):
        ...     return -0.01 * len(text)
        >>> find_part("shaper", "doctest-short") is short
        True
    """
    if kind not in get_args(Kind):
        raise ValueError(f"a part is one of {', '.join(get_args(Kind))}, got {kind!r}")
    if not name or ":" in name:
        raise ValueError(f"a part is registered under a plain name without ':', got {name!r}")

    def register(part: T) -> T:
        old = _parts.setdefault((kind, name), part)
        if old is not part:
            if _origin(old) != _origin(part):
                raise ValueError(
                    f"{_article(kind)} named {name!r} is registered already: {_origin(old)[1]}"
                )
            _parts[kind, name] = part  # redefined, as when a cell of a notebook runs again
        return part

    return register


def find_part(kind: Kind, name: str) -> Any:
    """The part with this name: registered, or named by `module:name`, `file.py:name` or
    `python:name`.

    Raises:
        UnknownNameError: there is none; the message has the nearest name.
    """
    if ":" in name:
        return load_object(name)
    if (kind, name) not in _parts:
        _import_plugins()
    if (kind, name) not in _parts:
        known = sorted(other for of, other in _parts if of == kind)
        near = get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"registered: {', '.join(known) or 'none'}"
        raise UnknownNameError(
            f"no {kind} is registered as {name!r}; {hint} (or write file.py:name)"
        )
    return _parts[kind, name]


def name_of(thing: object) -> str:
    """The name by which `load_object` finds the object. Code in a file or an installed module is
    named by it, so that other processes find it too; all else is `python:name`, which this process
    alone knows.

    Example:
        >>> import json
        >>> name_of(json.JSONDecoder), load_object(name_of(3)) == 3
        ('json.decoder:JSONDecoder', True)
    """
    module, qualname = _origin(thing)
    loaded = sys.modules.get(module)
    if module != "__main__" and loaded is not None and _attribute(loaded, qualname) is thing:
        file = getattr(loaded, "__file__", None)
        own = "." not in module and "site-packages" not in str(file)
        return f"{file if own and str(file).endswith('.py') else module}:{qualname}"
    base = name = qualname.rpartition(".")[2].strip("<>") or "object"
    count = 2
    while name in _given and _given[name] is not thing:
        if _origin(_given[name]) == (module, qualname) and base != "lambda":
            break  # redefined
        name, count = f"{base}-{count}", count + 1
    _given[name] = thing
    return f"{HERE}:{name}"


def is_only_here(name: str) -> bool:
    """Whether the name is known to this process alone.

    Example:
        >>> is_only_here("python:Coin"), is_only_here("coin.py:Coin")
        (True, False)
    """
    return name.startswith(f"{HERE}:")


def load_object(target: str) -> Any:
    """The object that `target` names; the module may also be the path of a Python file.

    Raises:
        UnknownNameError: there is nothing of that name. What the code raises while it is imported
            comes through.
    """
    where, separator, attribute = target.rpartition(":")
    if not separator or not where or not attribute:
        raise UnknownNameError(f"{target!r} is not of the form module:name or file.py:name")
    if where == HERE:
        if attribute not in _given:
            raise UnknownNameError(
                f"{target!r} was given as a Python object to the process that started the run, and "
                "is not known here; put it into a file and name it FILE.py:NAME"
            )
        return _given[attribute]
    try:
        with _loading:  # another thread must not see a file that is half loaded
            found: Any = (
                _load_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
            )
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
    return found


def load_named(target: str) -> Callable[..., Any]:
    """The class or function that `target` names.

    Raises:
        UnknownNameError: there is nothing of that name, or nothing that can be called.

    Example:
        >>> load_named("math:sqrt")(9)
        3.0
    """
    found = load_object(target)
    if not callable(found):
        raise UnknownNameError(
            f"{target!r} must name a class or a function, got {type(found).__name__}"
        )
    return found


def wanted_arguments(function: Callable[..., Any], known: Mapping[str, Any]) -> frozenset[str]:
    """The known arguments that a function names in its signature; all of them if it takes
    **keywords.

    Raises:
        ValueError: it requires an argument that is not known.

    Example:
        >>> sorted(wanted_arguments(lambda text, turn: 0.0, {"text": "", "turn": 0, "info": {}}))
        ['text', 'turn']
    """
    wanted: set[str] = set()
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            return frozenset(known)
        if parameter.name in known:
            wanted.add(parameter.name)
        elif (
            parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL
        ):
            near = get_close_matches(parameter.name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            raise ValueError(
                f"{_origin(function)[1]} has an unknown argument {parameter.name!r}; {hint}"
            )
    return frozenset(wanted)


def _article(kind: str) -> str:
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"


def _origin(thing: object) -> tuple[str, str]:
    """Module and qualified name of a function or class; of another object, those of its class."""
    owner = thing if hasattr(thing, "__qualname__") else type(thing)
    return str(owner.__module__), str(getattr(owner, "__qualname__", ""))


def _attribute(module: Any, qualname: str) -> Any:
    found = module
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found


@cache
def _import_plugins() -> None:
    for point in entry_points(group=PLUGINS):
        importlib.import_module(point.value)


def _load_file(path: Path) -> Any:
    """The file as a module. It is loaded once, under a name that is the same in every process."""
    resolved = path.resolve()
    name = f"turnwise_file_{resolved.stem}_{derive_seed(0, resolved.as_posix()):x}"
    if name in sys.modules:
        return sys.modules[name]
    imported = sys.modules.get(resolved.stem)
    file = getattr(imported, "__file__", None)
    if file is not None and Path(file).resolve() == resolved:
        return imported  # a part that was given as an object is that object again
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


def line_of(error: BaseException) -> str:
    """ " (FILE, line N)": the last line of the user's code that an error came through, neither
    turnwise's nor a library's. Empty where there is none.

    Example:
        >>> line_of(KeyError("side"))
        ''
    """
    if issubclass(type(error), SyntaxError):
        return ""  # it names file and line itself
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not _is_library(frame.filename)]
    if not own:
        return ""
    path = shown = Path(own[-1].filename)
    with contextlib.suppress(OSError, ValueError):  # the folder is gone, or another one
        shown = path.relative_to(Path.cwd())
    return f" ({shown}, line {own[-1].lineno})"


def _is_library(filename: str) -> bool:
    folders = {Path(__file__).parent, Path(traceback.__file__).parent}
    path = Path(filename)
    inside = any(path.is_relative_to(folder) for folder in folders)
    return inside or "site-packages" in path.parts or filename.startswith("<")
