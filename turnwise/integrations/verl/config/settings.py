"""Config -> verl's config: one table of settings, which `turnwise train` composes and verl's own
command takes."""

import os
from importlib.util import find_spec
from operator import attrgetter
from typing import Any

from turnwise.algos.algorithm import Algorithm
from turnwise.algos.table import build_algorithm, own_parts
from turnwise.config.schema import Config, ModelConfig
from turnwise.integrations.memory import recomputes
from turnwise.integrations.verl.config.keys import flat, owned, unknown
from turnwise.integrations.verl.config.placement import Placement
from turnwise.integrations.verl.trainer.losses import DUAL_CLIP_OFF, REDUCTIONS, loss_mode
from turnwise.log.doctor import COLLAPSED_STEPS
from turnwise.models.memory import meta_model
from turnwise.models.packing import unpackable_by_config, window_of

MODE = "turnwise"
"""Our trainer's name in verl's registry (trainer.v1.trainer_mode)."""
PACKED_ATTENTION = "turnwise_verl"
"""The name under which `engines/attention.py` registers its function."""
_KL_FORMS = {"k1": "kl", "k2": "mse", "k3": "low_var_kl"}
_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_NEVER = 1_000_000_000
_ROLLOUT_NAME = "actor_rollout_ref.rollout.name"
_LOSS_MODE = "actor_rollout_ref.actor.policy_loss.loss_mode"
_SEEN = ("vllm", "sglang", "hf")
"""The rollout engines that are known to keep the tokens of a stop string."""
DEFAULT_CONTEXT = 4096
"""Tokens of a context where rollout.max_context is not set: verl must know before it loads a
model."""


class UnsupportedError(ValueError):
    """verl cannot honour a setting. The message names every such setting, and what to do."""


def engine_name(config: Config, *, device: str) -> str:
    """The rollout engine: the one that `verl: {actor_rollout_ref.rollout.name: ...}` names; else
    vllm or sglang where installed and there is a GPU, else our own.

    Example:
        >>> engine_name(Config(), device="cpu")
        'hf'
    """
    named = flat(config.verl).get(_ROLLOUT_NAME)
    if named is not None:
        return str(named)
    if device == "cpu":
        return "hf"
    return next((name for name in ("vllm", "sglang") if find_spec(name) is not None), "hf")


def refusals(config: Config, *, engine: str = "hf") -> list[str]:
    """The settings that verl cannot honour, each with its remedy. Empty: none.

    Example:
        >>> refusals(Config())
        []
        >>> refusals(Config(model={"critic": "shared"}))
        ["model.critic='shared': verl's critic has its own trunk; use separate"]
    """
    own = own_parts(config)
    if own:
        return [f"{key}={value!r}: your own parts need backend native" for key, value in own]
    rules = [*_model_rules(config, engine), *_step_rules(config, engine)]
    found = [(name, attrgetter(name)(config), why) for name, refused, why in rules if refused]
    return [*(f"{name}={value!r}: {why}" for name, value, why in found), *owned(config.verl)]


Rule = tuple[str, bool, str]
"""A setting, whether its value is refused, and why with what to do."""


def _model_rules(config: Config, engine: str) -> list[Rule]:
    model, lora = config.model, config.model.lora
    return [
        (
            "model.critic",
            model.critic == "shared",
            "verl's critic has its own trunk; use separate",
        ),
        (
            "train.time_limit",
            config.train.time_limit is not None,
            "verl's run ends between steps; set train.max_minutes",
        ),
        (
            "train.max_collapsed_steps",
            config.train.max_collapsed_steps not in (0, COLLAPSED_STEPS),
            "verl's metrics do not tell replies apart, so no collapsed run is stopped; remove it",
        ),
        (
            "model.gguf_file",
            model.gguf_file is not None,
            "verl reads safetensors; convert the model",
        ),
        (
            "model.adapter",
            model.adapter is not None,
            "verl reads whole weights; merge the adapter into the model first",
        ),
        ("model.lora.dropout", lora.dropout > 0, "verl's LoRA has no dropout; set it to 0"),
        (
            "model.lora.rank",
            lora.rank > 0 and engine == "hf",
            "the hf engine takes whole weights; use vllm or sglang",
        ),
        (
            "model.lora.alpha",
            lora.rank > 0 and lora.alpha % 1 != 0,
            "verl takes a whole number; round it",
        ),
    ]


