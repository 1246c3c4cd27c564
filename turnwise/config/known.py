"""Checksums of the configs that turnwise stored for this user on this machine.

A run's config may name code. Code of the user's own runs may be loaded; code of a run from
elsewhere may not. The origin of a folder cannot be seen, so checksums of configs are kept in a file
that only the user writes: `$XDG_STATE_HOME/turnwise/configs`, or `~/.local/state/turnwise/configs`.
"""

import contextlib
import hashlib
import os
from pathlib import Path

_KEPT = 10_000


def remember(text: str) -> None:
    """Records a config that was just stored. If that fails, loading its code needs --trust
    later."""
    if is_known(text):
        return
    with contextlib.suppress(OSError):
        place = _file()
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lines = _lines()
        if len(lines) >= 2 * _KEPT:
            beside = place.with_name(f"configs.{os.getpid()}")
            beside.write_text("".join(f"{line}\n" for line in lines[-_KEPT:]), encoding="ascii")
            beside.replace(place)
        with place.open("a", encoding="ascii") as file:
            file.write(f"{_sum(text)}\n")


def is_known(text: str) -> bool:
    """True if exactly this text was recorded."""
    return _sum(text) in _lines()


def _lines() -> list[str]:
    try:
        return _file().read_text(encoding="ascii", errors="replace").split()
    except OSError:
        return []


def _file() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "turnwise" / "configs"


def _sum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
