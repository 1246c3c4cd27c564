# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportPrivateUsage=false
"""Who plays a taskset of verifiers 0.4: the Env, the agents and the harnesses of its package."""

import copy
import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import verifiers.v1 as vf
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.configs.env import default_agent_harness
from verifiers.v1.runtimes import PrimeConfig
from verifiers.v1.utils.generic import concrete_type
from verifiers.v1.utils.loaders import environment_class

from turnwise.envs.base import EnvError
from turnwise.integrations.verifiers.environments import TasksetEnv

logger = logging.getLogger(__name__)
HarnessKind = Literal["chat", "bash", "own"]
SHARED_PACKAGES = ("verifiers", "verifiers.v1", "verifiers.v1.tasksets")
"""Packages that hold many environments, none of which is a taskset's own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cast:
    """The agents of a taskset's episodes."""

    taskset: Any
    own: Any
    """The Env of the taskset's package; None where one agent plays a task from its prompt."""
    specs: Mapping[str, Any]
    """By role: verifiers' AgentConfig."""
    kinds: Mapping[str, HarnessKind]
    """By role: a loop of this process, or the program of the package."""


def cast_of(env: TasksetEnv) -> Cast:
    """The agents that play `env`.

    Raises:
        EnvError: the package asks for what turnwise cannot honour; the message names it.
    """
    given = env.taskset
    own = copy.copy(given) if isinstance(given, vf.Env) else _own_env(given)
    if own is None:
        ident = given.config.id or _package(given)
        roles = {"agent": vf.AgentConfig()}
        default = default_agent_harness(ident)
        taskset = given
    else:
        if env.user is not None:
            raise EnvError(
                f"{type(own).__name__} drives the conversation of {type(given).__name__}; there is "
                "no place for user="
            )
        roles = {name: spec for name, spec in own.config if isinstance(spec, vf.AgentConfig)}
        default, taskset = own._default_harness, own.taskset
    kinds: dict[str, HarnessKind] = {
        role: _kind(env, spec, default) for role, spec in roles.items()
    }
    specs = {role: _spec(env, role, spec, default) for role, spec in roles.items()}
    if own is not None:
        own.config = own.config.model_copy(update=specs)
        own._agent_specs = specs
    unpinned = any(spec.harness is None for spec in roles.values())
    if unpinned and env.harness is None and default.id == "bash":
        logger.warning(
            "%s: verifiers' default harness would give the model a shell; here it has none. "
            "TasksetEnv(taskset, harness='bash') gives it one, on this machine; harness='chat' "
            "says that none is wanted",
            type(given).__name__,
        )
    return Cast(taskset=taskset, own=own, specs=specs, kinds=kinds)


def _own_env(taskset: Any) -> Any:
    """The Env of the taskset's package around the taskset; None where it has none."""
    ident, cls = taskset.config.id, vf.SingleAgentEnv
    if ident:
        cls = environment_class(ident)
    if cls is vf.SingleAgentEnv:
        ident, cls = _package(taskset).rpartition(".")[2], _exported_env(taskset)
    if cls is None or cls is vf.SingleAgentEnv:
        return None
    config_cls: Any = concrete_type(cls, vf.EnvConfig, origin=vf.Env) or vf.EnvConfig
    own: Any = cls(config_cls(taskset=taskset.config.model_copy(update={"id": ident})))
    own.taskset = taskset  # as it was given: it may be a view of the one that was loaded
    return own


def _exported_env(taskset: Any) -> Any:
    """The one Env that the taskset's package exports; None without one."""
    package = _package(taskset)
    module = sys.modules.get(package)
    names = () if package in SHARED_PACKAGES else getattr(module, "__all__", ())
    found = [getattr(module, name, None) for name in names]
    envs = [one for one in found if isinstance(one, type) and issubclass(one, vf.Env)]
    if len(envs) > 1:
        raise EnvError(
            f"{package} has several environments for {type(taskset).__name__}: "
            f"{', '.join(one.__name__ for one in envs)}; pass one of them instead of the taskset"
        )
    return envs[0] if envs else None


def _package(taskset: Any) -> str:
    """The package that the taskset's class is in."""
    module = type(taskset).__module__
    if module.startswith("verifiers.v1.tasksets."):
        return ".".join(module.split(".")[:4])
    return module.partition(".")[0]


def _kind(env: TasksetEnv, spec: Any, default: Any) -> HarnessKind:
    pinned = None if spec.harness is None else spec.harness.id
    if env.harness is not None and pinned is None:
        return "bash" if env.harness == "bash" else "chat"
    if pinned == "null" or (pinned is None and default.id in ("null", "bash")):
        return "chat"
    return "bash" if pinned == "bash" else "own"


def _spec(env: TasksetEnv, role: str, spec: Any, default: Any) -> Any:
    """The role's config with what this process provides: the policy, and a runtime without a
    cloud."""
    if spec.model is not None and spec.client is None:
        raise EnvError(
            f"agent {role!r} is played by the model {spec.model!r}, for which no client is "
            "configured; turnwise answers for the policy alone"
        )
    changes: dict[str, Any] = {"max_turns": spec.max_turns or env.max_turns}
    if isinstance(spec.runtime, PrimeConfig):
        changes["runtime"] = vf.SubprocessConfig()
    if spec.client is None:
        changes |= {"model": "policy", "client": policy_client()}
    elif isinstance(spec.client, TrainClientConfig):
        raise EnvError(f"agent {role!r} has a client for training; leave it out")
    if spec.harness is None:
        changes["harness"] = default
    return spec.model_copy(update=changes)


def policy_client() -> Any:
    """The endpoint that stands for turnwise. Nothing is ever sent to it."""
    make: Any = TrainClientConfig
    return make(base_url="http://turnwise.invalid/v1", api_key_var="TURNWISE_UNUSED")