def _step_rules(config: Config, engine: str) -> list[Rule]:
    algorithm = build_algorithm(config.algo)
    train, groups, rollout = config.train, config.rollout.train, config.rollout
    adapts_loss = algorithm.kl_target is not None and algorithm.kl_in == "loss"
    by_episode = algorithm.reduction in ("episode_mean", "token_sum_norm")
    return [
        (
            "algo.kl_target",
            adapts_loss and algorithm.reduction == "token_sum_norm",
            "verl reports no KL per token under this reduction; set algo.kl_in: reward, or another "
            "algo.reduction",
        ),
        (
            "train.target_kl",
            train.target_kl is not None and _LOSS_MODE in flat(config.verl),
            f"turnwise's losses report the KL, and verl.{_LOSS_MODE} names another; remove one",
        ),
        (
            "train.deterministic",
            train.deterministic is True,
            "an engine batches requests in the order in which verl's workers send them; remove it",
        ),
        (
            "train.mini_batches",
            groups.env_groups % train.mini_batches != 0,
            f"verl splits whole groups, and rollout.train.env_groups is {groups.env_groups}; use a "
            "divisor of it",
        ),
        (
            "rollout.window",
            rollout.window != "full" and by_episode,
            "episodes become several rows, and verl's reduction counts rows; set algo.reduction to "
            "token_mean",
        ),
        (
            "rollout.enough_groups",
            rollout.enough_groups is not None and bool(flat(config.verl).get("turnwise.lockstep")),
            "in lockstep all episodes play their turns together; remove verl.turnwise.lockstep",
        ),
        (
            "rollout.stop",
            bool(rollout.stop) and engine not in _SEEN,
            "that this engine keeps the tokens of a stop string was not checked; use one of "
            f"{', '.join(_SEEN)}",
        ),
        (
            "eval.baselines",
            config.eval.baselines is True,
            "the native trainer plays them; use `turnwise eval`",
        ),
        (
            "eval.after",
            not config.eval.after and config.eval.every > 0,
            "verl validates at the end",
        ),
    ]


def check_supported(config: Config, *, engine: str) -> None:
    """Raises UnsupportedError where verl cannot honour a setting, or does not know it."""
    found = refusals(config, engine=engine)
    if config.verl:
        found += unknown(config.verl)
    if found:
        raise UnsupportedError(
            "the verl backend cannot honour these settings:\n  " + "\n  ".join(found)
        )


def verl_settings(
    config: Config,
    *,
    placement: Placement,
    model_path: str,
    tokenizer_path: str | None = None,
    run_dir: str,
) -> dict[str, Any]:
    """verl's dotted keys for this config. What stands under `verl:` in the config takes precedence.

    Raises:
        UnsupportedError: verl cannot honour a setting.
    """
    engine = engine_name(config, device=placement.device)
    check_supported(config, engine=engine)
    algorithm = build_algorithm(config.algo)
    settings = {
        **_data(config),
        **_model(
            config,
            placement,
            model_path=model_path,
            tokenizer_path=tokenizer_path,
            algorithm=algorithm,
        ),
        **_optimisers(config, algorithm),
        **_rollout(config, placement, engine=engine),
        **_loss(config, algorithm),
        **_trainer(config, placement, run_dir=run_dir),
    }
    return settings | flat(config.verl)


def max_context(config: Config) -> int:
    return config.rollout.max_context or DEFAULT_CONTEXT


def _micro_batch_tokens(config: Config) -> int:
    return max(config.train.token_limit, max_context(config))


