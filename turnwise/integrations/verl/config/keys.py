# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false
# pyright: reportUnknownMemberType=false
"""The keys under `verl:` in a config: each must be one of verl's, and one that turnwise does not
decide."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from typing import Any

_CARRIED = (
    "turnwise's trainer is synchronous: unfinished episodes would go on with other weights, so "
    "none is carried over; rollout.enough_groups drops the slowest"
)
_LR = "our schedule sets the rates; use train.schedule and train.warmup_steps"
_SCHEDULE = (
    "min_lr_ratio",
    "num_cycles",
    "total_training_steps",
    "warmup_style",
    "zero_indexed_step",
)
_REPLY = "set rollout.max_response_tokens, and rollout.max_context for the whole"
OWNED: dict[str, str] = {
    "algorithm.adv_estimator": "turnwise assigns credit; set algo.name",
    "algorithm.gamma": "turnwise assigns credit; set algo.gamma",
    "algorithm.lam": "turnwise assigns credit; set algo.lam",
    "algorithm.use_kl_in_reward": "turnwise adds the KL; set algo.kl_coef and algo.kl_in",
    "algorithm.kl_penalty": "turnwise computes the KL; set algo.kl_form",
    "algorithm.kl_ctrl": "turnwise adapts the KL; set algo.kl_coef and algo.kl_target",
    "algorithm.filter_groups": "turnwise filters groups; set algo.filter",
    "algorithm.norm_adv_by_std_in_grpo": "turnwise assigns credit; set algo.name",
    "algorithm.use_pf_ppo": "turnwise chooses the rows of a step; remove it",
    "algorithm.pf_ppo": "turnwise chooses the rows of a step; remove it",
    "algorithm.rollout_correction": "turnwise corrects by truncated ratios; set algo.tis_cap",
    "actor_rollout_ref.actor.clip_ratio": "set algo.clip_low and algo.clip_high",
    "actor_rollout_ref.actor.use_kl_loss": "set algo.kl_coef and algo.kl_in",
    "actor_rollout_ref.actor.kl_loss_coef": "set algo.kl_coef",
    "actor_rollout_ref.actor.kl_loss_type": "set algo.kl_form",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "set train.mini_batches",
    "critic.ppo_mini_batch_size": "set train.mini_batches",
    "actor_rollout_ref.actor.loss_agg_mode": "set algo.reduction",
    "critic.loss_agg_mode": "set algo.reduction",
    "critic.enable": "the algorithm decides; set algo.name",
    "actor_rollout_ref.rollout.temperature": "set rollout.temperature",
    "actor_rollout_ref.rollout.top_k": "training samples what it scores; remove it",
    "actor_rollout_ref.rollout.top_p": "training samples what it scores; remove it",
    "actor_rollout_ref.rollout.do_sample": "training samples; remove it",
    "actor_rollout_ref.rollout.val_kwargs.temperature": "set rollout.eval_temperature",
    "actor_rollout_ref.rollout.val_kwargs.do_sample": "set rollout.eval_temperature",
    "actor_rollout_ref.rollout.val_kwargs.top_k": "set rollout.top_k",
    "actor_rollout_ref.rollout.val_kwargs.top_p": "set rollout.top_p",
    "actor_rollout_ref.rollout.val_kwargs.n": "set eval.episodes",
    "actor_rollout_ref.rollout.n": "set rollout.train.group_size",
    "actor_rollout_ref.rollout.mode": "verl has async servers alone; remove it",
    "actor_rollout_ref.rollout.max_model_len": "set rollout.max_context",
    "actor_rollout_ref.rollout.calculate_log_probs": "turnwise needs them; remove it",
    "actor_rollout_ref.rollout.multi_turn": "turnwise plays the turns; set env and rollout",
    "actor_rollout_ref.rollout.agent.default_agent_loop": "turnwise plays; set rollout.agent",
    "actor_rollout_ref.rollout.agent.agent_loop_config_path": "turnwise plays; set rollout.agent",
    "actor_rollout_ref.rollout.agent.agent_loop_manager_class": (
        "turnwise hands out the episodes; remove it"
    ),
    "actor_rollout_ref.rollout.over_sample_rate": (
        "verl 0.9.1's V1 trainer never reads it; set rollout.enough_groups"
    ),
    "actor_rollout_ref.rollout.response_length": _REPLY,
    "actor_rollout_ref.model.lora_rank": "set model.lora.rank",
    "actor_rollout_ref.model.lora_alpha": "set model.lora.alpha",
    "actor_rollout_ref.model.target_modules": "set model.lora.target_modules",
    "actor_rollout_ref.model.path": "set model.path",
    "actor_rollout_ref.model.tokenizer_path": "set model.tokenizer",
    "actor_rollout_ref.model.external_lib": "turnwise is loaded there; remove it",
    "data.train_files": "environments make the tasks; set env.name",
    "data.val_files": "environments make the tasks; set env.name",
    "data.custom_cls": "environments make the tasks; set env.name, or pass train_dataset",
    "data.apply_chat_template_kwargs": "turnwise renders chats; set model.chat_template_args",
    "data.max_response_length": _REPLY,
    "data.train_batch_size": "set rollout.train.env_groups",
    "data.gen_batch_size": "set rollout.train.env_groups",
    "data.train_max_samples": "set train.steps",
    "data.val_max_samples": "set eval.episodes",
    "trainer.v1.trainer_mode": (
        "turnwise's trainer is synchronous; verl 0.9.1's colocate_async and separate_async would "
        "run without turnwise's credit, filters and records"
    ),
    "trainer.v1.colocate_async": _CARRIED,
    "trainer.v1.separate_async": _CARRIED,
    "trainer.v1.sampler.max_off_policy_threshold": _CARRIED,
    "trainer.v1.sampler.max_off_policy_strategy": _CARRIED,
    "trainer.use_v1": "turnwise builds on verl's V1 trainer; remove it",
    "trainer.total_epochs": "set train.steps",
    "trainer.total_training_steps": "set train.steps",
    "trainer.device": "set train.device",
    "trainer.nnodes": "pass --nodes",
    "trainer.n_gpus_per_node": "pass --gpus",
    "trainer.val_only": "use `turnwise eval`",
    "trainer.default_local_dir": "a run resumes from its own folder; set log.dir and log.name",
    "ray_kwargs.ray_init.address": "pass --address",
    "ray_kwargs.timeline_json_file": "`ray timeline` writes one; remove it",
    "transfer_queue.enable": "verl's V1 trainer needs it; remove it",
    "reward": "environments reward; set env.shaping, or pass reward_fn to AgentTrainer",
    "reward_model": "environments reward; remove it",
    "custom_reward_function": "environments reward; pass reward_fn to AgentTrainer",
    "distillation": "turnwise's losses have no teacher; remove it",
    "skip": "turnwise plays every step; remove it",
}
"""Keys and sections of verl that another setting decides: why, and which."""
OPEN = ("ray_kwargs.ray_init",)
"""Sections whose keys another library checks."""
OURS = ("turnwise.lockstep",)
"""Keys of our own section that a user may set."""


def flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with dotted keys alone. A mapping that is a value of verl's stays one.

    Example:
        >>> flat({"trainer": {"save_freq": 3, "v1": {"sync": {}}}, "critic.optim.lr": 0.1})
        {'trainer.save_freq': 3, 'trainer.v1.sync': {}, 'critic.optim.lr': 0.1}
    """
    found: dict[str, Any] = {}
    for key, value in settings.items():
        inner = flat(value) if isinstance(value, Mapping) and value else None
        found |= {key: value} if inner is None else {f"{key}.{k}": v for k, v in inner.items()}
    return found


