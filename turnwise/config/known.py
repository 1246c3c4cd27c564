"""Checksums of the configs that turnwise stored for this user on this machine, and of the code that
they named then.

A run's config may name code. Code of the user's own runs may be loaded; code of a run from
elsewhere may not. The origin of a folder cannot be seen, so checksums of configs are kept in a file
that only the user writes: `$XDG_STATE_HOME/turnwise/configs`, or `~/.local/state/turnwise/configs`.

A relative name leads to another file in another folder. So each config is kept with the folder that
it was stored from, and with the resolved path and the digest of every file that it named there.
"""

import contextlib
import hashlib
import importlib.util
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import yaml

from turnwise.config.yaml_io import parse_yaml

_KEPT = 10_000
_INSTALLED = ("site-packages", "dist-packages")


def remember(text: str) -> None:
    """Records a config that was just stored, and what it names. If that fails, loading its code
    needs --trust later."""
    with contextlib.suppress(OSError):
        facts = {"", _here()}
        for value in _texts(text):
            facts |= {fact for place in _places(value) for fact in _facts(place)}
        lines = _lines()
        new = sorted({_sum(text, fact) for fact in facts}.difference(lines))
        if not new:
            return
        place = _file()
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if len(lines) >= 2 * _KEPT:
            beside = place.with_name(f"configs.{os.getpid()}")
            beside.write_text("".join(f"{line}\n" for line in lines[-_KEPT:]), encoding="ascii")
            beside.replace(place)
        with place.open("a", encoding="ascii") as file:
            file.write("".join(f"{line}\n" for line in new))


def is_known(text: str) -> bool:
    """True if exactly this text was recorded."""
    return _sum(text) in _lines()


def is_known_code(text: str, name: str, *, command: bool = False) -> bool:
    """True if the name leads to the code that it led to when this text was recorded: to files at
    the same place, or with the same content. A command depends on its folder."""
    lines = set(_lines())
    try:
        places = [{_here()}] if command else [_facts(p) for p in _places(name)]
        return all(any(_sum(text, fact) in lines for fact in facts) for facts in places)
    except OSError:  # a file cannot be read, or the current folder is gone
        return False


def _texts(text: str) -> Iterator[str]:
    """Every text in a config."""
    try:
        waiting: list[Any] = [parse_yaml(text)]
    except yaml.YAMLError:
        return
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            waiting += cast(dict[Any, Any], value).values()
        elif isinstance(value, list):
            waiting += cast(list[Any], value)


def _places(name: str) -> Iterator[Path]:
    """The files and folders that a name may lead to, as seen from the current folder and sys.path.
    Absolute paths are left out: the config's text has them."""
    where = name.rpartition(":")[0]
    pieces = {piece for word in name.replace("=", " ").split() for piece in word.split(":")}
    dotted = {piece for piece in where.split(":") if piece.replace(".", "").isidentifier()}
    modules = {piece.partition(".")[0] for piece in dotted}
    # A process that looks for modules in the current folder finds these.
    pieces |= modules | {f"{module}.py" for module in modules}
    for piece in {name, where, where.partition(":")[2], *pieces}:
        path = Path(piece.strip("'\""))
        if path.parts and not path.is_absolute() and os.path.exists(path):
            yield path.resolve()
    yield from filter(None, map(_module, modules))


def _module(name: str) -> Path | None:
    """Where a module is that would be imported from neither an installed package nor Python's own
    library."""
    try:
        spec = importlib.util.find_spec(name)  # of a top-level module: this runs no code
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    folders = list(spec.submodule_search_locations or ())
    found = spec.origin if spec.has_location else next(iter(folders), None)
    if found is None:
        return None
    place = Path(found).resolve()
    library = Path(sysconfig.get_path("stdlib")).resolve()
    ours = Path(__file__).resolve().parents[1]
    installed = place.is_relative_to(library) or place.is_relative_to(ours)
    return None if installed or set(_INSTALLED).intersection(place.parts) else place


def _facts(place: Path) -> set[str]:
    facts = {f"path {place}"}
    if place.suffix == ".py" and place.is_file() and place.name != "__init__.py":
        facts.add(f"code {hashlib.sha256(place.read_bytes()).hexdigest()}")
    return facts


def _here() -> str:
    return f"from {Path.cwd()}"


def _lines() -> list[str]:
    try:
        return _file().read_text(encoding="ascii", errors="replace").split()
    except OSError:
        return []


def _file() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "turnwise" / "configs"


def _sum(text: str, fact: str = "") -> str:
    whole = f"{text}\0{fact}" if fact else text
    return hashlib.sha256(whole.encode(errors="surrogateescape")).hexdigest()
