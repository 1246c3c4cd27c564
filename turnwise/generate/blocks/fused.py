# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
"""A forward pass for the Llama family with fused kernels, on the model's own weights, without a
compiler.

transformers' modules launch about twenty kernels per layer, which dominates the time of a small
model. Here a layer is four matrix products and five kernels around them. Weights that are
multiplied together are moved into one tensor once, and the model's parameters become views of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from turnwise.generate.blocks import ops
from turnwise.generate.blocks.cache import PackedCache, View

FAMILY = {"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM"}
ROPES = {"default", "linear", "llama3"}
"""Rotary embeddings whose angles depend on the position alone."""


@dataclass(kw_only=True, slots=True)
class _Joined:
    """Linear layers merged into one product: views of one weight, and of one bias if they have
    any."""

    weight: Tensor  # [sum of outputs, H]
    bias: Tensor | None

    def __call__(self, hidden: Tensor) -> Tensor:
        return functional.linear(hidden, self.weight, self.bias)


@dataclass(kw_only=True, slots=True)
class _Layer:
    first_norm: Tensor
    qkv: _Joined
    query_norm: Tensor | None
    key_norm: Tensor | None
    out: nn.Linear
    second_norm: Tensor
    gate_up: _Joined
    down: nn.Linear
    window: int


class FusedModel:
    """The forward pass of one model. `of` says whether it has one.

    Example:
        >>> from turnwise.testing.tiny import tiny_model
        >>> [FusedModel.of(tiny_model(kind), length=32) is not None for kind in ("qwen3", "gemma2")]
        [True, False]
    """

    def __init__(self, model: nn.Module, *, length: int) -> None:
        inner: Any = cast(Any, model).model
        config: Any = inner.config
        attention: Any = inner.layers[0].self_attn
        self.dim = int(attention.head_dim)
        self.heads = int(config.num_attention_heads)
        self.kv_heads = int(config.num_key_value_heads)
        self.scale = float(attention.scaling)
        self.eps = float(config.rms_norm_eps)
        self.embedding = cast(Tensor, inner.embed_tokens.weight)
        self.head = cast(nn.Linear, cast(Any, model).lm_head)
        self.final_norm = cast(Tensor, inner.norm.weight)
        self.layers = [_layer(layer, length=length) for layer in inner.layers]
        with torch.no_grad():
            positions = torch.arange(length + 1, device=self.embedding.device)[None]
            cos, sin = inner.rotary_emb(self.embedding[:1][None], position_ids=positions)
        half = self.dim // 2
        self.cos, self.sin = (
            cos[0, :, :half].contiguous(),
            sin[0, :, :half].contiguous(),
        )  # [length + 1, D / 2]

    @classmethod
    def of(cls, model: nn.Module, *, length: int) -> "FusedModel | None":
        """The fused pass of this model, or None if it is not of the Llama family or was modified
        (adapters, quantisation)."""
        if type(model).__name__ not in FAMILY:
            return None
        inner: Any = cast(Any, model).model
        config: Any = inner.config
        if config.rope_parameters["rope_type"] not in ROPES or config.hidden_act != "silu":
            return None
        linears = [
            module
            for layer in inner.layers
            for part in (layer.self_attn, layer.mlp)
            for module in part.children()
            if not type(module).__name__.endswith(("RMSNorm", "SiLUActivation", "SiLU"))
        ]
        if not all(type(module) is nn.Linear for module in (*linears, cast(Any, model).lm_head)):
            return None
        if len({parameter.dtype for parameter in model.parameters()}) > 1:
            return None
        return cls(model, length=length)

    def allocate(self, cache: PackedCache) -> None:
        """The cache's memory, before the first pass."""
        cache.allocate(
            layers=len(self.layers), heads=self.kv_heads, dim=self.dim, like=self.embedding
        )

    def __call__(
        self, tokens: Tensor, positions: Tensor, cache: PackedCache, view: View, keep: Tensor | None
    ) -> Tensor:
        """Logits [R, V] of the kept tokens (all, where None) of tokens [N] at `positions`."""
        residual = functional.embedding(tokens, self.embedding)  # [N, H]
        added: Tensor | None = None
        for index, layer in enumerate(self.layers):
            residual, hidden = ops.add_norm(residual, added, layer.first_norm, eps=self.eps)
            keys, values = cache.keys[index], cache.values[index]
            query = ops.rope_write(
                layer.qkv(hidden),
                cos=self.cos,
                sin=self.sin,
                positions=positions,
                rows=view.rows,
                write=view.write,
                keys=keys,
                values=values,
                heads=self.heads,
                query_norm=layer.query_norm,
                key_norm=layer.key_norm,
                eps=self.eps,
            )  # [N, heads, D]
            seen = ops.attend(
                query,
                keys,
                values,
                view.block_rows,
                view.block_at,
                view.block_first,
                view.block_count,
                view.holders,
                view.shared,
                view.block,
                self.scale,
                layer.window,
                0.0,
            )
            attended = layer.out(seen.reshape(seen.shape[0], -1))
            residual, hidden = ops.add_norm(residual, attended, layer.second_norm, eps=self.eps)
            added = layer.down(ops.silu_mul(layer.gate_up(hidden)))
        _, hidden = ops.add_norm(residual, added, self.final_norm, eps=self.eps)
        return self.head(hidden if keep is None else hidden[keep])


def _layer(layer: Any, *, length: int) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    norms = dict(attention.named_children())
    window = vars(attention).get("sliding_window") or 0
    # Its attention reads the config in the forward pass.
    if window == 0 and type(layer).__name__.startswith("Mistral"):
        window = attention.config.sliding_window or 0
    return _Layer(
        first_norm=layer.input_layernorm.weight,
        qkv=_join([attention.q_proj, attention.k_proj, attention.v_proj]),
        query_norm=norms["q_norm"].weight if "q_norm" in norms else None,
        key_norm=norms["k_norm"].weight if "k_norm" in norms else None,
        out=attention.o_proj,
        second_norm=layer.post_attention_layernorm.weight,
        gate_up=_join([mlp.gate_proj, mlp.up_proj]),
        down=mlp.down_proj,
        window=window if window < length else 0,
    )


@torch.no_grad()
def _join(linears: Sequence[nn.Linear]) -> _Joined:
    """Merges the layers. Their parameters remain the same objects and become views of the merged
    tensor."""
    weight = _adjacent([cast(nn.Parameter, linear.weight) for linear in linears])
    biases = [cast("nn.Parameter | None", linear.bias) for linear in linears]
    given = [bias for bias in biases if bias is not None]
    return _Joined(weight=weight, bias=_adjacent(given) if given else None)


def _adjacent(parameters: Sequence[nn.Parameter]) -> Tensor:
    sizes = [parameter.shape[0] for parameter in parameters]
    ends = [p.data_ptr() + p.numel() * p.element_size() for p in parameters]
    starts = [p.data_ptr() for p in parameters]
    if starts[1:] == ends[:-1] and len({p.untyped_storage().data_ptr() for p in parameters}) == 1:
        first = parameters[0].data  # joined by an earlier generator
        return first.as_strided((sum(sizes), *first.shape[1:]), first.stride())
    joined = torch.cat([parameter.data for parameter in parameters])
    for parameter, part in zip(parameters, joined.split(sizes), strict=True):
        parameter.data = part
    return joined
