# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
"""Patches of verl 0.9.1, each with its reason."""

import functools
import importlib
from typing import Any

from turnwise.integrations.verl.config.sections import SECTION


def patch_value_head() -> None:
    """verl's critic asks for flash-attention 2 whatever the model's config says, and blames a
    missing trl where that is not installed. The critic loads with the attention that the config
    names, else sdpa.

    A new head starts at zero, as the native critic's does. verl leaves it random: the first values
    of Qwen2.5-Coder-1.5B were 2.8 on average where returns are below 1, and in four steps their
    noise took the policy from 25 to 9 % success."""
    import verl.utils.model as target

    def load_valuehead_model(
        local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool
    ) -> Any:
        from torch.nn import init
        from transformers import AutoModelForTokenClassification

        asked = getattr(model_config, "_attn_implementation", None)
        critic, loaded = AutoModelForTokenClassification.from_pretrained(
            local_path,
            dtype=torch_dtype,
            config=model_config,
            trust_remote_code=trust_remote_code,
            attn_implementation=asked or "sdpa",
            output_loading_info=True,
        )
        for name, parameter in critic.named_parameters():
            if name in loaded["missing_keys"]:
                init.zeros_(parameter)
        return critic

    target.load_valuehead_model = load_valuehead_model


def patch_trl() -> None:
    """verl imports a value-head model from any trl that is installed; trl 1.13 and later have
    none."""
    target: Any = importlib.import_module("verl.models.transformers.monkey_patch")
    target.is_trl_available = lambda: False


def refuse_other_trainers(base: Any, ours: type) -> None:
    """verl's own trainers (sync, colocate_async, separate_async) would take a config with our
    section and train without our credit, filters and records. They refuse it, before a worker
    starts. `base` is verl's PPOTrainer."""
    for cls in (base, *base.__subclasses__()):
        _guard(cls, ours)


def refuse_older_trainers(target: Any) -> None:
    """The same for the trainers that verl had before: RayPPOTrainer, and those derived from it
    wherever they are defined, such as one_step_off_policy's. `target` is
    verl.trainer.ppo.ray_trainer."""
    base = target.RayPPOTrainer

    def __init_subclass__(cls: type, **kwargs: Any) -> None:
        super(base, cls).__init_subclass__(**kwargs)
        _guard(cls)

    _guard(base)
    for cls in base.__subclasses__():
        _guard(cls)
    base.__init_subclass__ = classmethod(__init_subclass__)


def _guard(cls: Any, ours: type | None = None) -> None:
    """Makes a trainer refuse configs with our section, unless it is one of ours."""
    if "__init__" not in vars(cls):
        return
    original = cls.__init__

    @functools.wraps(original)
    def initialize(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        from omegaconf import DictConfig

        asked = isinstance(config, DictConfig) and config.get(SECTION) is not None
        if asked and (ours is None or not isinstance(self, ours)):
            raise ValueError(_NOT_OURS.format(name=type(self).__name__, section=SECTION))
        original(self, config, *args, **kwargs)

    cls.__init__ = initialize


_NOT_OURS = (
    "the config has a section {section}, but {name} is verl's own trainer, which knows nothing of "
    "it; set trainer.use_v1: true and trainer.v1.trainer_mode: {section}, and use "
    "verl.trainer.main_ppo. turnwise has no asynchronous trainer on verl 0.9.1: colocate_async, "
    "separate_async, one_step_off_policy and fully_async_policy sample with older weights, for "
    "which its credit and its ledger are not made"
)


LOGPROB_ROWS = 4096
"""Tokens whose logits are in float32 at a time."""


def patch_logprobs() -> None:
    """Without flash-attention verl computes log-probs row by row, in the dtype of the logits.
    With rows packed or flattened that is one kernel launch per token: 37 of 61 seconds of a step of
    SmolLM2-135M on an H200. Ours takes blocks of rows, in float32."""
    import verl.utils.torch_functional as target

    target.logprobs_from_logits_v2 = logprobs_in_blocks


def logprobs_in_blocks(logits: Any, labels: Any) -> Any:
    """Log-probs of the labels, [...] from logits [..., V], in float32. The softmax is recomputed
    in the backward pass, so that no block of it is kept."""
    import torch
    from torch.nn.functional import cross_entropy
    from torch.utils.checkpoint import checkpoint

    def block(rows: Any, wanted: Any) -> Any:
        return -cross_entropy(rows.float(), wanted, reduction="none")

    pairs = zip(
        logits.reshape(-1, logits.shape[-1]).split(LOGPROB_ROWS),
        labels.reshape(-1).split(LOGPROB_ROWS),
        strict=True,
    )
    found = [checkpoint(block, rows, wanted, use_reentrant=False) for rows, wanted in pairs]
    return torch.cat(found).view(labels.shape)


def patch_process_group() -> None:
    """verl asks torch for "cpu:gloo,cpu:gloo" where the device is the CPU, which torch refuses as a
    duplicate."""
    import verl.utils.distributed as target

    original = target.initialize_global_process_group_ray

    @functools.wraps(original)
    def initialize(timeout_second: int | None = None, backend: str | None = None) -> None:
        original(timeout_second=timeout_second, backend=backend or "cpu:gloo")

    target.initialize_global_process_group_ray = initialize


def patch_vllm_on_cpu(target: Any) -> None:
    """vLLM on the CPU packs the weights of linear layers once and drops them, so that they cannot
    be updated. The patch keeps them unpacked and multiplies with torch. `target` is
    vllm.model_executor.layers.utils."""

    def dispatch(layer: Any, remove_weight: bool) -> None:
        from torch.nn.functional import linear

        layer.cpu_linear = linear

    target.dispatch_cpu_unquantized_gemm = dispatch


def patch_sglang_on_cpu(target: Any) -> None:
    """SGLang sends new weights as handles to memory of a GPU, and its serializer fails on tensors
    that are not there. They are sent by value, from a process that need not share anything with the
    engine's. `target` is sglang.srt.weight_sync.utils."""
    import pickle

    handles: Any = importlib.import_module("sglang.srt.utils.patch_torch")

    class ByValue:
        serialize = staticmethod(pickle.dumps)

    target.MultiprocessingSerializer = ByValue
    handles.monkey_patch_torch_reductions = lambda: None


def register_cpu_engines() -> None:
    """verl registers its FSDP engines for accelerators alone, and offloads a reference model into
    pinned memory, which needs one. The same engines, registered for the CPU, with nothing to
    offload."""
    from verl.workers.engine import EngineRegistry

    target: Any = importlib.import_module("verl.workers.engine.fsdp.transformer_impl")
    target.CPUOffloadPolicy = lambda pin_memory=True: None
    for kind, engine in (
        ("language_model", "FSDPEngineWithLMHead"),
        ("value_model", "FSDPEngineWithValueHead"),
    ):
        cls = type(f"CPU{engine}", (getattr(target, engine),), {"__module__": __name__})
        EngineRegistry.register(model_type=kind, backend="fsdp2", device="cpu")(cls)
