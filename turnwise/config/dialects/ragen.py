"""RAGEN's keys: agent proxy, environment state manager, custom environments, rollout filter."""

from turnwise.config.dialects.rules import (
    EVALUATED,
    ROWS_PER_GPU,
    AnyRule,
    Differs,
    Fact,
    Moot,
    Only,
    Rule,
    every_format,
    off_below_one,
)

FILTER_KEYS = ("ratio", "type", "value", "strategy", "include_zero", "top_p_prob_mode", "metric")
_NO_LENGTH_WEIGHT = Only(False, why="advantages are not weighted by the reply's length")
_API_PLAYER = Differs(
    why="who plays an evaluation is said on the command line: `turnwise eval FILE --player "
    "openai:URL#MODEL`"
)

RAGEN: dict[str, AnyRule] = {
    "agent_proxy.max_turn": "train.max_turn",
    "agent_proxy.use_environment": Fact(),
    "agent_proxy.action_sep": every_format("action_sep"),
    "agent_proxy.max_actions_per_turn": every_format("max_actions_per_turn"),
    "agent_proxy.enable_think": every_format("think"),
    "agent_proxy.use_turn_scores": Fact(),
    "agent_proxy.context_window_mode": Fact(),
    "agent_proxy.max_context_window": Fact(),
    "agent_proxy.batch_adjust_mode": Moot(why="no sample is copied or dropped to fit a batch size"),
    "agent_proxy.reward_normalization.grouping": Fact(),
    "agent_proxy.reward_normalization.method": Fact(),
    "es_manager.format_penalty": every_format("format_penalty"),
    "ctx_manager.generation.gen_config.response_length": "rollout.max_response_tokens",
    "ctx_manager.generation.gen_config.temperature": "rollout.temperature",
    "ctx_manager.generation.gen_config.top_p": "rollout.top_p",
    "ctx_manager.generation.gen_config.top_k": Rule(to=("rollout.top_k",), convert=off_below_one),
    "custom_envs": Fact(),
    "model_path": "model.path",
    "seed.train": "seed",
    "seed.val": Differs(
        why="validation tasks are derived from the one `seed` and are disjoint from the training "
        "tasks"
    ),
    "lora.rank": "model.lora.rank",
    "lora.alpha": "model.lora.alpha",
    "lora.target_modules": "model.lora.target_modules",
    "enable_response_mask": Only(
        True, why="only tokens that the model sampled are ever trained on"
    ),
    "micro_batch_size_per_gpu": ROWS_PER_GPU,
    "log_prob_micro_batch_size_per_gpu": ROWS_PER_GPU,
    "ppo_mini_batch_size": Fact(),
    "grpo_advantage_length_weight": _NO_LENGTH_WEIGHT,
    "system.CUDA_VISIBLE_DEVICES": Moot(
        why="set train.device, or the environment variable CUDA_VISIBLE_DEVICES"
    ),
    "use_critic": Moot(why="algo.name says whether there is a critic"),
    "ctx_manager.generation.gen_config.kwargs": Only(None, why="sampling is set under rollout"),
    "collapse_detection": Moot(why="it is a measurement; see docs/metrics.md for what is measured"),
    "model_config": _API_PLAYER,
    "model_info": _API_PLAYER,
    "output": Differs(why="`turnwise eval FILE --out EPISODES.jsonl` writes the episodes"),
    "actor_rollout_ref.actor.grpo_advantage_length_weight": _NO_LENGTH_WEIGHT,
    "actor_rollout_ref.actor.filter_loss_scaling": Only("none", why="the loss is not scaled by it"),
    "actor_rollout_ref.rollout.tp_size_check": Moot(why="there is one device"),
    "algorithm.zero_task_advantage": Only(False, why="advantages are never zeroed"),
    "algorithm.soft_advantage_reweight": Only(False, why="use algo.filter instead"),
    "trainer.validation_steps": Only(1, why="set eval.episodes to how many are played in all"),
    "trainer.generations_to_log_to_wandb": Differs(
        why="every episode is stored: log.episodes_every"
    ),
    "trainer.local_log_dir": "log.dir",
    "trainer.max_critic_ckpt_to_keep": Moot(why="a checkpoint holds policy and critic"),
    "trainer.log_group_rv_table": Moot(why="metrics.jsonl has the spread of groups"),
}
RAGEN.update(
    {
        f"es_manager.{split}.{theirs}": f"rollout.{split}.{ours}"
        for split in ("train", "val")
        for theirs, ours in {
            "env_groups": "env_groups",
            "group_size": "group_size",
            "env_configs.tags": "tags",
            "env_configs.n_groups": "n_groups",
        }.items()
    }
)
RAGEN["es_manager.val.env_groups"] = EVALUATED
RAGEN.update({f"actor_rollout_ref.rollout.rollout_filter_{name}": Fact() for name in FILTER_KEYS})
RAGEN.update(
    {
        f"actor_rollout_ref.rollout.rollout_filter_{name}": Differs(why=why)
        for name, why in {
            "selection_eps": "groups are kept without a slack",
            "empty_stop_steps": "train.max_idle_steps ends a run in which nothing can be learnt",
        }.items()
    }
)
RAGEN.update(
    {
        f"trainer.{name}": Only((False, None), why="gradients are not analysed by buckets")
        for name in (
            *("gradient_analysis_mode", "gradient_analysis_only", "exit_after_gradient_analysis"),
            *("gradient_analysis_env_groups", "gradient_analysis_group_size"),
            "gradient_analysis_log_prefilter",
        )
    }
)
RAGEN.update(
    {
        key: Moot(why="gradients are not analysed by buckets")
        for key in (
            "trainer.gradient_analysis_every",
            "actor_rollout_ref.rollout.gradient_analysis_num_buckets",
            "actor_rollout_ref.rollout.gradient_analysis_bucket_mode",
        )
    }
)
