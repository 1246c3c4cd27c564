"""Environments of verifiers behind turnwise's protocol: those of 0.3.1 and before, and the tasksets
of 0.4. The core never imports it."""

from importlib import import_module
from typing import Any

_EXPORTS = ("TasksetEnv", "is_legacy_environment", "is_taskset", "verifiers_source")
__all__ = list(_EXPORTS)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.environments"), name)
