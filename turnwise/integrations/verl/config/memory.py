# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
"""`model.gradient_checkpointing: auto` on verl: on where the activations would not fit beside a
rank's share of the training state."""

import torch

from turnwise.algos.algorithm import Algorithm
from turnwise.config.schema import Config
from turnwise.integrations.verl.config.placement import Placement
from turnwise.models.memory import RESERVE, ModelShape, meta_model

_STATE_BYTES = 16
"""Per trained parameter, sharded over the ranks: float32 weight, gradient and two moments."""
_FROZEN_BYTES = 4
_LOGITS = 3
"""Copies of a micro-batch's logits: themselves, their gradient, a block in float32."""


def recomputes(
    config: Config,
    algorithm: Algorithm,
    *,
    placement: Placement,
    tokens: int,
    engine: str,
    budget: int | None = None,
) -> bool:
    """True where layers are run again in the backward pass.

    Args:
        tokens: of a micro-batch.
        budget: bytes of a rank's device. None: what this machine's has. A driver without a GPU
            cannot know, and takes the safe way, which is verl's default too.
    """
    asked = config.model.gradient_checkpointing
    if asked != "auto":
        return asked
    if placement.device == "cpu" or config.model.path is None:
        return False
    if budget is None and torch.cuda.is_available():
        budget = int(torch.cuda.get_device_properties(0).total_memory)
    if budget is None:
        return True
    shape = ModelShape.of(meta_model(config.model), rank=config.model.lora.rank)
    size = 4 if config.model.dtype == "float32" else 2
    learns = shape.trained + (shape.trunk if algorithm.needs_critic else 0)
    frozen = shape.parameters * (algorithm.needs_reference + (config.model.lora.rank > 0))
    state = (learns * _STATE_BYTES + frozen * _FROZEN_BYTES) // placement.ranks
    copy = shape.parameters * size if engine == "hf" else 0  # other engines sleep in an update
    passes = tokens * (shape.token_bytes(size, checkpointing=False))
    logits = tokens * shape.vocabulary * size * _LOGITS
    return state + copy + passes + logits > budget * (1 - RESERVE)
