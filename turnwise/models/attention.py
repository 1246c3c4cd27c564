"""Routing a model's attention to another function for a while, and which models let one do that."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel

_KNOWN_LAYERS = {"full_attention", "sliding_attention"}


def attention_configs(*modules: nn.Module | None) -> list[Any]:
    """The configs that decide which attention function the modules' transformers models call, each once."""
    found: list[Any] = []
    for module in modules:
        for inner in module.modules() if module is not None else ():
            if isinstance(inner, PreTrainedModel) and not any(inner.config is known for known in found):
                found.append(inner.config)
    return found


@contextmanager
def routed(configs: Sequence[Any], name: str) -> Generator[None]:
    """The models with these configs call the attention function registered as `name`, and afterwards their own again:
    sampler and trainer use the same modules, each with its own attention.

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
    """The transformers model in a module, itself or what a wrapper holds."""
    return next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)


def unroutable(model: nn.Module) -> str | None:
    """Why this model's attention cannot be replaced, as far as its class and config say; None where it can."""
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
