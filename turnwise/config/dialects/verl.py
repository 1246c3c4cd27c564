"""The keys of verl's PPO trainer, of the agent trainer on top of it, and of verl-agent."""

from turnwise.config.dialects.environments import SHOP_DATA, no_env
from turnwise.config.dialects.rules import (
    CLIP,
    EVALUATED,
    AnyRule,
    Differs,
    Fact,
    Moot,
    No,
    Only,
    Rule,
    as_text,
    choice,
    off_below_one,
    trackers,
)

KL = choice({"low_var_kl": "k3", "k3": "k3", "kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2"})
REDUCTION = choice(
    {
        "token-mean": "token_mean",
        "seq-mean-token-mean": "sequence_mean",
        "seq-mean-token-sum-norm": "token_sum_norm",
    }
)


def _with_std(mode: object) -> bool:
    if mode not in ("mean_std_norm", "mean_norm"):
        raise ValueError(f"must be mean_std_norm or mean_norm, got {mode!r}")
    return mode == "mean_std_norm"


_GAMES = "which games are held out: set env.options.games and env.options.val_split"
_WHOLE = "evaluations sample from the whole distribution, at rollout.eval_temperature"

VERL: dict[str, AnyRule] = {
    "agent.max_turn": "train.max_turn",
    "agent.agent_length": Fact(),
    "env_template": Fact(),
    "trainer.total_epochs": Fact(reads="train.steps"),
    "trainer.total_training_steps": Fact(reads="train.steps"),
    "trainer.device": "train.device",
    "trainer.project_name": Rule(to=("log.project",), convert=as_text),
    "trainer.experiment_name": Rule(to=("log.name",), convert=as_text),
    "trainer.default_local_dir": "log.dir",
    "trainer.logger": Rule(to=("log.trackers",), convert=trackers),
    "trainer.val_before_train": "eval.before",
    "trainer.test_freq": Rule(to=("eval.every",), convert=off_below_one),
    "trainer.save_freq": Rule(to=("checkpoint.every",), convert=off_below_one),
    "trainer.max_actor_ckpt_to_keep": "checkpoint.keep",
    "trainer.critic_warmup": "train.critic_warmup",
    "algorithm.adv_estimator": Fact(reads="algo.name"),
    "algorithm.bi_level_gae": Fact(),
    "algorithm.gamma": Fact(reads="algo.gamma"),
    "algorithm.lam": "algo.lam",
    "algorithm.high_level_gamma": "algo.high_level_gamma",
    "algorithm.clip_ratio": CLIP,
    "algorithm.use_kl_in_reward": Fact(),
    "algorithm.kl_ctrl.kl_coef": Fact(reads="algo.kl_coef"),
    "algorithm.kl_penalty": Rule(to=("algo.kl_form",), convert=KL),
    "data.train_batch_size": "rollout.train.env_groups",
    "data.val_batch_size": EVALUATED,
    "data.max_response_length": "rollout.max_response_tokens",
    "data.apply_chat_template_kwargs": "model.chat_template_args",
    "data.seed": "seed",
    "actor_rollout_ref.hybrid_engine": Only(
        True, why="the native sampler always uses the trainer's own weights"
    ),
    "actor_rollout_ref.model.path": "model.path",
    "actor_rollout_ref.model.trust_remote_code": "model.trust_remote_code",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "model.gradient_checkpointing",
    "actor_rollout_ref.model.lora_rank": "model.lora.rank",
    "actor_rollout_ref.model.lora_alpha": "model.lora.alpha",
    "actor_rollout_ref.model.target_modules": "model.lora.target_modules",
    "actor_rollout_ref.rollout.n": "rollout.train.group_size",
    "actor_rollout_ref.rollout.temperature": "rollout.temperature",
    "actor_rollout_ref.rollout.top_p": "rollout.top_p",
    "actor_rollout_ref.rollout.top_k": Rule(to=("rollout.top_k",), convert=off_below_one),
    "actor_rollout_ref.rollout.response_length": "rollout.max_response_tokens",
    "actor_rollout_ref.rollout.max_model_len": "rollout.max_context",
    "actor_rollout_ref.rollout.val_kwargs.temperature": Fact(reads="rollout.eval_temperature"),
    "actor_rollout_ref.actor.optim.lr": "train.lr",
    "actor_rollout_ref.actor.optim.weight_decay": "train.weight_decay",
    "actor_rollout_ref.actor.optim.lr_warmup_steps": "train.warmup_steps",
    "actor_rollout_ref.actor.clip_ratio": CLIP,
    "actor_rollout_ref.actor.clip_ratio_low": "algo.clip_low",
    "actor_rollout_ref.actor.clip_ratio_high": "algo.clip_high",
    "actor_rollout_ref.actor.clip_ratio_c": "algo.dual_clip",
    "actor_rollout_ref.actor.entropy_coeff": "algo.entropy_coef",
    "actor_rollout_ref.actor.grad_clip": "train.max_grad_norm",
    "actor_rollout_ref.actor.ppo_epochs": "train.epochs",
    "actor_rollout_ref.actor.loss_agg_mode": Rule(to=("algo.reduction",), convert=REDUCTION),
    "actor_rollout_ref.actor.use_kl_loss": Fact(),
    "actor_rollout_ref.actor.kl_loss_coef": Fact(reads="algo.kl_coef"),
    "actor_rollout_ref.actor.kl_loss_type": Rule(to=("algo.kl_form",), convert=KL),
    "critic.optim.lr": "train.critic_lr",
    "critic.cliprange_value": "algo.value_clip",
}

