# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
"""Looks at every node of the cluster before the first worker starts: turnwise is there, and so are
the run's files and environments."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from turnwise.config.schema import Config
from turnwise.envs.registry import make_env
from turnwise.integrations.verl.config.carried import carried, travels_by_name
from turnwise.integrations.verl.config.sections import Payload, pack, unpack
from turnwise.integrations.verl.faults.cluster import ClusterError
from turnwise.rollout.agents import agent_class, find_shaper
from turnwise.rollout.plan import env_configs

START_SECONDS = 300.0
"""Time for a node to start a process and import turnwise, besides `rollout.reset_timeout`."""


def settle_payload(
    config: Config,
    payload: Payload,
    *,
    environment: Mapping[str, str],
    paths: Sequence[str],
    local: bool,
) -> Payload:
    """The payload with which every node can play. Environments go by name where every node finds
    them so, else by value.

    Args:
        environment: variables of the run's processes.
        paths: files and folders that every node must see.
        local: Ray was started by this process, on this machine, whose files are here.

    Raises:
        ClusterError: a node lacks something; the message says which, and what.
    """
    configs = env_configs(config, config.rollout.train) | env_configs(config, config.rollout.val)
    named = {tag: env for tag, env in configs.items() if tag not in payload.factories}
    here = any(not travels_by_name(env.name) for env in named.values())
    if local and not here:
        return payload
    found = {} if here else _look_everywhere(config, payload, environment=environment, paths=paths)
    if not here and not any(found.values()):
        return payload
    if named and config.rollout.isolation != "process":
        factories = {**payload.factories, **{tag: carried(env) for tag, env in named.items()}}
        payload = Payload(factories=factories, agent_cls=payload.agent_cls)
        found = _look_everywhere(config, payload, environment=environment, paths=paths)
    elif here:
        names = ", ".join(env.name for env in named.values() if not travels_by_name(env.name))
        found = {"here": [_PROCESS.format(names=names)]}
    if any(found.values()):
        lines = [f"{node}: {error}" for node, errors in found.items() for error in errors]
        raise ClusterError("the run cannot start on this cluster:\n  " + "\n  ".join(lines))
    return payload


_PROCESS = (
    "rollout.isolation: process starts environments by name, and only this process knows {names}; "
    "put it into an installed package, or set rollout.isolation: thread"
)


def look(config_json: str, payload: str, paths: Sequence[str]) -> list[str]:
    """The problems of this node. Runs on the node."""
    config = Config.model_validate_json(config_json)
    errors = [f"{path} is not there" for path in paths if not Path(path).exists()]
    try:
        given = unpack(payload)
        if given.agent_cls is None:
            agent_class(config.rollout.agent)
        for groups in (config.rollout.train, config.rollout.val):
            for tag, env in env_configs(config, groups).items():
                if env.shaping.function is not None:
                    find_shaper(env.shaping.function)
                made = given.factories[tag]() if tag in given.factories else make_env(env)
                made.close()
    except Exception as error:
        errors.append(f"{type(error).__name__}: {error}")
    return errors


def _look_everywhere(
    config: Config, payload: Payload, *, environment: Mapping[str, str], paths: Sequence[str]
) -> dict[str, list[str]]:
    """The problems of each node, by its address."""
    import ray
    from ray.exceptions import GetTimeoutError, RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task: Any = ray.remote(num_cpus=0, max_retries=0)(look)
    given = (config.model_dump_json(), pack(payload), list(paths))
    asked = {
        f"node {node['NodeManagerAddress']} ({node['NodeID'][:8]})": task.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node["NodeID"], soft=False),
            runtime_env={"env_vars": dict(environment)},
        ).remote(*given)
        for node in ray.nodes()
        if node["Alive"] and node["Resources"].get("CPU", 0) > 0
    }
    limit = START_SECONDS + config.rollout.reset_timeout
    found: dict[str, list[str]] = {}
    for node, answer in asked.items():
        try:
            errors = ray.get(answer, timeout=limit)
        except GetTimeoutError:
            errors = [f"no answer in {limit:g} s"]
        except RayError as error:
            errors = [str(error).strip().splitlines()[-1]]
        found[node] = errors
    return found
