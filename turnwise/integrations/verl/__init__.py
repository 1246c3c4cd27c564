"""turnwise on verl: our environments, rollout and credit inside verl's trainer, workers, engines and checkpoints.

Nothing here imports verl, Ray or torch before it is used.
"""

from importlib import import_module
from typing import Any

_EXPORTS = {
    "AgentTrainer": "trainer",
    "CustomEnvironmentDataset": "custom",
    "CustomRayPPOTrainer": "custom",
    "EnvironmentRewardWrapper": "custom",
    "batch_from_dataproto": "convert",
    "batch_from_tensordict": "convert",
    "batch_to_dataproto": "convert",
    "batch_to_tensordict": "convert",
    "create_trainer": "custom",
    "train": "run",
}

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)
