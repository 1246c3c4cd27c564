"""The trainers of all backends, and the classes that their users derive from, imported lazily. No
trainer is implemented here."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

_HOMES = {
    "PPOTrainer": ("turnwise.train.trainer", None),
    "Environment": ("turnwise.envs.messages", None),
    "EnvironmentRewardAdapter": ("turnwise.integrations.trl", None),
    "VerifiersGRPOTrainer": ("turnwise.integrations.trl", "trl"),
    "VerifiersGRPOConfig": ("turnwise.integrations.trl", "trl"),
    "MultiTurnMixin": ("turnwise.integrations.trl", "trl"),
    "AgentTrainer": ("turnwise.integrations.verl", "verl"),
    "CustomRayPPOTrainer": ("turnwise.integrations.verl", "verl"),
    "create_trainer": ("turnwise.integrations.verl", "verl"),
}

# Those that can be imported here, so that `import *` works without the other extras.
__all__ = [  # pyright: ignore[reportUnsupportedDunderAll]
    name for name, (_, extra) in _HOMES.items() if extra is None or find_spec(extra) is not None
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(
            f"module 'turnwise.trainers' has no attribute {name!r}; it has {', '.join(_HOMES)}"
        )
    module, extra = _HOMES[name]
    if extra is not None and find_spec(extra) is None:
        raise ImportError(
            f"{name} needs {extra}, which is not installed; run: pip install 'turnwise[{extra}]'"
        )
    return getattr(import_module(module), name)


def __dir__() -> list[str]:
    return list(_HOMES)