# Keys of verl that only the native backend reads; backend verl gets them as they are.
VERL_NATIVE: dict[str, AnyRule] = {
    "actor_rollout_ref.actor.invalid_action_penalty_coef": Fact(),
    "actor_rollout_ref.actor.optim.betas": "train.adam_betas",
    "actor_rollout_ref.actor.optim.clip_grad": "train.max_grad_norm",
    "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": Fact(),
    "actor_rollout_ref.actor.policy_loss.loss_mode": Fact(),
    "actor_rollout_ref.actor.ppo_mini_batch_size": Fact(),
    "actor_rollout_ref.actor.use_invalid_action_penalty": Fact(),
    "actor_rollout_ref.model.override_config": Fact(),
    "actor_rollout_ref.actor.use_ref": Moot(why="a reference is kept where algo.kl_coef needs one"),
    "actor_rollout_ref.rollout.do_sample": Fact(),
    "actor_rollout_ref.rollout.val_kwargs.do_sample": Fact(),
    "actor_rollout_ref.rollout.val_kwargs.logprobs": Moot(why="log-probs are always stored"),
    "actor_rollout_ref.rollout.val_kwargs.n": "rollout.val.group_size",
    "actor_rollout_ref.rollout.val_kwargs.top_k": Differs(why=_WHOLE),
    "actor_rollout_ref.rollout.val_kwargs.top_p": Differs(why=_WHOLE),
    "algorithm.filter_groups.enable": Fact(),
    "algorithm.filter_groups.max_num_gen_batches": Differs(
        why="a rollout is played once; groups without a difference in reward are left out"
    ),
    "algorithm.filter_groups.metric": Differs(
        why="groups are compared by their episodes' rewards, of which penalties are a part"
    ),
    "algorithm.gigpo.enable_similarity": Only(
        False, why="states are equal or not: give your environment a state_key that says so"
    ),
    "algorithm.gigpo.mode": Rule(to=("algo.gigpo_std",), convert=_with_std),
    "algorithm.gigpo.similarity_thresh": Moot(why="it counts only with enable_similarity"),
    "algorithm.gigpo.step_advantage_w": "algo.gigpo_weight",
    "algorithm.hgpo.base_group": "algo.hgpo_episode",
    "algorithm.hgpo.length_weight_alpha": "algo.hgpo_alpha",
    "algorithm.hgpo.mode": Rule(to=("algo.hgpo_std",), convert=_with_std),
    "algorithm.hgpo.weight_type": Only("length", why="comparisons are weighed by their history"),
    "algorithm.kl_ctrl.type": Only("fixed", why="set algo.kl_target for a KL that adapts"),
    "algorithm.norm_adv_by_std_in_grpo": Fact(),
    "critic.model.enable_gradient_checkpointing": "model.gradient_checkpointing",
    "critic.model.lora_alpha": "model.lora.alpha",
    "critic.model.lora_rank": "model.lora.rank",
    "critic.model.path": "model.path",
    "critic.model.target_modules": "model.lora.target_modules",
    "critic.optim.betas": "train.adam_betas",
    "critic.ppo_mini_batch_size": Moot(why="the critic takes the policy's mini-batches"),
    "data.filter_overlong_prompts": Differs(why="an opening that does not fit fails its episode"),
    "data.gen_batch_size": Differs(why="every rollout plays rollout.train.env_groups groups"),
    "data.image_key": Fact(),
    "data.max_prompt_length": Differs(
        why="a prompt and its replies share rollout.max_context; without it, what the model holds"
    ),
    "data.prompt_key": "data.prompt_column",
    "data.return_raw_chat": Moot(why="conversations are always kept as messages"),
    "data.train_files": Fact(),
    "data.truncation": Differs(
        why="a conversation that does not fit ends its episode; rollout.window shows less of it"
    ),
    "data.val_files": Fact(),
    "trainer.default_hdfs_dir": Only(None, why="runs are written to log.dir"),
    "trainer.log_freq": Moot(why="every step is logged"),
    "trainer.log_val_generations": Differs(why="every episode is stored: log.episodes_every"),
    "trainer.n_gpus_per_node": Moot(
        why="the native trainer runs on one device; for more set backend: verl"
    ),
    "trainer.nnodes": Fact(),
    "trainer.resume_from_path": Fact(),
    "trainer.resume_mode": Fact(),
    "trainer.val_only": Fact(),
}

