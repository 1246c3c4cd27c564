# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportUnknownMemberType=false
"""A CPU platform for verl: gloo between ranks, no device memory, logical GPUs in Ray."""

import os
import types
from contextlib import nullcontext
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry, get_platform, set_platform

from turnwise.integrations.verl.config.require import PLATFORM

CPU = "cpu"
"""Our value of VERL_PLATFORM."""
_FREE_BYTES = 8 << 30  # shown in verl's memory reports, otherwise unused


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _device_module() -> types.ModuleType:
    """A namespace of the shape of torch.cuda, for code that asks the device about memory, streams
    and seeds."""
    module: Any = types.ModuleType("turnwise_verl_cpu")
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
    for name in (
        "set_device",
        "synchronize",
        "empty_cache",
        "ipc_collect",
        "reset_peak_memory_stats",
    ):
        setattr(module, name, _nothing)
    module.manual_seed = module.manual_seed_all = torch.manual_seed
    module.get_rng_state = lambda *_, **__: torch.get_rng_state()
    module.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    return module


class CPUPlatform(PlatformBase):
    """The platform of machines without an accelerator."""

    # verl declares these three as properties.
    device_name: Any = "cpu"  # pyright: ignore[reportIncompatibleMethodOverride]
    vendor_name: Any = "cpu"  # pyright: ignore[reportIncompatibleMethodOverride]
    device_module: Any = _device_module()  # pyright: ignore[reportIncompatibleMethodOverride]

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
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
        # A logical resource: ray.init(num_gpus=N) needs no hardware, and verl's placement works
        # unchanged.
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None

    def nvtx_range(self, msg: str) -> Any:
        return nullcontext()

    def set_device(self, device_index: Any) -> None: ...
    def synchronize(self, device_index: Any = None) -> None: ...
    def set_allocator_settings(self, settings: str) -> None: ...
    def empty_cache(self) -> None: ...
    def profiler_start(self) -> None: ...
    def profiler_stop(self) -> None: ...


def is_asked_for() -> bool:
    """True if this process is to run on the CPU: verl's own variable says so, which the driver sets
    for every process of a run. What this machine has does not count: a driver may have no GPU."""
    return os.environ.get(PLATFORM, "").strip().lower() == CPU


def use_platform(device: str) -> None:
    """Makes verl run on `device` in this process: on the CPU, or on what verl finds by itself."""
    if device == CPU:
        PlatformRegistry.register(platform=CPU)(CPUPlatform)
        if not isinstance(get_platform(), CPUPlatform):
            set_platform(CPUPlatform())
    elif isinstance(get_platform(), CPUPlatform):
        accelerator = PlatformRegistry.get("nvidia")
        assert accelerator is not None
        set_platform(accelerator())
