# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
"""Ray: finds the devices of a run, and raises if they are missing."""

import importlib
import os
import socket
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

from turnwise.config.tree import set_path
from turnwise.integrations.verl.config.keys import flat
from turnwise.integrations.verl.config.placement import Placement
from turnwise.integrations.verl.config.require import (
    PLATFORM,
    PLUGIN,
    require_engine,
    require_verl,
)
from turnwise.integrations.verl.engines.hf_session import SESSION

CONNECT_SECONDS = 10.0
CPU_SLOTS = 16
"""Logical CPUs of a local Ray. verl places actors by them; the machine's real number may be
smaller."""
_OBJECT_STORE_BYTES = 256 << 20
_RAY_INIT = "ray_kwargs.ray_init."
_VLLM_ON_CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""vLLM without a GPU: GiB of cache, and threads that other workers may share a core with. Only vLLM
reads them."""


class ClusterError(ValueError):
    """The devices that were asked for are not there."""


def find_placement(
    *, device: str, nodes: int = 1, gpus: int | None = None, address: str | None = None
) -> Placement:
    """Where the run happens, before anything is started.

    Args:
        device: train.device: auto, cpu or cuda.
        gpus: per node. None: all that this machine has. On the CPU: ranks per node, 1 by default.
        address: of a running Ray cluster. None: the one that this process has joined; else one is
            started on this machine.

    Raises:
        ClusterError: GPUs were asked for that are not there, or several nodes without a cluster.
    """
    import torch

    if nodes < 1 or (gpus is not None and gpus < 1):
        raise ClusterError(f"nodes and gpus are at least 1, got nodes={nodes} and gpus={gpus}")
    there = torch.cuda.device_count()
    joined = _joined_nodes()
    if joined and address is None:
        return _in_cluster(joined, device=device, nodes=nodes, gpus=gpus)
    if nodes > 1 and address is None:
        raise ClusterError(
            f"{nodes} nodes need a running Ray cluster: start it with `ray start`, then pass its "
            "address"
        )
    if device == "cpu":
        return Placement(nodes=nodes, gpus=gpus or 1, device="cpu")
    if address is not None:  # the cluster's nodes have the GPUs, not necessarily this machine
        if gpus is None and not there:
            raise ClusterError(
                "this machine has no GPU to count; say with --gpus how many each node has"
            )
        return Placement(nodes=nodes, gpus=gpus or there, device="cuda")
    if not there and (device.startswith("cuda") or gpus is not None):
        asked = (
            f"train.device is {device!r}"
            if device.startswith("cuda")
            else f"{gpus} GPUs were asked for"
        )
        raise ClusterError(
            f"{asked}, but this machine has no GPU; set train.device: cpu (with --gpus N for N "
            "ranks on the CPU)"
        )
    if not there:
        return Placement(device="cpu")
    if gpus is not None and gpus > there:
        raise ClusterError(
            f"{gpus} GPUs were asked for, but this machine has {there}; lower --gpus"
        )
    return Placement(gpus=gpus or there, device="cuda")


def _joined_nodes() -> list[dict[str, float]]:
    """The resources of each node of the cluster that this process has joined; empty: none."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return []
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _in_cluster(
    alive: Sequence[Mapping[str, float]], *, device: str, nodes: int, gpus: int | None
) -> Placement:
    """The placement in a cluster that this process has joined already, from its nodes."""
    if device == "auto":
        real = any(name.startswith("accelerator_type:") for node in alive for name in node)
        device = "cuda" if real else "cpu"
    if device == "cpu":
        return Placement(nodes=nodes, gpus=gpus or 1, device="cpu")
    most = int(max(resources.get("GPU", 0) for resources in alive))
    if not most:
        raise ClusterError(f"train.device is {device!r}, but no node of the cluster has a GPU")
    return Placement(nodes=nodes, gpus=gpus or most, device="cuda")


