"""Loaded by verl in every process of a run (VERL_USE_EXTERNAL_MODULES): makes our parts known to verl's registries.

The trainer is not among them, because only the driver needs it: importing turnwise.integrations.verl.trainer registers
it, so for `python -m verl.trainer.main_ppo` name both modules, separated by a comma.
"""

from turnwise.integrations.verl.require import require_verl

require_verl()

from turnwise.integrations.verl import losses, patches, platform  # noqa: E402

_HF = "turnwise.integrations.verl.hf_server"


def _replica() -> type:
    from turnwise.integrations.verl.hf_server import HFReplica

    return HFReplica


def install() -> None:
    """Registers platform, engines, losses and the `hf` rollout server. Installing twice changes nothing."""
    from verl.workers.rollout import base, replica

    patches.patch_trl()
    if platform.use_cpu_where_alone():
        patches.patch_process_group()
        patches.register_cpu_engines()
    patches.patch_value_head()
    losses.register()
    base._ROLLOUT_REGISTRY[("hf", "async")] = f"{_HF}.HFServerAdapter"
    replica.RolloutReplicaRegistry.register("hf", _replica)


install()
