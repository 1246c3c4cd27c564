"""The few functions of verl 0.9.1 that stand in the way, each replaced for one stated reason."""

import functools
from typing import Any


def patch_value_head() -> None:
    """verl's critic asks for flash-attention 2 whatever the model's config says, and blames a missing trl where that is
    not installed. The critic loads with the attention that the config names, else sdpa."""
    import verl.utils.model as target

    def load_valuehead_model(local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool) -> Any:
        from transformers import AutoModelForTokenClassification

        asked = getattr(model_config, "_attn_implementation", None)
        return AutoModelForTokenClassification.from_pretrained(
            local_path,
            dtype=torch_dtype,
            config=model_config,
            trust_remote_code=trust_remote_code,
            attn_implementation=asked or "sdpa",
        )

    target.load_valuehead_model = load_valuehead_model


def patch_trl() -> None:
    """verl imports a value-head model from any trl that is installed; trl 1.13 and later have none."""
    import verl.models.transformers.monkey_patch as target

    target.is_trl_available = lambda: False


def patch_process_group() -> None:
    """verl asks torch for "cpu:gloo,cpu:gloo" where the device is the CPU, which torch refuses as a duplicate."""
    import verl.utils.distributed as target

    original = target.initialize_global_process_group_ray

    @functools.wraps(original)
    def initialize(timeout_second: int | None = None, backend: str | None = None) -> None:
        original(timeout_second=timeout_second, backend=backend or "cpu:gloo")

    target.initialize_global_process_group_ray = initialize


def patch_vllm_on_cpu(target: Any) -> None:
    """vLLM on the CPU packs the weights of linear layers once and drops them, so that nobody can send it new ones. They
    stay as they are, multiplied by torch. `target` is vllm.model_executor.layers.utils."""

    def dispatch(layer: Any, remove_weight: bool) -> None:
        from torch.nn.functional import linear

        layer.cpu_linear = linear

    target.dispatch_cpu_unquantized_gemm = dispatch


def patch_sglang_on_cpu(target: Any) -> None:
    """SGLang sends new weights as handles to memory of a GPU, and its serializer fails on tensors that are not there.
    They are sent by value, from a process that need not share anything with the engine's. `target` is
    sglang.srt.weight_sync.utils."""
    import pickle

    import sglang.srt.utils.patch_torch as handles

    class ByValue:
        serialize = staticmethod(pickle.dumps)

    target.MultiprocessingSerializer = ByValue
    handles.monkey_patch_torch_reductions = lambda: None


def register_cpu_engines() -> None:
    """verl registers its FSDP engines for accelerators alone, and offloads a reference model into pinned memory, which
    needs one. The same engines, registered for the CPU, with nothing to offload."""
    import verl.workers.engine.fsdp.transformer_impl as target
    from verl.workers.engine import EngineRegistry

    target.CPUOffloadPolicy = lambda pin_memory=True: None
    for kind, engine in (("language_model", "FSDPEngineWithLMHead"), ("value_model", "FSDPEngineWithValueHead")):
        cls = type(f"CPU{engine}", (getattr(target, engine),), {"__module__": __name__})
        EngineRegistry.register(model_type=kind, backend="fsdp2", device="cpu")(cls)