def owned(settings: Mapping[str, Any]) -> list[str]:
    """Errors for keys that another setting of turnwise decides. Needs no verl.

    Example:
        >>> owned({"algorithm": {"gamma": 0.9}})
        ['verl.algorithm.gamma=0.9: turnwise assigns credit; set algo.gamma']
    """
    found: list[str] = []
    for key, value in flat(settings).items():
        why = next((OWNED[name] for name in (key, *sections(key)) if name in OWNED), None)
        if ".optim.lr_" in key or (".optim." in key and key.endswith(_SCHEDULE)):
            why = _LR
        if why is not None:
            found.append(f"verl.{key}={value!r}: {why}")
    return found


def unknown(settings: Mapping[str, Any]) -> list[str]:
    """Errors for keys that verl does not have, each with the nearest one that it has, and for
    values in the place of a section."""
    found: list[str] = []
    for key, value in flat(settings).items():
        if key in OURS:
            if not isinstance(value, bool):
                found.append(f"verl.{key}={value!r}: takes true or false")
        elif not _is_known(key):
            found.append(f"verl.{key}: verl has no such key{_near(key)}")
        elif _is_section(key) and not isinstance(value, Mapping):
            found.append(f"verl.{key}={value!r}: a section of verl's with keys of its own")
    return found


def _is_section(key: str) -> bool:
    node: Any = schema()
    for part in key.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return isinstance(node, Mapping) and bool(node)


def _is_known(key: str) -> bool:
    """True where verl's schema has the key, a class of verl's the field, or a free section it."""
    node: Any = schema()
    path = key.split(".")
    for depth, part in enumerate(path):
        if isinstance(node, str) and "${" in node:
            return True  # a section that refers to another one
        if not isinstance(node, Mapping) or not node or ".".join(path[:depth]) in OPEN:
            return node is None or isinstance(node, Mapping)  # verl leaves what is below open
        if part not in node:
            # A field that verl's file leaves out: its class has it, and what may be below it.
            return part in _fields(node.get("_target_"))
        node = node[part]
    return True


def _near(key: str) -> str:
    known = list(_keys(schema()))
    near = get_close_matches(key, known, n=1, cutoff=0.75)
    if not near:  # the end of it in another section
        last = key.rpartition(".")[2]
        near = [name for name in known if name.rpartition(".")[2] == last][:1]
    return f"; did you mean {near[0]}?" if near else ""


def sections(key: str) -> Iterator[str]:
    """The sections that a key stands in, the innermost first.

    Example:
        >>> list(sections("critic.optim.lr"))
        ['critic.optim', 'critic']
    """
    while "." in key:
        key = key.rpartition(".")[0]
        yield key


def _keys(node: Any, path: str = "") -> Iterator[str]:
    for part, inner in node.items() if isinstance(node, Mapping) else ():
        yield f"{path}{part}"
        yield from _keys(inner, f"{path}{part}.")


def _fields(target: str | None) -> frozenset[str]:
    """The fields of a config class of verl's."""
    if target is None:
        return frozenset()
    module, _, name = target.rpartition(".")
    found: Any = getattr(import_module(module), name)
    return frozenset(field.name for field in fields(found)) if is_dataclass(found) else frozenset()


@cache
def schema() -> dict[str, Any]:
    """verl's own PPO config, as its files say it, references unresolved."""
    from omegaconf import OmegaConf

    from turnwise.integrations.verl.config.compose import raw_config

    found: Any = OmegaConf.to_container(raw_config([]))
    return found
