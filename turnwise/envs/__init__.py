"""Environments: the contract, registry, adapters and checks; tools/ for ToolEnv, games/ the games.
No tokens, no models. Names are imported on first use."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from turnwise.envs.adapters import as_env
    from turnwise.envs.base import BaseEnv, Env, EnvError
    from turnwise.envs.messages import Environment, MultiTurnEnv, SingleTurnEnv, ToolEnv
    from turnwise.envs.registry import list_envs, make, make_env, register
    from turnwise.envs.rubric import Rubric
    from turnwise.evaluate.check_env import check_env

__all__ = [
    "BaseEnv",
    "Env",
    "EnvError",
    "Environment",
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
    "as_env": "turnwise.envs.adapters",
    "BaseEnv": "turnwise.envs.base",
    "Env": "turnwise.envs.base",
    "EnvError": "turnwise.envs.base",
    "check_env": "turnwise.evaluate.check_env",
    "Environment": "turnwise.envs.messages",
    "MultiTurnEnv": "turnwise.envs.messages",
    "SingleTurnEnv": "turnwise.envs.messages",
    "ToolEnv": "turnwise.envs.messages",
    "list_envs": "turnwise.envs.registry",
    "make": "turnwise.envs.registry",
    "make_env": "turnwise.envs.registry",
    "register": "turnwise.envs.registry",
    "Rubric": "turnwise.envs.rubric",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'turnwise.envs' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
