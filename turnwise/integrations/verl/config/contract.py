"""The private names of verl and Ray that turnwise uses: each with the parameters that it needs, and
why. Another release may change any of them, so all are checked
when a trainer is made."""

import inspect
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from typing import Any

from turnwise.integrations.verl.config.require import VerlUnavailableError


@dataclass(frozen=True, kw_only=True, slots=True)
class Reach:
    """One name of another package."""

    where: str
    """module:Name or module:Class.name"""
    takes: tuple[str, ...] | None = None
    """The first parameters of a function, in their order. None: not a function, or never called."""
    why: str


_BASE = "verl.trainer.ppo.v1.trainer_base:PPOTrainer"
_BUFFER = "verl.trainer.ppo.v1.replay_buffer:ReplayBuffer"
_BATCH = ("self", "batch", "metrics")
CONTRACT: tuple[Reach, ...] = (
    Reach(
        where=f"{_BASE}._init_resource_pool_mgr",
        takes=("self",),
        why="worker classes and pools of ours or the user's; verl's V1 trainer takes none",
    ),
    Reach(
        where=f"{_BASE}._init_dataloader",
        takes=("self",),
        why="data sets, sampler and collate function given as objects; verl's config takes paths",
    ),
    Reach(
        where=f"{_BASE}._submit_batch_to_rollout",
        takes=("self", "batch"),
        why="lockstep generation, and which episodes a step waits for",
    ),
    Reach(
        where=f"{_BASE}._add_prompts_to_generate",
        takes=("self", "num_prompts"),
        why="ends refilling: an environment that always fails would be refilled for ever",
    ),
    Reach(
        where=f"{_BASE}._balance_batch",
        takes=_BATCH,
        why="failed episodes, broken groups and group filters, before rows are divided over ranks",
    ),
    Reach(
        where=f"{_BASE}._compute_values",
        takes=_BATCH,
        why="keeps the value after a truncated row, which verl cuts off",
    ),
    Reach(
        where=f"{_BASE}._compute_advantage",
        takes=_BATCH,
        why="our estimators; verl gives the critic's values to its own GAE alone",
    ),
    Reach(
        where=f"{_BASE}._update_critic",
        takes=_BATCH,
        why="learning rates, and as many updates as the policy makes under train.target_kl",
    ),
    Reach(
        where=f"{_BASE}._update_actor",
        takes=_BATCH,
        why="learning rates, early stop and the adaptive KL",
    ),
    Reach(
        where=f"{_BASE}._validate",
        takes=("self",),
        why="success with intervals from the episodes themselves, and the first error",
    ),
    Reach(
        where=f"{_BASE}._compute_metrics",
        takes=(*_BATCH, "timing_raw", "global_steps", "epoch"),
        why="the step's metrics in the run directory",
    ),
    Reach(
        where=f"{_BASE}._save_checkpoint",
        takes=("self",),
        why="state that adapts from step to step is saved with the weights",
    ),
    Reach(
        where=f"{_BASE}._load_checkpoint",
        takes=("self",),
        why="the same state, and the run directory cut back to the checkpoint",
    ),
    Reach(
        where=f"{_BUFFER}._wait_for_next_poll",
        takes=("self", "partition_id", "last_debug_time"),
        why="verl's only regular call while it waits: dead workers and stalls are noticed there",
    ),
    Reach(
        where=f"{_BUFFER}.sample",
        takes=("self", "global_steps", "partition_id", "batch_size"),
        why="a step that does not wait for its slowest groups (rollout.enough_groups)",
    ),
    Reach(
        where=f"{_BUFFER}._select_prompt_uids",
        takes=("self", "partition_id", "sampleable_keys", "batch_size"),
        why="all groups that are over by then are trained, not a random part of them",
    ),
    Reach(
        where="verl.trainer.ppo.v1.agent_loop_tq:AgentLoopManagerTQ.generate_sequences",
        takes=("self", "prompts"),
        why="groups are handed out one by one; its workers are watched by their handles",
    ),
    Reach(
        where="verl.experimental.agent_loop.agent_loop:AgentLoopManager._init_agent_loop_workers",
        takes=("self",),
        why="workers learn who the others are",
    ),
    Reach(
        where="verl.experimental.agent_loop.agent_loop:AgentLoopWorker._run_agent_loop",
        takes=("self", "sampling_params", "trajectory"),
        why="members of one group are played by several workers",
    ),
    Reach(
        where=(
            "verl.trainer.ppo.v1.agent_loop_tq:"
            "AgentLoopWorkerTQ.__ray_metadata__.modified_class._run_prompt"
        ),
        takes=("self", "prompt"),
        why="a group that is given up has ended before the queue is cleared",
    ),
    Reach(
        where="verl.trainer.ppo.v1.agent_loop_tq:AgentLoopWorkerTQ.__ray_metadata__",
        why="the class behind verl's Ray actor, to derive from",
    ),
    Reach(
        where="verl.workers.rollout.base:_ROLLOUT_REGISTRY",
        why="the adapter of the hf engine; verl has no function that registers one",
    ),
    Reach(
        where="verl.workers.engine_workers:TrainingWorker.train_batch",
        takes=("self", "data"),
        why="a worker takes its pace from each batch",
    ),
    Reach(
        where="verl.workers.engine.base:BaseEngine.forward_backward_batch",
        takes=("self", "data", "loss_function", "forward_only"),
        why="the KL of a mini-batch, before its update",
    ),
    Reach(
        where="verl.workers.engine.base:BaseEngine.optimizer_step",
        takes=("self",),
        why="no update after train.target_kl is passed",
    ),
    Reach(
        where="verl.experimental.agent_loop.agent_loop:AgentLoopOutput.as_dict",
        takes=("self",),
        why="rewards and turn numbers per token",
    ),
    Reach(
        where="verl.utils.model:load_valuehead_model",
        takes=("local_path", "torch_dtype", "model_config", "trust_remote_code"),
        why="patched: the critic's attention",
    ),
    Reach(
        where="verl.trainer.ppo.ray_trainer:RayPPOTrainer.__init__",
        takes=("self", "config"),
        why="patched: the older trainers refuse our section",
    ),
    Reach(
        where="verl.models.transformers.monkey_patch:is_trl_available",
        why="patched: trl has no value head any more",
    ),
    Reach(
        where="verl.utils.torch_functional:logprobs_from_logits_v2",
        takes=("logits", "labels"),
        why="patched: log-probs in blocks",
    ),
    Reach(
        where="verl.utils.distributed:initialize_global_process_group_ray",
        takes=("timeout_second", "backend"),
        why="patched on the CPU: gloo once",
    ),
    Reach(
        where="verl.workers.engine.fsdp.transformer_impl:CPUOffloadPolicy",
        why="patched on the CPU: there is no pinned memory",
    ),
    Reach(
        where="ray.actor:ActorClass._remote",
        takes=("self", "args", "kwargs"),
        why="environment variables for workers in a Ray that turnwise did not start",
    ),
)


def check_contract(contract: tuple[Reach, ...] = CONTRACT) -> None:
    """Returns where every name is there as expected.

    Raises:
        VerlUnavailableError: some are not; the message lists all of them, and what they are for.
    """
    changed = [
        f"{reach.where}: {wrong} ({reach.why})" for reach in contract if (wrong := _wrong(reach))
    ]
    if changed:
        raise VerlUnavailableError(
            f"turnwise counts on parts of verl that are not what they were in verl 0.9.1 (here "
            f"{version('verl')}, Ray {version('ray')}):\n  " + "\n  ".join(changed)
        )


def _wrong(reach: Reach) -> str:
    """The difference from what turnwise expects; empty: none."""
    module, _, name = reach.where.partition(":")
    try:
        found: Any = import_module(module)
    except ImportError as error:
        return f"cannot be imported: {error}"
    for part in name.split("."):
        if not hasattr(found, part):
            return "is gone"
        found = getattr(found, part)
    if reach.takes is None:
        return ""
    takes = tuple(inspect.signature(found).parameters)[: len(reach.takes)]
    return "" if takes == reach.takes else f"takes {takes}, expected {reach.takes}"
