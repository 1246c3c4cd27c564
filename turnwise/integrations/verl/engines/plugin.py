"""Loaded by verl in every process of a run (VERL_USE_EXTERNAL_MODULES): makes our parts known to
verl's registries.

The trainer costs a long import that only a driver needs, so it is registered when verl's own
trainers are imported.
"""

import importlib
import os
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from turnwise.integrations.verl.config.require import require_verl

require_verl()

from turnwise.integrations.verl.engines import attention, patches, platform  # noqa: E402
from turnwise.integrations.verl.trainer import losses  # noqa: E402

_HF = "turnwise.integrations.verl.engines.hf_server"
_TRAINERS = "verl.trainer.ppo.v1"
_OURS = "turnwise.integrations.verl.trainer.agent_trainer"


class _AfterImport(MetaPathFinder):
    """Calls a function right after a module is first imported."""

    def __init__(self, name: str, then: Callable[[ModuleType], object]) -> None:
        self._name = name
        self._then = then

    def find_spec(
        self, name: str, path: Any, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                self._then(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def after_import(name: str, then: Callable[[ModuleType], object]) -> None:
    """Calls `then` with the module: now where it is imported already, else as soon as it is
    imported."""
    if name in sys.modules:
        then(sys.modules[name])
    else:
        sys.meta_path.insert(0, _AfterImport(name, then))


def _replica() -> type:
    from turnwise.integrations.verl.engines.hf_server import HFReplica

    return HFReplica


def install() -> None:
    """Registers losses, attention over packed rows, the `hf` rollout server and, when its time
    comes, our trainer; where VERL_PLATFORM is cpu, also a platform and engines for the CPU."""
    from verl.workers.rollout import base, replica

    patches.patch_trl()
    patches.patch_logprobs()
    attention.register()
    if platform.is_asked_for():
        platform.use_platform(platform.CPU)
        patches.patch_process_group()
        patches.register_cpu_engines()
        after_import("vllm.model_executor.layers.utils", patches.patch_vllm_on_cpu)
        # SGLang reads it as soon as it is imported.
        os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
        after_import("sglang.srt.weight_sync.utils", patches.patch_sglang_on_cpu)
    patches.patch_value_head()
    losses.register()
    registry = base._ROLLOUT_REGISTRY  # pyright: ignore[reportPrivateUsage]
    registry[("hf", "async")] = f"{_HF}.HFServerAdapter"
    replica.RolloutReplicaRegistry.register("hf", _replica)
    after_import("verl.trainer.ppo.ray_trainer", patches.refuse_older_trainers)
    if _TRAINERS not in sys.modules:  # else our trainer is what imports this
        after_import(_TRAINERS, lambda _: importlib.import_module(_OURS))


install()