def _data(config: Config) -> dict[str, Any]:
    groups, length = config.rollout.train, max_context(config)
    prompt = length // 4
    return {
        "data.train_files": "train",
        "data.val_files": "val",
        "data.train_max_samples": 2
        * config.train.steps
        * groups.env_groups,  # rows to spare for refilled groups
        "data.val_max_samples": config.eval.episodes,
        "data.train_batch_size": groups.env_groups,
        "data.val_batch_size": None,
        "data.max_prompt_length": prompt,
        "data.max_response_length": length - prompt,
        "data.shuffle": False,
        "data.seed": config.seed,
        "data.dataloader_num_workers": 0,
        "data.custom_cls.path": "pkg://turnwise.integrations.verl.rollout.dataset",
        "data.custom_cls.name": "EnvDataset",
    }


def _model(
    config: Config,
    placement: Placement,
    *,
    model_path: str,
    tokenizer_path: str | None,
    algorithm: Algorithm,
) -> dict[str, Any]:
    model, cpu = config.model, placement.device == "cpu"
    again = recomputes(
        config,
        algorithm,
        device=placement.device,
        tokens=_micro_batch_tokens(config),
        ranks=placement.ranks,
        # Other engines sleep in an update.
        copy=engine_name(config, device=placement.device) == "hf",
    )
    attention, packed = _attention(config, cpu=cpu, model_path=model_path)
    dtype = model.dtype if model.dtype != "auto" else "float32" if cpu else "bfloat16"
    settings: dict[str, Any] = {}
    for where, engine in (
        ("actor_rollout_ref", "actor_rollout_ref.actor.fsdp_config"),
        ("critic", "critic.fsdp"),
    ):
        settings |= {
            f"{where}.model.path": model_path,
            f"{where}.model.tokenizer_path": tokenizer_path,
            f"{where}.model.trust_remote_code": model.trust_remote_code,
            f"{where}.model.enable_gradient_checkpointing": again,
            f"{where}.model.use_remove_padding": packed,
            f"{where}.model.override_config.attn_implementation": attention,
            f"{engine}.strategy": "fsdp2",
            f"{engine}.use_torch_compile": config.train.compile,
            f"{engine}.mixed_precision.param_dtype": _DTYPES[dtype],
        }
    settings |= {
        # Agent loop workers load it.
        "actor_rollout_ref.model.external_lib": "turnwise.integrations.verl.rollout.agent_loop",
        "actor_rollout_ref.actor.strategy": "fsdp2",
        "actor_rollout_ref.ref.strategy": "fsdp2",
        "actor_rollout_ref.ref.fsdp_config.strategy": "fsdp2",
        "actor_rollout_ref.ref.fsdp_config.use_torch_compile": config.train.compile,
        "actor_rollout_ref.ref.fsdp_config.mixed_precision.param_dtype": _DTYPES[dtype],
        "actor_rollout_ref.rollout.dtype": dtype,
        "critic.strategy": "fsdp2",
        "critic.enable": algorithm.needs_critic,
    }
    if model.chat_template is not None and not model.chat_template_args:
        settings["actor_rollout_ref.model.custom_chat_template"] = model.chat_template
    if model.lora.rank:
        targets = model.lora.target_modules
        settings |= {
            "actor_rollout_ref.model.lora_rank": model.lora.rank,
            "actor_rollout_ref.model.lora_alpha": int(model.lora.alpha),
            "actor_rollout_ref.model.target_modules": targets
            if isinstance(targets, str)
            else list(targets),
        }
    return settings


def _attention(config: Config, *, cpu: bool, model_path: str) -> tuple[str, bool]:
    """(the attention of actor and critic, whether their rows are packed). Without flash-attention
    rows are packed with turnwise's own attention, where the model allows it.

    Raises:
        UnsupportedError: `train.packing: true`, and the model does not allow it.
    """
    packing = config.train.packing
    if not cpu and find_spec("flash_attn") is not None:
        return "flash_attention_2", packing is not False
    if packing is False or (packing == "auto" and cpu):
        return "sdpa", False
    known = config.model.path is not None
    model = meta_model(config.model if known else ModelConfig(path=model_path))
    reason, window = unpackable_by_config(model), window_of(model)
    longest = max_context(config)
    if reason is None and window is not None and window < longest:
        reason = f"its window of {window} tokens is shorter than a row may be ({longest})"
    if reason is None:
        return PACKED_ATTENTION, True
    if packing is True:
        raise UnsupportedError(
            f"train.packing=True: rows of this model cannot be packed without flash-attention, "
            f"because {reason}; install flash-attn, or set auto"
        )
    return "sdpa", False


