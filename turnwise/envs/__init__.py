"""Environments: what a user writes against, and how one is made. Names are imported when first used."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from turnwise.envs.adapt import as_env
    from turnwise.envs.base import BaseEnv, Env, EnvError
    from turnwise.envs.check import check_env
    from turnwise.envs.messages import MultiTurnEnv, SingleTurnEnv, ToolEnv
    from turnwise.envs.registry import list_envs, make, make_env, register
    from turnwise.envs.rubric import Rubric

__all__ = [
    "BaseEnv",
    "Env",
    "EnvError",
    "MultiTurnEnv",
    "Rubric",
    "SingleTurnEnv",
    "ToolEnv",
    "as_env",
    "check_env",
    "list_envs",
    "make",
    "make_env",
    "register",
]

_HOMES = {
    "as_env": "adapt",
    "BaseEnv": "base",
    "Env": "base",
    "EnvError": "base",
    "check_env": "check",
    "MultiTurnEnv": "messages",
    "SingleTurnEnv": "messages",
    "ToolEnv": "messages",
    "list_envs": "registry",
    "make": "registry",
    "make_env": "registry",
    "register": "registry",
    "Rubric": "rubric",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'turnwise.envs' has no attribute {name!r}")
    return getattr(importlib.import_module(f"turnwise.envs.{_HOMES[name]}"), name)
