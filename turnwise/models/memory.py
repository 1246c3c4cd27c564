# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""Estimates the device memory of a run before it starts, and chooses settings accordingly.

Weights, masters, Adam's moments, gradients, keys and values of the slots, activations per token and
a chunk of logits are counted from the model's shape. The remaining memory decides on gradient
checkpointing, the micro-batch size, and whether keys and values are freed during the update. If
nothing fits, the error says what to lower.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import nn

from turnwise.algos.algorithm import Algorithm
from turnwise.config.schema import Config, ModelConfig
from turnwise.models.policy import Precision
from turnwise.models.scoring import CHUNK_BYTES, CHUNK_ELEMENTS, CUDA_CHUNK_ELEMENTS
from turnwise.models.source import ask_hub, model_source

MAX_TOKENS = 65536
"""Upper limit of the micro-batch size; smaller ones already keep the device busy."""
ENOUGH_TOKENS = 8192
"""Micro-batches of this size keep a device busy. Memory is freed elsewhere only if they would be
smaller."""
RESERVE = 0.06
"""Share of the device's memory that is left for fragments, kernels' workspaces and captured
graphs."""

OTHERS_SHARE = 0.02
"""Of the device. A process that holds less, such as a desktop's, is not named."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """The parts of a model's architecture that memory depends on."""

    parameters: int
    trained: int
    """Parameters that learn: all, or the adapters."""
    trunk: int
    """Parameters without the output projection, as in a critic's own trunk."""
    layers: int
    hidden: int
    intermediate: int
    query: int
    """Query heads times their width."""
    key: int
    """Key heads times their width."""
    vocabulary: int
    context: int
    """Positions that the model can hold."""

    @classmethod
    def of(cls, model: nn.Module, *, rank: int = 0) -> "ModelShape":
        """The shape of a causal model (its weights may be on the meta device), with adapters of
        this rank."""
        settings: Mapping[str, Any] = cast(Any, model).config.get_text_config().to_dict()
        head: nn.Module = cast(Any, model).get_output_embeddings()
        counts = {id(parameter): parameter.numel() for parameter in model.parameters()}
        own = sum(p.numel() for p in cast(Any, model).get_decoder().parameters())
        linears = [m for m in model.modules() if isinstance(m, nn.Linear) and m is not head]
        heads = int(settings["num_attention_heads"])
        width = int(settings.get("head_dim") or settings["hidden_size"] // heads)
        hidden = int(settings["hidden_size"])
        return cls(
            parameters=sum(counts.values()),
            trained=rank * sum(m.in_features + m.out_features for m in linears)
            if rank
            else sum(counts.values()),
            trunk=own,
            layers=int(settings["num_hidden_layers"]),
            hidden=hidden,
            intermediate=int(settings.get("intermediate_size") or 4 * hidden),
            query=heads * width,
            key=int(settings.get("num_key_value_heads") or heads) * width,
            vocabulary=int(settings["vocab_size"]),
            context=int(settings.get("max_position_embeddings") or 4096),
        )

    def layer_bytes(self, size: int) -> int:
        """Activations that one layer keeps per token for the backward pass; `size` bytes per
        number.

        Norms keep float32 copies of their input, attention its heads before and after the rotation,
        the gated projection its four intermediates.
        """
        low = 4 * self.hidden + 3 * self.query + 3 * self.key + 4 * self.intermediate
        return size * low + (4 * 4 * self.hidden if size < 4 else 2 * 4 * self.hidden)

    def token_bytes(self, size: int, *, checkpointing: bool) -> int:
        """Activations per token of a pass: every layer's, or every layer's input and one
        layer's."""
        one = self.layer_bytes(size)
        kept = size * self.hidden * self.layers + one if checkpointing else one * self.layers
        return kept + 6 * 4 * self.hidden  # embeddings, the last norm, states and their gradients

    def cache_bytes(self, size: int, *, slots: int, context: int) -> int:
        """Keys and values of all slots."""
        return 2 * size * self.layers * self.key * (slots + 1) * (context + 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """The memory of a run, and the settings chosen so that it fits."""

    held: Mapping[str, int]
    """Bytes by name that are held throughout the update."""
    cache: int
    """Bytes of keys and values."""
    token: int
    """Bytes per token of a micro-batch."""
    micro_batch_tokens: int
    chunk_elements: int
    """Logits held at once in scoring."""
    gradient_checkpointing: bool
    free_cache: bool
    """Keys and values are freed before an update and allocated again after it."""
    budget: int | None
    """Bytes that the run may use. None: unknown (the CPU), and nothing is refused."""

    @property
    def rollout_bytes(self) -> int:
        """Bytes in use during a rollout."""
        lasting = ("weights", "float32 masters", "Adam's moments", "reserve")
        return sum(self.held[name] for name in lasting) + self.cache

    @property
    def update_bytes(self) -> int:
        """Peak bytes in use during an update."""
        kept = 0 if self.free_cache else self.cache
        return sum(self.held.values()) + kept + self.token * self.micro_batch_tokens

    def lines(self) -> list[str]:
        """The plan as a table."""
        rows = {**self.held, "keys and values": self.cache}
        rows[f"activations of {self.micro_batch_tokens} tokens"] = (
            self.token * self.micro_batch_tokens
        )
        found = [f"{name:36s} {_gib(size):>10s}" for name, size in rows.items()]
        found.append(
            f"{'most at once':36s} {_gib(max(self.update_bytes, self.rollout_bytes)):>10s}"
        )
        if self.budget is not None:
            found.append(f"{'free on the device':36s} {_gib(self.budget):>10s}")
        found.append(
            f"gradient checkpointing {'on' if self.gradient_checkpointing else 'off'}; keys and "
            "values "
            f"{'given back during updates' if self.free_cache else 'kept during updates'}"
        )
        return found


def plan_memory(
    shape: ModelShape,
    *,
    budget: int | None,
    dtype: torch.dtype,
    slots: int,
    context: int,
    critic: Literal["none", "separate", "shared"] = "none",
    reference: bool = False,
    micro_batch_tokens: int | Literal["auto"] = "auto",
    gradient_checkpointing: bool | Literal["auto"] = "auto",
    default_tokens: int = 16384,
) -> MemoryPlan:
    """The fastest plan that fits: keep everything; else recompute layers; else also free keys and
    values.

    Raises:
        ValueError: nothing fits. The message lists what takes the memory and what to lower.

    Example:
        >>> shape = ModelShape(parameters=135_000_000, trained=135_000_000, trunk=106_000_000,
        ...                    layers=30, hidden=576, intermediate=1536, query=576, key=192,
        ...                    vocabulary=49152, context=8192)
        >>> big = plan_memory(shape, budget=139 * 2**30, dtype=torch.bfloat16, slots=256,
        ...     context=1024)
        >>> big.gradient_checkpointing, big.micro_batch_tokens
        (False, 65536)
        >>> small = plan_memory(shape, budget=12 * 2**30, dtype=torch.bfloat16, slots=64,
        ...     context=1024)
        >>> small.gradient_checkpointing, small.free_cache
        (True, False)
    """
    size = torch.finfo(dtype).bits // 8
    logits = _chunk_elements(shape, budget)
    held = {
        **_weight_bytes(shape, size, separate_critic=critic == "separate", reference=reference),
        "logits of a chunk": logits * CHUNK_BYTES,
        "reserve": 0 if budget is None else int(RESERVE * budget),
    }
    cache = shape.cache_bytes(size, slots=slots, context=context)

    def plan(checkpointing: bool, free_cache: bool) -> MemoryPlan:
        # A separate critic's pass is kept beside the policy's until the one backward pass of both.
        passes = 2 if critic == "separate" else 1
        token = shape.token_bytes(size, checkpointing=checkpointing) * passes
        if micro_batch_tokens != "auto":
            tokens = micro_batch_tokens
        elif budget is None:
            tokens = default_tokens
        else:
            room = budget - sum(held.values()) - (0 if free_cache else cache)
            tokens = min(max(room // token // 256 * 256, 0), MAX_TOKENS)
        return MemoryPlan(
            held=held,
            cache=cache,
            token=token,
            micro_batch_tokens=tokens,
            chunk_elements=logits,
            gradient_checkpointing=checkpointing,
            free_cache=free_cache,
            budget=budget,
        )

    ways = [False, True] if gradient_checkpointing == "auto" else [gradient_checkpointing]
    plans = [plan(checkpointing, free) for free in (False, True) for checkpointing in ways]
    if budget is None:
        return plans[0]
    for enough in (max(ENOUGH_TOKENS, context), context):
        for found in plans:
            large = micro_batch_tokens != "auto" or found.micro_batch_tokens >= enough
            if large and max(found.update_bytes, found.rollout_bytes) <= budget:
                return found
    raise ValueError(_does_not_fit(plans[-1], context=context))


def _weight_bytes(
    shape: ModelShape, size: int, *, separate_critic: bool, reference: bool
) -> dict[str, int]:
    """Bytes of the networks and of what the optimizer keeps for them, by name."""
    trunk = shape.trunk if separate_critic else 0
    learns = shape.trained + trunk
    copies = shape.parameters * (2 if reference else 1) + trunk
    return {
        "weights": copies * size,
        "float32 masters": learns * 4 if size < 4 else 0,
        "Adam's moments": learns * 8,
        "gradients": learns * 4,
    }


def _chunk_elements(shape: ModelShape, budget: int | None) -> int:
    """Logits held at once in scoring: on a device, at most a tenth of the budget."""
    if budget is None:
        return min(CHUNK_ELEMENTS, shape.vocabulary * MAX_TOKENS)
    most = min(CUDA_CHUNK_ELEMENTS, shape.vocabulary * MAX_TOKENS)
    return max(min(most, budget // 10 // CHUNK_BYTES), CHUNK_ELEMENTS)


def _does_not_fit(plan: MemoryPlan, *, context: int) -> str:
    table = "\n  ".join(plan.lines())
    return (
        f"the run does not fit into the {_gib(plan.budget or 0)} that are free on the device, even "
        "with what could be "
        f"given up:\n  {table}\nA micro-batch must hold a row of {context} tokens. Lower "
        "rollout.max_context, "
        "rollout.slots or train.micro_batch_tokens; set model.gradient_checkpointing: auto or "
        "model.critic: shared; "
        "train adapters (model.lora.rank); or take a smaller model"
    )


def planned(config: Config, algorithm: Algorithm | None) -> tuple[MemoryPlan | None, Config]:
    """(plan, the config with its `auto` settings resolved by the plan). The embedded model needs no
    plan: None. Imitation has no algorithm, and so neither critic nor reference.

    Raises:
        ValueError: the run does not fit.
    """
    plan = None if config.model.path is None else plan_run(config, algorithm)
    checkpointing = (
        config.model.gradient_checkpointing is True if plan is None else plan.gradient_checkpointing
    )
    tokens = config.train.token_limit if plan is None else plan.micro_batch_tokens
    model = config.model.model_copy(update={"gradient_checkpointing": checkpointing})
    train = config.train.model_copy(update={"micro_batch_tokens": tokens})
    return plan, config.model_copy(update={"model": model, "train": train})


def plan_run(config: Config, algorithm: Algorithm | None) -> MemoryPlan:
    """The memory plan of a run, from its config and its model's config alone: no weight is read."""
    precision = Precision.choose(config.model.dtype, device=config.train.device)
    shape = ModelShape.of(meta_model(config.model), rank=config.model.lora.rank)
    critic = config.model.critic if algorithm and algorithm.needs_critic else "none"
    reference = bool(algorithm and algorithm.needs_reference and config.model.lora.rank == 0)
    try:
        return plan_memory(
            shape,
            budget=free_memory(precision.device),
            dtype=precision.dtype,
            slots=config.rollout.slots,
            context=min(config.rollout.max_context or shape.context, shape.context),
            critic=critic,
            reference=reference,
            micro_batch_tokens=config.train.micro_batch_tokens,
            gradient_checkpointing=config.model.gradient_checkpointing,
            default_tokens=config.train.token_limit,
        )
    except ValueError as error:
        raise ValueError(f"{error}{taken_by_others(precision.device)}") from None


def meta_model(config: ModelConfig) -> nn.Module:
    """The model's modules without their weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    source = str(model_source(config))
    ask_hub(source)
    gguf = {"gguf_file": config.gguf_file} if config.gguf_file else {}
    found = AutoConfig.from_pretrained(source, trust_remote_code=config.trust_remote_code, **gguf)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(found, trust_remote_code=config.trust_remote_code)


def free_memory(device: torch.device) -> int | None:
    """Device memory available to this process in bytes, including what torch has already
    reserved."""
    if device.type != "cuda":
        return None
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)


def taken_by_others(device: torch.device) -> str:
    """A line on what is not free, and not this process's either: nothing here makes room for it."""
    if device.type != "cuda":
        return ""
    total = torch.cuda.mem_get_info(device)[1]
    taken = total - (free_memory(device) or 0)
    if taken < OTHERS_SHARE * total:
        return ""
    return (
        f"\nOther processes hold {_gib(taken)} of the device's {_gib(total)} (see nvidia-smi); one "
        "that has just ended may take seconds to give it back"
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
