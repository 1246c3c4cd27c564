# pyright: reportUnknownMemberType=false
"""Compiled decoder layers for scoring and for the update.

A layer of a small model launches dozens of small kernels. Compilation fuses norms, rotations,
activations and residuals into a few. All layers share the same code, so each kind of pass is
compiled once. Attention over packed rows stays one kernel inside a compiled layer.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn


class CompiledLayers:
    """Decoder layers that run compiled inside `on()` and uncompiled elsewhere, because the
    generator samples with the same modules. What torch cannot compile runs uncompiled, with torch's
    own warning.
    """

    def __init__(self, *modules: nn.Module | None) -> None:
        self._layers: list[Any] = [
            layer
            for module in modules
            if module is not None
            for layer in module.modules()
            if type(layer).__name__.endswith("DecoderLayer")
        ]
        self._calls = [torch.compile(layer._call_impl, dynamic=True) for layer in self._layers]

    @contextmanager
    def on(self) -> Generator[None]:
        """Forward and backward passes in this context are compiled."""
        import torch._dynamo as dynamo

        for layer, call in zip(self._layers, self._calls, strict=True):
            layer._compiled_call_impl = call
        try:
            with cast(Any, dynamo.config).patch(suppress_errors=True):
                yield
        finally:
            for layer in self._layers:
                layer._compiled_call_impl = None