def _optimisers(config: Config, algorithm: Algorithm) -> dict[str, Any]:
    train = config.train
    tokens = _micro_batch_tokens(config)
    settings: dict[str, Any] = {
        "trainer.critic_warmup": train.critic_warmup + 1 if train.critic_warmup else 0
    }
    for where, lr in (("actor_rollout_ref.actor", train.lr), ("critic", train.critic_lr)):
        settings |= {
            f"{where}.optim.lr": lr,
            f"{where}.optim.lr_warmup_steps": 0,  # schedule and warm-up are ours: pace.py
            f"{where}.optim.lr_scheduler_type": "constant",
            f"{where}.optim.weight_decay": train.weight_decay,
            f"{where}.optim.betas": list(train.adam_betas),
            f"{where}.optim.clip_grad": train.max_grad_norm,
            f"{where}.grad_clip": train.max_grad_norm,
            f"{where}.ppo_mini_batch_size": config.rollout.train.env_groups // train.mini_batches,
            f"{where}.ppo_epochs": train.epochs,
            f"{where}.shuffle": train.mini_batches > 1,
            f"{where}.data_loader_seed": config.seed,
            f"{where}.use_dynamic_bsz": True,
            f"{where}.ppo_max_token_len_per_gpu": tokens,
        }
    settings |= {
        "critic.cliprange_value": _NEVER if algorithm.value_clip is None else algorithm.value_clip,
        "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz": True,
        "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu": tokens,
        "actor_rollout_ref.ref.log_prob_use_dynamic_bsz": True,
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": tokens,
    }
    return settings


def _rollout(config: Config, placement: Placement, *, engine: str) -> dict[str, Any]:
    rollout = config.rollout
    cpu = placement.device == "cpu"
    by_engine: dict[str, Any] = {}
    if cpu and engine == "vllm":  # nothing to capture or to put to sleep
        by_engine = {
            "actor_rollout_ref.rollout.enforce_eager": True,
            "actor_rollout_ref.rollout.enable_sleep_mode": False,
        }
    if engine == "sglang":
        # without a tokenizer its scheduler crashes on a stop string
        by_engine["actor_rollout_ref.rollout.skip_tokenizer_init"] = not rollout.stop
    if cpu and engine == "sglang":
        own = {
            "device": "cpu",
            "attention_backend": "torch_native",
            "disable_cuda_graph": True,
            "enable_memory_saver": False,
            "max_total_tokens": rollout.slots
            * max_context(config),  # else half of the machine's memory is cache
        }
        by_engine |= {
            f"actor_rollout_ref.rollout.engine_kwargs.sglang.{key}": value
            for key, value in own.items()
        }
        # its adapters need pinned memory, which only an accelerator has: verl adds them to the
        # weights that it sends
        by_engine["actor_rollout_ref.model.lora.merge"] = config.model.lora.rank > 0
    return {
        **by_engine,
        _ROLLOUT_NAME: engine,
        "actor_rollout_ref.rollout.mode": "async",
        "actor_rollout_ref.rollout.n": rollout.train.group_size,
        "actor_rollout_ref.rollout.temperature": rollout.temperature,
        "actor_rollout_ref.rollout.top_k": -1,
        "actor_rollout_ref.rollout.top_p": 1.0,
        "actor_rollout_ref.rollout.seed": config.seed,
        "actor_rollout_ref.rollout.val_kwargs.n": 1,
        "actor_rollout_ref.rollout.val_kwargs.temperature": rollout.eval_temperature,
        "actor_rollout_ref.rollout.val_kwargs.do_sample": rollout.eval_temperature > 0,
        "actor_rollout_ref.rollout.max_model_len": max_context(config),
        "actor_rollout_ref.rollout.max_num_seqs": rollout.slots,
        "actor_rollout_ref.rollout.calculate_log_probs": True,
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
        "actor_rollout_ref.rollout.free_cache_engine": not cpu,
        "actor_rollout_ref.rollout.agent.num_workers": agent_workers(placement.ranks),
        "actor_rollout_ref.rollout.agent.default_agent_loop": "turnwise",
        "actor_rollout_ref.rollout.agent.agent_loop_manager_class": (
            "turnwise.integrations.verl.rollout.spread.SpreadManager"
        ),
        "reward.num_workers": 0,  # the agent loop rewards; workers of verl would idle
    }


