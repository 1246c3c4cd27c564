"""The keys of align-anything and of its multi-turn PPO trainer."""

from turnwise.config.dialects.rules import (
    CLIP,
    NO_DEEPSPEED,
    ROWS_PER_GPU,
    AnyRule,
    Differs,
    Fact,
    Moot,
    No,
    Only,
    Rule,
    trackers,
)

_TEXT_ONLY = No(why="the native trainer trains models of text only")
_NO_REWARD_MODEL = No(
    why="rewards come from the environment, or from a function: data.reward = file.py:function"
)
_OF_DATA = Moot(why="it says how a data set is read; here data.prompts is a JSONL file")

ALIGN_ANYTHING: dict[str, AnyRule] = {
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
    "train_cfgs.clip": CLIP,
    "train_cfgs.clip_ratio": CLIP,
    "train_cfgs.clip_range_ratio": CLIP,
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
    "train_cfgs.per_device_train_batch_size": ROWS_PER_GPU,
    "train_cfgs.per_device_prompt_batch_size": ROWS_PER_GPU,
    "train_cfgs.per_device_eval_batch_size": ROWS_PER_GPU,
    "train_cfgs.gradient_accumulation_steps": ROWS_PER_GPU,
    "train_cfgs.ptx_coeff": Fact(),
    "train_cfgs.critic_gradient_checkpointing": Moot(
        why="model.gradient_checkpointing is for both"
    ),
    "train_cfgs.actor_lr_warmup_ratio": Fact(),
    "train_cfgs.critic_lr_warmup_ratio": Differs(why="the critic follows train.warmup_steps"),
    "train_cfgs.critic_lr_scheduler_type": Differs(why="the critic follows train.schedule"),
    "train_cfgs.critic_weight_decay": Differs(why="the critic follows train.weight_decay"),
    "train_cfgs.eval_strategy": Differs(why="evaluations are counted in steps: eval.every"),
    "train_cfgs.normalize_reward": Only(False, why="set env.shaping.normalize: running"),
    "train_cfgs.n_samples_per_prompt": "rollout.train.group_size",
    "train_cfgs.advantage_estimator": Fact(),
    "train_cfgs.freeze_language_model": Only(False, why="it is the policy that is trained"),
    "train_cfgs.freeze_mm_proj": _TEXT_ONLY,
    "train_cfgs.freeze_vision_tower": _TEXT_ONLY,
    "train_cfgs.freeze_vision_proj": _TEXT_ONLY,
    "train_cfgs.freeze_audio_tower": _TEXT_ONLY,
    "train_cfgs.freeze_audio_proj": _TEXT_ONLY,
    "train_cfgs.ds_cfgs": NO_DEEPSPEED,
    "model_cfgs.model_name_or_path": "model.path",
    "model_cfgs.actor_model_name_or_path": "model.path",
    "model_cfgs.trust_remote_code": "model.trust_remote_code",
    "model_cfgs.model_max_length": "rollout.max_context",
    "model_cfgs.temperature": "rollout.temperature",
    "model_cfgs.top_p": "rollout.top_p",
    "model_cfgs.max_new_tokens": "rollout.max_response_tokens",
    "model_cfgs.repetition_penalty": Only(
        1.0, why="it changes the sampled distribution but not the scored one"
    ),
    "model_cfgs.reward_model_name_or_path": _NO_REWARD_MODEL,
    "model_cfgs.remote_rm_url": _NO_REWARD_MODEL,
    "model_cfgs.remote_rm_timeout": _NO_REWARD_MODEL,
    "model_cfgs.remote_rm_retry_times": _NO_REWARD_MODEL,
    "model_cfgs.reward_critic_model_name_or_path": Differs(
        why="the critic starts from model.path, not from a reward model"
    ),
    "logger_cfgs.cache_dir": Moot(why="set the environment variable HF_HOME"),
    "special_tokens": Only(None, why="add them to the tokenizer at model.tokenizer"),
    "bnb_cfgs.use_bnb": Only(False, why="weights are not quantised; use model.lora"),
    "vllm_cfgs": Moot(why="the native sampler is turnwise's own"),
    "logger_cfgs.log_type": Rule(to=("log.trackers",), convert=trackers),
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
    "lora_cfgs.task_type": Moot(why="it is a causal language model"),
    "lora_cfgs.inference_mode": Only(False, why="the adapters are what is trained"),
    "lora_cfgs.save_full_model": Differs(
        why="a checkpoint's model folder is the whole model, adapters merged"
    ),
}
ALIGN_ANYTHING.update(
    {
        f"bnb_cfgs.{name}": Moot(why="it counts only with bnb_cfgs.use_bnb")
        for name in (
            "load_in_4bit",
            "load_in_8bit",
            "bnb_4bit_quant_type",
            "bnb_4bit_use_double_quant",
            "bnb_4bit_compute_dtype",
        )
    }
)
ALIGN_ANYTHING.update(
    {
        f"data_cfgs.{part}_{name}": Fact() if name in ("datasets", "data_files") else _OF_DATA
        for part in ("train", "eval", "ptx")
        for name in (
            *("datasets", "template", "size", "split", "name", "subset", "data_files"),
            "optional_args",
        )
    }
)
