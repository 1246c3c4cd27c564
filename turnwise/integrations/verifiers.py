"""Environments of verifiers behind turnwise's protocol: those of 0.3.1 and before, and the tasksets of 0.4."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from turnwise.envs.base import Env
from turnwise.types import Json

Source = tuple[Callable[[], Env], dict[str, Sequence[Mapping[str, Json]] | None]]


def is_legacy_environment(env: object) -> bool:
    """True for an environment of verifiers 0.3.1 or before."""
    return _derives(env, "Environment")


def is_taskset(env: object) -> bool:
    """True for a taskset of verifiers 0.4."""
    return _derives(env, "Taskset")


def _derives(env: object, name: str) -> bool:
    return any(cls.__name__ == name and cls.__module__.partition(".")[0] == "verifiers" for cls in type(env).__mro__)


def legacy_source(env: Any) -> Source:
    raise NotImplementedError


def taskset_source(env: Any) -> Source:
    raise NotImplementedError