def agent_workers(ranks: int, *, cores: int | None = None) -> int:
    """How many processes play the episodes: one per rank, or per four cores where that is more, at
    most eight. One has verl's work for an episode to do, about 30 ms, and no other core helps it.

    Example:
        >>> agent_workers(1, cores=16), agent_workers(1, cores=2), agent_workers(32, cores=64)
        (4, 1, 8)
    """
    cores = cores or os.cpu_count() or 1
    return min(8, max(1, ranks, cores // 4))


def _loss(config: Config, algorithm: Algorithm) -> dict[str, Any]:
    in_loss = algorithm.kl_coef > 0 and algorithm.kl_in == "loss"
    reduction = REDUCTIONS[algorithm.reduction]
    settings: dict[str, Any] = {
        "algorithm.adv_estimator": algorithm.advantage,
        "algorithm.gamma": algorithm.gamma,
        "algorithm.lam": algorithm.lam,
        "algorithm.use_kl_in_reward": algorithm.kl_coef > 0 and not in_loss,
        _LOSS_MODE: loss_mode(algorithm),
        "actor_rollout_ref.actor.clip_ratio_low": algorithm.clip_low,
        "actor_rollout_ref.actor.clip_ratio_high": algorithm.clip_high,
        "actor_rollout_ref.actor.clip_ratio_c": algorithm.dual_clip or DUAL_CLIP_OFF,
        "actor_rollout_ref.actor.entropy_coeff": algorithm.entropy_coef,
        "actor_rollout_ref.actor.use_kl_loss": in_loss,
        "actor_rollout_ref.actor.kl_loss_coef": algorithm.kl_coef,
        "actor_rollout_ref.actor.kl_loss_type": _KL_FORMS[algorithm.kl_form],
        "actor_rollout_ref.actor.loss_agg_mode": reduction,
        "critic.loss_agg_mode": reduction,
    }
    if algorithm.reduction == "token_sum_norm":
        norm = algorithm.norm_tokens
        settings |= {
            "actor_rollout_ref.actor.loss_scale_factor": norm,
            "critic.loss_scale_factor": norm,
        }
    return settings


def _trainer(config: Config, placement: Placement, *, run_dir: str) -> dict[str, Any]:
    steps, evaluation = config.train.steps, config.eval
    return {
        "trainer.use_v1": True,
        "trainer.v1.trainer_mode": MODE,
        "trainer.v1.sampler.sync_refill_failed_groups": True,
        "trainer.device": placement.device,
        "trainer.nnodes": placement.nodes,
        "trainer.n_gpus_per_node": placement.gpus,
        "trainer.total_training_steps": steps,
        "trainer.total_epochs": 2,
        "trainer.project_name": config.log.project,
        "trainer.experiment_name": config.log.name or "run",
        "trainer.logger": list(config.log.trackers),
        "trainer.val_before_train": evaluation.before,
        "trainer.test_freq": evaluation.every or (steps if evaluation.after else -1),
        "trainer.save_freq": (config.checkpoint.every or steps) if config.checkpoint.write else -1,
        "trainer.max_actor_ckpt_to_keep": config.checkpoint.keep,
        "trainer.max_critic_ckpt_to_keep": config.checkpoint.keep,
        "trainer.default_local_dir": f"{run_dir}/checkpoints",
        "trainer.resume_mode": "disable",
        "transfer_queue.enable": True,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": max(1, placement.nodes),
        "ray_kwargs.ray_init.include_dashboard": False,
    }