def worker_environment(*, device: str) -> dict[str, str]:
    """Environment variables that every process of the run needs."""
    found = {
        "VERL_USE_EXTERNAL_MODULES": PLUGIN,
        SESSION: os.environ.setdefault(SESSION, uuid4().hex[:8]),
        "TRANSFER_QUEUE_ENABLE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    if device == "cpu":
        found[PLATFORM] = "cpu"
        found["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
        found["ONEDNN_MAX_CPU_ISA"] = (
            "AVX512_CORE_BF16"  # some virtual machines report AMX and crash when it is used
        )
        for name, value in _VLLM_ON_CPU.items():
            found[name] = os.environ.get(name, value)
    return found


def use_device(device: str) -> dict[str, str]:
    """Environment variables of every process of the run; sets them in this one too."""
    environment = worker_environment(device=device)
    if device != "cpu" and os.environ.get(PLATFORM) == "cpu":
        del os.environ[PLATFORM]  # an earlier run of this process was on the CPU
    os.environ.update(environment)
    # It loads the plugin, which needs its own parts: none of them may be the first to import verl.
    importlib.import_module("verl")
    from turnwise.integrations.verl.engines.platform import use_platform

    use_platform(device)
    return environment


@contextmanager
def give_workers(environment: Mapping[str, str]) -> Generator[None]:
    """Inside, every Ray actor that this process creates gets these environment variables.

    A Ray that `start_ray` started has them for the whole job. One that the user started before has
    not, and its job's environment cannot be changed any more.
    """
    import ray
    from ray.actor import ActorClass
    from ray.runtime_env import RuntimeEnv

    known = ray.get_runtime_context().runtime_env.get("env_vars") or {}
    if all(known.get(name) == value for name, value in environment.items()):
        yield
        return
    actors: Any = ActorClass
    create = actors._remote

    def create_with(self: Any, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        given = dict(options.get("runtime_env") or {})
        given["env_vars"] = {**environment, **(given.get("env_vars") or {})}
        return create(self, args, kwargs, **{**options, "runtime_env": RuntimeEnv(**given)})

    actors._remote = create_with
    try:
        yield
    finally:
        actors._remote = create


def ray_options(verl: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `ray.init` among the keys under `verl:`.

    Example:
        >>> ray_options({"ray_kwargs": {"ray_init": {"num_cpus": 3}}, "trainer.save_freq": 1})
        {'num_cpus': 3}
    """
    found: dict[str, Any] = {}
    for key, value in flat(verl).items():
        if key.startswith(_RAY_INIT):
            set_path(found, key.removeprefix(_RAY_INIT), value)
    return found


def start_ray(
    placement: Placement,
    *,
    address: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> bool:
    """Connects to Ray, starting it where there is none. True where this call started or joined it.

    Args:
        options: further arguments of `ray.init`. A Ray that this process has joined already has
            its own.

    Raises:
        VerlUnavailableError: verl or Ray is missing.
        ClusterError: the cluster cannot be reached, or has fewer devices than asked for.
    """
    require_verl()
    environment = use_device(placement.device)
    import ray

    if ray.is_initialized():
        _check_devices(ray, placement)
        return False
    init: Any = ray.init
    given = dict(options or {})
    runtime_env = dict(given.pop("runtime_env", None) or {})
    runtime_env["env_vars"] = {**environment, **(runtime_env.get("env_vars") or {})}
    given = {"log_to_driver": bool(os.environ.get("TURNWISE_RAY_LOGS")), **given}
    if address is not None:
        _check_reachable(address)
        init(address=address, runtime_env=runtime_env, **given)
    else:
        ours: dict[str, Any] = {
            "address": "local",  # never connect to a leftover cluster
            "include_dashboard": False,
            "num_cpus": max(CPU_SLOTS, os.cpu_count() or 1, 8 * placement.gpus),
            "num_gpus": placement.gpus,
            "object_store_memory": _OBJECT_STORE_BYTES if placement.device == "cpu" else None,
        }
        init(runtime_env=runtime_env, **{**ours, **given})
        _started_here.add(ray.get_runtime_context().get_node_id())
    try:
        _check_devices(ray, placement)
    except ClusterError:
        ray.shutdown()
        raise
    return True


_started_here: set[str] = set()
"""The nodes that this process started, by Ray's ids."""


def is_local() -> bool:
    """True where the Ray in use is one that `start_ray` started on this machine."""
    import ray

    return ray.get_runtime_context().get_node_id() in _started_here


def check_engine(engine: str, *, address: str | None = None) -> None:
    """Returns where the run can have its engine, or where that is not known: the nodes of a running
    cluster may have what this machine has not.

    Raises:
        VerlUnavailableError: Ray would be started on this machine, and the engine is not installed.
    """
    import ray

    if address is None and not ray.is_initialized():
        require_engine(engine)


def _check_reachable(address: str) -> None:
    if address in ("auto", "local"):
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS):
            pass
    except (OSError, ValueError) as error:
        raise ClusterError(
            f"no Ray cluster answers at {address} ({error}); start one with `ray start --head`, "
            "and give host:port"
        ) from error


def _check_devices(ray: Any, placement: Placement) -> None:
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    fitting = sum(resources.get("GPU", 0) >= placement.gpus for resources in alive)
    if fitting < placement.nodes:
        counts = sorted((int(resources.get("GPU", 0)) for resources in alive), reverse=True)
        hint = "lower nodes or gpus, or add nodes"
        if placement.device == "cpu":
            hint += (
                "; on the CPU a rank takes one logical GPU, as in ray.init(num_gpus=1) or "
                "`ray start --num-gpus 1`"
            )
        raise ClusterError(
            f"{placement.nodes} node(s) with {placement.gpus} GPU(s) each were asked for, but the "
            f"cluster's nodes have {counts}; {hint}"
        )
