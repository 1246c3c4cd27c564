# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
"""`model.gradient_checkpointing: auto` where verl or TRL trains."""

import torch

from turnwise.algos.algorithm import Algorithm
from turnwise.config.schema import Config
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
    device: str,
    tokens: int,
    ranks: int = 1,
    copy: bool = False,
    taken: float = 0.0,
    budget: int | None = None,
) -> bool:
    """Whether layers are run again in the backward pass: as `model.gradient_checkpointing` says,
    and with `auto` where activations would not fit beside a rank's share of the training state.

    Args:
        device: "cpu", or what a rank trains on.
        tokens: of a micro-batch.
        ranks: that share the training state.
        copy: the weights are there once more during an update.
        taken: share of the device that another engine holds.
        budget: bytes of a rank's device. None: what this machine's has. A driver without a GPU
            cannot know, and takes the safe way, which is verl's default too.
    """
    asked = config.model.gradient_checkpointing
    if asked != "auto":
        return asked
    if device == "cpu" or config.model.path is None:
        return False
    if budget is None and torch.cuda.is_available():
        # mem_get_info would take half a gigabyte of the device for this process.
        budget = int(torch.cuda.get_device_properties(0).total_memory)
    if budget is None:
        return True
    shape = ModelShape.of(meta_model(config.model), rank=config.model.lora.rank)
    size = 4 if config.model.dtype == "float32" else 2
    learns = shape.trained + (shape.trunk if algorithm.needs_critic else 0)
    frozen = shape.parameters * (algorithm.needs_reference + (config.model.lora.rank > 0))
    state = (learns * _STATE_BYTES + frozen * _FROZEN_BYTES) // ranks
    copied = shape.parameters * size if copy else 0
    passes = tokens * shape.token_bytes(size, checkpointing=False)
    logits = tokens * shape.vocabulary * size * _LOGITS
    return state + copied + passes + logits > budget * (1 - RESERVE - taken)
