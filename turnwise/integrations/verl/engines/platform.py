"""A platform for verl on which there is no accelerator: gloo between ranks, no memory to count, logical GPUs in Ray."""

import types
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry, set_platform

_FREE_BYTES = 8 << 30  # what verl's memory reports show; nothing is decided by it


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _device_module() -> types.ModuleType:
    """A namespace of the shape of torch.cuda, for code that asks the device about memory, streams and seeds."""
    module = types.ModuleType("turnwise_verl_cpu")
    constants: dict[str, Any] = {
        "is_available": True,
        "current_device": "cpu",
        "device_count": 1,
        "memory_allocated": 0,
        "memory_reserved": 0,
        "max_memory_allocated": 0,
        "max_memory_reserved": 0,
        "mem_get_info": (_FREE_BYTES, _FREE_BYTES),
        "get_device_name": "cpu",
        "get_device_capability": (None, None),
        "is_bf16_supported": True,
    }
    for name, value in constants.items():
        setattr(module, name, lambda *_, _value=value, **__: _value)
    for name in ("set_device", "synchronize", "empty_cache", "ipc_collect", "reset_peak_memory_stats"):
        setattr(module, name, _nothing)
    module.manual_seed = module.manual_seed_all = torch.manual_seed
    module.get_rng_state = lambda *_, **__: torch.get_rng_state()
    module.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    return module


@PlatformRegistry.register(platform="cpu")
class CPUPlatform(PlatformBase):
    """The platform of machines without an accelerator."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _device_module()

    def is_available(self) -> bool:
        return True

    def current_device(self) -> str:
        return "cpu"  # callers write tensor.to(current_device())

    def device_count(self) -> int:
        return 1

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def ray_resource_name(self) -> str:
        return "GPU"  # a logical resource: ray.init(num_gpus=N) needs no hardware, and verl's placement works unchanged

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None

    @contextmanager
    def nvtx_range(self, msg: str) -> Generator[None]:
        yield

    def set_device(self, device_index: Any) -> None: ...
    def synchronize(self, device_index: Any = None) -> None: ...
    def set_allocator_settings(self, settings: str) -> None: ...
    def empty_cache(self) -> None: ...
    def profiler_start(self) -> None: ...
    def profiler_stop(self) -> None: ...


def on_cpu() -> bool:
    """True where no accelerator that verl knows is to be had, in this process or on this machine."""
    known = [PlatformRegistry.get(name) for name in PlatformRegistry.registered_names() if name != "cpu"]
    return not torch.cuda.is_available() and not any(
        platform is not None and platform().is_platform_available(use_smi_check=True) for platform in known
    )


def use_cpu_where_alone() -> bool:
    """True where there was no accelerator, and verl now runs on the CPU."""
    if not on_cpu():
        return False
    set_platform(CPUPlatform())
    return True
