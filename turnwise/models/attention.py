# pyright: reportUnknownMemberType=false
"""Temporarily replaces a model's attention function, and says which models allow it."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel

_KNOWN_LAYERS = {"full_attention", "sliding_attention"}


def attention_configs(*modules: nn.Module | None) -> list[Any]:
    """The distinct configs that select the attention function of the modules' transformers
    models."""
    found: list[Any] = []
    for module in modules:
        for inner in module.modules() if module is not None else ():
            if isinstance(inner, PreTrainedModel) and not any(
                inner.config is known for known in found
            ):
                found.append(inner.config)
    return found


@contextmanager
def routed(configs: Sequence[Any], name: str) -> Generator[None]:
    """Within the context, models with these configs call the attention function registered as
    `name`; afterwards their previous one. Sampler and trainer share modules and need different
    attention.

    Example:
        >>> from turnwise.testing.tiny import tiny_model
        >>> (config,) = attention_configs(tiny_model())
        >>> with routed([config], "eager"):
        ...     config._attn_implementation
        'eager'
        >>> config._attn_implementation
        'sdpa'
    """
    before = [config._attn_implementation for config in configs]
    for config in configs:
        config._attn_implementation = name
    try:
        yield
    finally:
        for config, implementation in zip(configs, before, strict=True):
            config._attn_implementation = implementation


def inner_model(model: nn.Module) -> PreTrainedModel | None:
    """The transformers model in a module: the module itself, or the model that it wraps."""
    return next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)


def unroutable(model: nn.Module) -> str | None:
    """The reason why this model's attention cannot be replaced, from its class and config; None if
    it can."""
    inner = inner_model(model)
    if inner is None:
        return "it is not a transformers model"
    if inner._is_stateful:  # pyright: ignore[reportPrivateUsage]
        return "it is recurrent"
    if not inner._supports_attention_backend:  # pyright: ignore[reportPrivateUsage]
        return "its attention does not go through transformers' attention interface"
    kinds: list[str] = inner.config.get_text_config().to_dict().get("layer_types") or []
    if strange := sorted(set(kinds) - _KNOWN_LAYERS):
        return f"it has layers of kind {strange}"
    return None
