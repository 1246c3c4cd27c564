"""Roles, worker classes and resource pools: verl's defaults, or the user's after a check."""

from collections.abc import Mapping
from typing import Any

POOL = "global_pool"


def _default_role_mapping(config: Any = None) -> dict[Any, Any]:
    """Ray worker classes by verl's Role, for what this config of verl's needs: actor and rollout
    (with the reference where a KL is asked for), and a critic where the estimator reads values.
    Without a config: plain PPO."""
    import ray
    from verl.trainer.ppo.utils import Role, need_critic, need_reference_policy

    from turnwise.integrations.verl.trainer.pace import PacedActorWorker, PacedTrainingWorker

    if config is None:
        return {
            Role.ActorRollout: ray.remote(PacedActorWorker),
            Role.Critic: ray.remote(PacedTrainingWorker),
        }
    model = config.actor_rollout_ref.model
    adapters = model.get("lora_rank", 0) > 0 or model.get("lora_adapter_path") is not None
    # Adapters off: the base is the reference.
    reference = need_reference_policy(config) and not adapters
    roles: dict[Any, Any] = {
        Role.ActorRolloutRef if reference else Role.ActorRollout: ray.remote(PacedActorWorker)
    }
    if need_critic(config):
        roles[Role.Critic] = ray.remote(PacedTrainingWorker)
    return roles


def _default_resource_pool(config: Any = None) -> Any:  # pyright: ignore[reportUnusedFunction]
    """verl's ResourcePoolManager with one pool, shared by all roles: over the nodes and devices of
    the config, or without one over the GPUs that this machine has (one rank on the CPU where it has
    none)."""
    from verl.single_controller.ray import ResourcePoolManager
    from verl.trainer.ppo.utils import Role

    if config is None:
        from turnwise.integrations.verl.faults.cluster import find_placement

        found = find_placement(device="auto")
        nodes, gpus = found.nodes, found.gpus
    else:
        nodes, gpus = config.trainer.nnodes, config.trainer.n_gpus_per_node
    mapping: dict[Any, str] = {
        role: POOL for role in (*_default_role_mapping(config), Role.RewardModel)
    }
    return ResourcePoolManager(resource_pool_spec={POOL: [gpus] * nodes}, mapping=mapping)


def check_roles(given: Mapping[Any, Any], needed: Mapping[Any, Any]) -> None:
    """Raises ValueError where a role is missing, or one is given that this run has no use for."""
    missing = [role.name for role in needed if role not in given]
    idle = [role.name for role in given if role not in needed]
    if missing or idle:
        raise ValueError(
            "role_worker_mapping must name exactly the roles of this run, "
            f"{[role.name for role in needed]}; "
            f"missing: {missing}, without use: {idle}. `_default_role_mapping(config)` gives them"
        )


def check_pool(given: Any, roles: Mapping[Any, str]) -> None:
    """Raises ValueError where a role of the run has no pool, or a role's pool is not specified."""
    for role in roles:
        if role.name == "RewardModel" and role not in given.mapping:
            continue  # no reward model runs
        pool = given.mapping.get(role)
        if pool is None:
            raise ValueError(
                f"resource_pool_manager gives no pool to role {role.name}; it has "
                f"{[r.name for r in given.mapping]}. "
                "`_default_resource_pool(config)` makes one pool for all"
            )
        if pool not in given.resource_pool_spec:
            raise ValueError(
                f"resource_pool_manager maps {role.name} to pool {pool!r}, which it does not "
                "specify"
            )
