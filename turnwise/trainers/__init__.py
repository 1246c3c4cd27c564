"""Trainers of every backend under one roof. Each is imported when it is first used."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

_HOMES = {
    "PPOTrainer": ("turnwise.train.trainer", None),
    "VerifiersGRPOTrainer": ("turnwise.integrations.trl", "trl"),
    "VerifiersGRPOConfig": ("turnwise.integrations.trl", "trl"),
    "MultiTurnMixin": ("turnwise.integrations.trl", "trl"),
    "AgentTrainer": ("turnwise.integrations.verl", "verl"),
    "CustomRayPPOTrainer": ("turnwise.integrations.verl", "verl"),
    "create_trainer": ("turnwise.integrations.verl", "verl"),
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'turnwise.trainers' has no attribute {name!r}; it has {', '.join(_HOMES)}")
    module, extra = _HOMES[name]
    if extra is not None and find_spec(extra) is None:
        raise ImportError(f"{name} needs {extra}, which is not installed; run: pip install 'turnwise[{extra}]'")
    return getattr(import_module(module), name)


def __dir__() -> list[str]:
    return __all__
