"""Decoder layers, compiled for scoring and for the update.

A layer of a small model is dozens of passes over its activations that each do next to nothing. Compiled, norms,
rotations, activations and residuals melt into a few; all layers share the same code, so it is compiled once per kind
of pass. Attention over packed rows is one kernel in the middle of a compiled layer.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn


class CompiledLayers:
    """The decoder layers of some networks, which run compiled inside `on()` and as they are elsewhere: the generator
    samples with the same modules in between.

    What the compiler cannot do runs uncompiled, with torch's own warning.
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
        """Passes in here are compiled, backward passes included."""
        import torch._dynamo as dynamo

        for layer, call in zip(self._layers, self._calls, strict=True):
            layer._compiled_call_impl = call
        try:
            with cast(Any, dynamo.config).patch(suppress_errors=True):
                yield
        finally:
            for layer in self._layers:
                layer._compiled_call_impl = None
