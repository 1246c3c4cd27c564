"""GRPO on TRL with multi-turn environments. TRL is imported lazily. The core never imports
this package.

`VerifiersGRPOTrainer(model, env)` trains on TRL's GRPOTrainer: single-turn environments use TRL's
own rollout; all others are played by turnwise (AgentProxy, ContextManager) and passed to TRL as
token ids, masks and log-probs.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

_HOMES = {
    "EnvironmentRewardAdapter": "rewards",
    "MultiTurnMixin": "mixin",
    "VerifiersGRPOConfig": "config",
    "VerifiersGRPOTrainer": "trainer",
    "is_multi_turn_environment": "detect",
    "train": "run",
}
_NEED_TRL = {"MultiTurnMixin", "VerifiersGRPOConfig", "VerifiersGRPOTrainer"}

__all__ = list(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(
            f"module 'turnwise.integrations.trl' has no attribute {name!r}; it has "
            f"{', '.join(_HOMES)}"
        )
    if name in _NEED_TRL:
        require_trl(name)
    return getattr(import_module(f"turnwise.integrations.trl.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__


def require_trl(what: str) -> None:
    """Raises ImportError with the install command if TRL is not installed."""
    if find_spec("trl") is None:
        raise ImportError(
            f"{what} needs trl, which is not installed; run: pip install 'turnwise[trl]'"
        )