# Where and how fast things run.
_MEMORY = Moot(why="memory is bounded by tokens here: set train.micro_batch_tokens")
VERL_NATIVE.update(
    {
        f"{part}.{name}": _MEMORY
        for part in (
            *(f"actor_rollout_ref.{role}" for role in ("actor", "ref", "rollout")),
            *("critic", "reward_model"),
        )
        for name in (
            *("micro_batch_size", "micro_batch_size_per_gpu"),
            *("ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu"),
            *("log_prob_micro_batch_size", "log_prob_micro_batch_size_per_gpu"),
            *("ppo_max_token_len_per_gpu", "log_prob_max_token_len_per_gpu"),
            *("use_dynamic_bsz", "log_prob_use_dynamic_bsz", "ulysses_sequence_parallel_size"),
            *("fsdp_config", "megatron"),
        )
    }
)
VERL_NATIVE.update(
    {
        f"{part}.model.{name}": _MEMORY
        for part in ("actor_rollout_ref", "critic")
        for name in ("use_remove_padding", "fsdp_config")
    }
)
VERL_NATIVE.update(
    {
        f"actor_rollout_ref.rollout.{name}": Moot(why="the native sampler is turnwise's own")
        for name in (
            *("name", "mode", "load_format", "dtype", "tensor_model_parallel_size"),
            *("gpu_memory_utilization", "max_num_batched_tokens", "max_num_seqs", "prompt_length"),
            *("enforce_eager", "free_cache_engine", "enable_chunked_prefill", "disable_log_stats"),
        )
    }
)

# verl-agent: the environment manager on top of verl.
VERL_AGENT: dict[str, AnyRule] = {
    "env.env_name": Fact(reads="env.name"),
    "env.seed": "seed",
    "env.max_steps": "env.max_turn",
    "env.history_length": Fact(),
    "env.rollout.n": "rollout.train.group_size",
    "env.resources_per_worker": Moot(why="environments run where rollout.isolation says"),
    "env.sokoban.mode": Only(
        ("text", "human"), why="environments show text, not images (rgb_array)"
    ),
    "env.sokoban.dim_room": "env.options.dim",
    "env.sokoban.num_boxes": "env.options.num_boxes",
    "env.sokoban.search_depth": "env.options.search_depth",
    "env.search": No(why=no_env("search")),
    "env.discoveryworld": No(why=no_env("discoveryworld")),
    "env.alfworld.eval_dataset": Differs(why=_GAMES),
    "trainer.val_out": Differs(why=_GAMES),
    "env.webshop.use_small": Differs(why=SHOP_DATA),
    "env.webshop.human_goals": Only(False, why="set env.options.goals: human"),
}
VERL_AGENT.update(
    {
        f"{part}": No(
            why="rewards come from the environment, or from data.reward = file.py:function"
        )
        for part in ("reward_model.model", "custom_reward_function")
    }
)
_BUFFERS = ("reward_model.overlong_buffer", "reward_model.reward_kwargs.overlong_buffer_cfg")
VERL_AGENT.update(
    {f"{key}.{name}": Fact() for key in _BUFFERS for name in ("enable", "len", "penalty_factor")}
)
VERL_AGENT.update({f"{key}.log": Moot(why="reward_parts of an episode has it") for key in _BUFFERS})
VERL_AGENT["reward_model.reward_manager"] = Fact()
VERL_AGENT["reward_model.reward_kwargs.max_resp_len"] = Fact()
