"""The key names of other projects, one line each: what they are called here, or why they mean nothing here.

A rule is one of
    "train.lr"            the same value under our name
    Rule(...)             one or several of our names, with a conversion
    Fact()                means something only together with others (`dialects.py` combines them)
    Only(True, why=...)   what turnwise does anyway: this value is accepted, another one refused
    No(why=...)           known, and meaningless here
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    to: tuple[str, ...]
    """Our names; each gets the converted value."""
    convert: Callable[[Any], Any] = _same
    """Raises ValueError with a reason for a value that has no meaning here."""
    every_env: bool = False
    """The setting holds for every environment of the run, those of `envs` too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fact:
    reads: str = ""
    """Our name to read the value back from, where there is one."""


@dataclass(frozen=True, slots=True)
class Only:
    value: Any
    why: str = field(kw_only=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class No:
    why: str


AnyRule = str | Rule | Fact | Only | No


def _trackers(value: Any) -> Any:
    names: Any = [value] if isinstance(value, str) else value
    return [name for name in names if name not in ("console", "none")] if isinstance(names, list) else names


def _off_below_one(value: Any) -> Any:
    """verl writes -1 for 'no top-k' and 'never'."""
    return 0 if value == -1 else value


def _choice(table: Mapping[str, str]) -> Callable[[Any], Any]:
    def convert(value: Any) -> Any:
        if not isinstance(value, str) or value not in table:
            raise ValueError(f"must be one of {', '.join(table)} here, got {value!r}")
        return table[value]

    return convert


_CLIP = Rule(to=("algo.clip_low", "algo.clip_high"))
_KL = _choice({"low_var_kl": "k3", "k3": "k3", "kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2"})
_REDUCTION = _choice(
    {"token-mean": "token_mean", "seq-mean-token-mean": "sequence_mean", "seq-mean-token-sum-norm": "token_sum_norm"}
)
_ROWS_PER_GPU = No(
    why="memory is bounded by tokens here: set train.micro_batch_tokens; the batch is "
    "rollout.train.env_groups x rollout.train.group_size episodes"
)
_NO_DEEPSPEED = No(
    why="the native trainer runs on one device without DeepSpeed; for many devices use backend verl or trl"
)


def _format(name: str) -> Rule:
    return Rule(to=(f"env.format.{name}",), every_env=True)


# align-anything and its multi-turn PPO trainer.
_ALIGN_ANYTHING: dict[str, AnyRule] = {
    "train_cfgs.multi_turn": "train.multi_turn",
    "train_cfgs.bi_level_gae": Fact(),
    "train_cfgs.high_level_gamma": "algo.high_level_gamma",
    "train_cfgs.max_turn": "train.max_turn",
    "train_cfgs.gamma": "algo.gamma",
    "train_cfgs.gae_lambda": "algo.lam",
    "train_cfgs.lam": "algo.lam",
    "train_cfgs.learning_rate": "train.lr",
    "train_cfgs.actor_lr": "train.lr",
    "train_cfgs.critic_lr": "train.critic_lr",
    "train_cfgs.epochs": "train.steps",
    "train_cfgs.update_iters": "train.epochs",
    "train_cfgs.kl_coeff": "algo.kl_coef",
    "train_cfgs.clip": _CLIP,
    "train_cfgs.clip_ratio": _CLIP,
    "train_cfgs.clip_range_ratio": _CLIP,
    "train_cfgs.clip_range_value": "algo.value_clip",
    "train_cfgs.clip_range_score": Rule(to=("env.shaping.clip",), every_env=True),
    "train_cfgs.entropy_coeff": "algo.entropy_coef",
    "train_cfgs.seed": "seed",
    "train_cfgs.device": "train.device",
    "train_cfgs.gradient_checkpointing": "model.gradient_checkpointing",
    "train_cfgs.actor_gradient_checkpointing": "model.gradient_checkpointing",
    "train_cfgs.bf16": Fact(),
    "train_cfgs.fp16": Fact(),
    "train_cfgs.lr_scheduler_type": "train.schedule",
    "train_cfgs.actor_lr_scheduler_type": "train.schedule",
    "train_cfgs.weight_decay": "train.weight_decay",
    "train_cfgs.actor_weight_decay": "train.weight_decay",
    "train_cfgs.adam_betas": "train.adam_betas",
    "train_cfgs.max_grad_norm": "train.max_grad_norm",
    "train_cfgs.eval_interval": "eval.every",
    "train_cfgs.per_device_train_batch_size": _ROWS_PER_GPU,
    "train_cfgs.per_device_prompt_batch_size": _ROWS_PER_GPU,
    "train_cfgs.per_device_eval_batch_size": _ROWS_PER_GPU,
    "train_cfgs.gradient_accumulation_steps": _ROWS_PER_GPU,
    "train_cfgs.ptx_coeff": No(why="there is no pretraining loss beside the policy's"),
    "train_cfgs.ds_cfgs": _NO_DEEPSPEED,
    "model_cfgs.model_name_or_path": "model.path",
    "model_cfgs.actor_model_name_or_path": "model.path",
    "model_cfgs.trust_remote_code": "model.trust_remote_code",
    "model_cfgs.model_max_length": "rollout.max_context",
    "model_cfgs.temperature": "rollout.temperature",
    "model_cfgs.reward_model_name_or_path": No(why="rewards come from the environment, or from data.reward"),
    "logger_cfgs.log_type": Rule(to=("log.trackers",), convert=_trackers),
    "logger_cfgs.log_project": "log.project",
    "logger_cfgs.log_run_name": "log.name",
    "logger_cfgs.output_dir": "log.dir",
    "logger_cfgs.save_interval": "checkpoint.every",
    "logger_cfgs.save_total_limit": "checkpoint.keep",
    "lora_cfgs.use_lora": Fact(),
    "lora_cfgs.r": Fact(reads="model.lora.rank"),
    "lora_cfgs.lora_alpha": "model.lora.alpha",
    "lora_cfgs.lora_dropout": "model.lora.dropout",
    "lora_cfgs.target_modules": "model.lora.target_modules",
    "env_cfgs.env_name": "env.name",
    "env_cfgs.max_episode_length": Rule(to=("env.max_actions_per_episode",), every_env=True),
}

# RAGEN: agent proxy, environment state manager, custom environments.
_RAGEN: dict[str, AnyRule] = {
    "agent_proxy.max_turn": "train.max_turn",
    "agent_proxy.use_environment": Fact(),
    "agent_proxy.action_sep": _format("action_sep"),
    "agent_proxy.max_actions_per_turn": _format("max_actions_per_turn"),
    "agent_proxy.enable_think": _format("think"),
    "agent_proxy.use_turn_scores": Only(True, why="a turn's reward always stands on that turn's last token"),
    "agent_proxy.reward_normalization.grouping": Fact(),
    "agent_proxy.reward_normalization.method": Fact(),
    "es_manager.format_penalty": _format("format_penalty"),
    "ctx_manager.generation.gen_config.response_length": "rollout.max_response_tokens",
    "ctx_manager.generation.gen_config.temperature": "rollout.temperature",
    "ctx_manager.generation.gen_config.top_p": "rollout.top_p",
    "ctx_manager.generation.gen_config.top_k": Rule(to=("rollout.top_k",), convert=_off_below_one),
    "custom_envs": Fact(),
    "model_path": "model.path",
    "seed.train": "seed",
    "seed.val": No(why="validation tasks are derived from the one `seed` and are disjoint from the training tasks"),
    "lora.rank": "model.lora.rank",
    "lora.alpha": "model.lora.alpha",
    "lora.target_modules": "model.lora.target_modules",
    "enable_response_mask": Only(True, why="only tokens that the model sampled are ever trained on"),
    "micro_batch_size_per_gpu": _ROWS_PER_GPU,
    "ppo_mini_batch_size": No(why="optimizer steps per pass are counted instead: set train.mini_batches"),
    "system.CUDA_VISIBLE_DEVICES": No(why="set train.device, or the environment variable CUDA_VISIBLE_DEVICES"),
} | {
    f"es_manager.{split}.{theirs}": f"rollout.{split}.{ours}"
    for split in ("train", "val")
    for theirs, ours in {
        "env_groups": "env_groups",
        "group_size": "group_size",
        "env_configs.tags": "tags",
        "env_configs.n_groups": "n_groups",
    }.items()
}

# verl's PPO trainer, and the agent trainer on top of it.
_VERL: dict[str, AnyRule] = {
    "agent.max_turn": "train.max_turn",
    "agent.agent_length": Fact(),
    "env_template": Fact(),
    "trainer.total_epochs": "train.steps",
    "trainer.total_training_steps": "train.steps",
    "trainer.device": "train.device",
    "trainer.project_name": "log.project",
    "trainer.experiment_name": "log.name",
    "trainer.default_local_dir": "log.dir",
    "trainer.logger": Rule(to=("log.trackers",), convert=_trackers),
    "trainer.val_before_train": "eval.before",
    "trainer.test_freq": Rule(to=("eval.every",), convert=_off_below_one),
    "trainer.save_freq": Rule(to=("checkpoint.every",), convert=_off_below_one),
    "trainer.max_actor_ckpt_to_keep": "checkpoint.keep",
    "trainer.critic_warmup": "train.critic_warmup",
    "algorithm.adv_estimator": Fact(reads="algo.name"),
    "algorithm.bi_level_gae": Fact(),
    "algorithm.gamma": "algo.gamma",
    "algorithm.lam": "algo.lam",
    "algorithm.high_level_gamma": "algo.high_level_gamma",
    "algorithm.clip_ratio": _CLIP,
    "algorithm.use_kl_in_reward": Fact(),
    "algorithm.kl_ctrl.kl_coef": Fact(reads="algo.kl_coef"),
    "algorithm.kl_penalty": Rule(to=("algo.kl_form",), convert=_KL),
    "data.train_batch_size": "rollout.train.env_groups",
    "data.val_batch_size": "rollout.val.env_groups",
    "data.max_response_length": "rollout.max_response_tokens",
    "data.seed": "seed",
    "actor_rollout_ref.hybrid_engine": Only(True, why="the native sampler always uses the trainer's own weights"),
    "actor_rollout_ref.model.path": "model.path",
    "actor_rollout_ref.model.trust_remote_code": "model.trust_remote_code",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "model.gradient_checkpointing",
    "actor_rollout_ref.model.lora_rank": "model.lora.rank",
    "actor_rollout_ref.model.lora_alpha": "model.lora.alpha",
    "actor_rollout_ref.model.target_modules": "model.lora.target_modules",
    "actor_rollout_ref.rollout.n": "rollout.train.group_size",
    "actor_rollout_ref.rollout.temperature": "rollout.temperature",
    "actor_rollout_ref.rollout.top_p": "rollout.top_p",
    "actor_rollout_ref.rollout.top_k": Rule(to=("rollout.top_k",), convert=_off_below_one),
    "actor_rollout_ref.rollout.response_length": "rollout.max_response_tokens",
    "actor_rollout_ref.rollout.max_model_len": "rollout.max_context",
    "actor_rollout_ref.rollout.val_kwargs.temperature": "rollout.eval_temperature",
    "actor_rollout_ref.actor.optim.lr": "train.lr",
    "actor_rollout_ref.actor.optim.weight_decay": "train.weight_decay",
    "actor_rollout_ref.actor.optim.lr_warmup_steps": "train.warmup_steps",
    "actor_rollout_ref.actor.clip_ratio": _CLIP,
    "actor_rollout_ref.actor.clip_ratio_low": "algo.clip_low",
    "actor_rollout_ref.actor.clip_ratio_high": "algo.clip_high",
    "actor_rollout_ref.actor.clip_ratio_c": "algo.dual_clip",
    "actor_rollout_ref.actor.entropy_coeff": "algo.entropy_coef",
    "actor_rollout_ref.actor.grad_clip": "train.max_grad_norm",
    "actor_rollout_ref.actor.ppo_epochs": "train.epochs",
    "actor_rollout_ref.actor.loss_agg_mode": Rule(to=("algo.reduction",), convert=_REDUCTION),
    "actor_rollout_ref.actor.use_kl_loss": Fact(),
    "actor_rollout_ref.actor.kl_loss_coef": Fact(reads="algo.kl_coef"),
    "actor_rollout_ref.actor.kl_loss_type": Rule(to=("algo.kl_form",), convert=_KL),
    "critic.optim.lr": "train.critic_lr",
    "critic.cliprange_value": "algo.value_clip",
}

# Attributes of ConfigStore (store.py).
_CONFIG_STORE: dict[str, AnyRule] = {
    "training.num_epochs": "train.steps",
    "training.learning_rate": "train.lr",
    "training.batch_size": "rollout.train.env_groups",
    "training.group_size": "rollout.train.group_size",
    "training.max_turns": "train.max_turn",
    "training.device": "train.device",
    "training.seed": "seed",
    "trainer.epochs": "train.steps",
    "trainer.logging": Rule(to=("log.trackers",), convert=_trackers),
    "environment.name": "env.name",
    "environment.max_turns": "env.max_turn",
    "environment.max_steps": "env.max_actions_per_episode",
    "environment.options": "env.options",
    "environment.size": "env.options.size",
    "environment.system_prompt": "env.system_prompt",
    "model.model_name": "model.path",
    "data.batch_size": "rollout.train.env_groups",
    "data.num_workers": "rollout.num_workers",
}

RULES: dict[str, AnyRule] = _ALIGN_ANYTHING | _RAGEN | _VERL | _CONFIG_STORE

# Short flags (`--max_turn 3`) stand for these sections, in this order.
SHORT_FLAG_SECTIONS = ("train_cfgs", "env_cfgs", "model_cfgs")

# What else stands under these belongs to verl: passed on with backend verl, refused otherwise.
VERL_ROOTS = frozenset(
    {"actor_rollout_ref", "critic", "trainer", "algorithm", "data", "reward", "reward_model", "ray_kwargs"}
    | {"transfer_queue", "custom_reward_function", "global_profiler"}
)

# verl's and RAGEN's names of estimators.
ESTIMATORS: dict[str, str] = {
    "gae": "ppo",
    "ppo": "ppo",
    "bi_level_gae": "bi_level_gae",
    "turn_gae": "turn_gae",
    "grpo": "grpo",
    "dr_grpo": "dr_grpo",
    "rloo": "rloo",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_pp": "reinforce_pp",
    "gigpo": "gigpo",
}
