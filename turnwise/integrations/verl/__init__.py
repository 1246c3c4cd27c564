"""turnwise on verl: our environments, rollout and credit inside verl's trainer, workers, engines
and checkpoints.

verl, Ray and torch are imported lazily. The core never imports this package.
"""

from importlib import import_module
from typing import Any

_EXPORTS = {
    "AgentTrainer": "trainer.agent_trainer",
    "CustomEnvironmentDataset": "trainer.custom",
    "CustomRayPPOTrainer": "trainer.custom",
    "EnvironmentRewardWrapper": "trainer.custom",
    "batch_from_dataproto": "rollout.convert",
    "batch_from_tensordict": "rollout.convert",
    "batch_to_dataproto": "rollout.convert",
    "batch_to_tensordict": "rollout.convert",
    "create_trainer": "trainer.custom",
    "train": "trainer.run",
}

__all__ = sorted(_EXPORTS)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)
