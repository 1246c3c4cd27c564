"""Translates a turnwise config to TRL's arguments. Settings that TRL cannot honour are refused by
name."""

import dataclasses
from typing import Any

from turnwise.algos.algorithm import Algorithm
from turnwise.algos.table import PRESETS, build_algorithm, own_parts
from turnwise.config.schema import Config, RolloutConfig, TrainConfig
from turnwise.integrations.memory import recomputes

UNCLIPPED = 1e6
_WITHOUT_CRITIC = [preset for preset in PRESETS.values() if not preset.needs_critic]
CREDITS = ("group_relative", "turn_level", *dict.fromkeys(p.advantage for p in _WITHOUT_CRITIC))
"""Values of `VerifiersGRPOConfig.credit`: two for TRL only, and all estimators without critic."""

Rule = tuple[str, Any, bool, str]
"""A setting, its value, whether it is refused, and why."""


def check_credit(name: str) -> None:
    """Raises ValueError where TRL cannot honour this way of assigning credit."""
    if name in CREDITS:
        return
    if any(name in (p.name, p.advantage) for p in PRESETS.values() if p.needs_critic):
        raise ValueError(
            f"credit {name!r} needs a critic, and TRL has none: use turnwise's own trainer "
            f"(backend native) for it, or one of {', '.join(CREDITS)}"
        )
    raise ValueError(f"credit is one of {', '.join(CREDITS)}, got {name!r}")


def refuse(config: Config) -> Algorithm:
    """The config's algorithm. Raises ValueError, naming the setting, where TRL has no way to honour
    it."""
    for key, value in own_parts(config):
        raise ValueError(
            f"{key} = {value!r} cannot be honoured by backend trl: your own parts run on the "
            "native trainer; use backend native for it"
        )
    algorithm = build_algorithm(config.algo)
    name = config.algo.name
    if algorithm.needs_critic:
        usable = ", ".join(p.name for p in _WITHOUT_CRITIC if p.filter == "none")
        raise ValueError(
            f"algo.name = {name!r} needs a critic, and TRL has none; use backend native, or one of "
            f"{usable}"
        )
    check_credit(algorithm.advantage)
    for key, value, wrong, why in _algorithm_rules(config, algorithm) + _run_rules(config):
        if wrong:
            raise ValueError(
                f"{key} = {value!r} cannot be honoured by backend trl: {why}; use backend native "
                "for it"
            )
    loss_of(algorithm)
    return algorithm


def _algorithm_rules(config: Config, algorithm: Algorithm) -> list[Rule]:
    updates = updates_per_step(config)
    return [
        (
            "algo.filter",
            algorithm.filter,
            algorithm.filter != "none",
            _filter_hint(config.algo.name),
        ),
        (
            "algo.kl_in",
            algorithm.kl_in,
            algorithm.kl_coef > 0 and algorithm.kl_in != "loss",
            "TRL's KL is in the loss",
        ),
        (
            "algo.kl_form",
            algorithm.kl_form,
            algorithm.kl_coef > 0 and algorithm.kl_form != "k3",
            "TRL's KL is k3",
        ),
        (
            "algo.kl_target",
            algorithm.kl_target,
            algorithm.kl_target is not None,
            "TRL's beta is fixed",
        ),
        (
            "algo.tis_cap",
            algorithm.tis_cap,
            algorithm.tis_cap is not None,
            "set trl.vllm_importance_sampling_clip_max",
        ),
        (
            "train.target_kl",
            config.train.target_kl,
            config.train.target_kl is not None and updates > 1,
            "TRL stops no epoch early",
        ),
        (
            "rollout.window",
            config.rollout.window,
            config.rollout.window != "full" and algorithm.kl_coef > 0,
            "TRL scores the reference policy on one row per episode, and a window makes several; "
            "set algo.kl_coef: 0",
        ),
        (
            "algo.penalty_only_groups",
            config.algo.penalty_only_groups,
            config.algo.penalty_only_groups == "drop",
            "TRL trains on every group",
        ),
    ]


def _run_rules(config: Config) -> list[Rule]:
    return [
        (
            "rollout.enough_groups",
            config.rollout.enough_groups,
            config.rollout.enough_groups is not None,
            "its batch has a fixed number of rows",
        ),
        (
            "rollout.on_failure",
            config.rollout.on_failure,
            config.rollout.on_failure == "drop_group",
            "TRL trains on what is left of a group",
        ),
        (
            "rollout.min_group_size",
            config.rollout.min_group_size,
            config.rollout.min_group_size != RolloutConfig().min_group_size,
            "TRL trains on what is left of a group",
        ),
        (
            "eval.baselines",
            True,
            config.eval.baselines is True,
            "the native trainer plays them; use `turnwise eval`",
        ),
        (
            "env.shaping.normalize",
            config.env.shaping.normalize,
            config.env.shaping.normalize != "none",
            "TRL normalises with scale_rewards",
        ),
        (
            "rollout.train.tags",
            config.rollout.train.tags,
            len(config.rollout.train.tags) > 1,
            "one environment per run",
        ),
        (
            "train.time_limit",
            config.train.time_limit,
            config.train.time_limit is not None,
            "set it to null and let the scheduler send SIGTERM, which ends the run after its step",
        ),
        (
            "train.max_minutes",
            config.train.max_minutes,
            config.train.max_minutes is not None,
            "TRL counts steps; set train.steps",
        ),
        (
            "train.max_gap",
            config.train.max_gap,
            config.train.max_gap != TrainConfig().max_gap,
            "TRL stops at no gap; its metrics have sampling_logp_difference",
        ),
        ("train.packing", True, config.train.packing is True, "TRL pads its rows"),
        ("train.compile", config.train.compile, config.train.compile, "set trl.torch_compile"),
    ]


def _filter_hint(name: str) -> str:
    if name == "dapo":
        return (
            "its batch has a fixed number of rows, so DAPO's dynamic sampling is out of reach; its "
            "loss is algo.name: "
            "grpo with algo.reduction: token_mean and algo.clip_high: 0.28"
        )
    return "its batch has a fixed number of rows"


def loss_of(algorithm: Algorithm) -> str:
    """TRL's loss_type for an algorithm's surrogate and reduction."""
    if algorithm.surrogate == "cispo":
        if algorithm.reduction != "token_mean":
            raise ValueError(
                f"algo.reduction = {algorithm.reduction!r} cannot be honoured: TRL's cispo is "
                "token_mean"
            )
        return "cispo"
    # One row is one episode in TRL, so the two means are the same.
    kinds = {
        "token_mean": "dapo",
        "episode_mean": "grpo",
        "sequence_mean": "grpo",
        "token_sum_norm": "dr_grpo",
    }
    return kinds[algorithm.reduction]


def trl_arguments(config: Config, algorithm: Algorithm, *, processes: int = 1) -> dict[str, Any]:
    """Arguments of VerifiersGRPOConfig. Those under `trl` in the config win; one that does not
    exist is refused."""
    from turnwise.integrations.trl.config import VerifiersGRPOConfig

    train, rollout = config.train, config.rollout
    rows = rollout.train.env_groups * rollout.train.group_size
    per_update = rows // (train.mini_batches * processes)
    if per_update * train.mini_batches * processes != rows:
        raise ValueError(
            f"{rows} episodes per step do not divide into train.mini_batches = "
            f"{train.mini_batches} for {processes} "
            "processes"
        )
    longest = rollout.max_context or rollout.max_response_tokens * train.max_turn * 4
    fitting = largest_divisor(per_update, train.token_limit // longest)
    micro = int(config.trl.get("per_device_train_batch_size", fitting))
    if per_update % micro:
        raise ValueError(
            f"trl.per_device_train_batch_size = {micro} does not divide {per_update} episodes per "
            "update"
        )
    precision = _precision(config.model.dtype, train)
    colocated = config.trl.get("use_vllm") and config.trl.get("vllm_mode", "colocate") == "colocate"
    updates = updates_per_step(config)
    clipped = algorithm.surrogate != "policy_gradient"
    chosen: dict[str, Any] = {
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": per_update // micro,
        "steps_per_generation": train.mini_batches * (per_update // micro),
        "num_iterations": train.epochs,
        "num_generations": rollout.train.group_size,
        "max_steps": train.steps * updates,
        "temperature": rollout.temperature,
        "max_tokens_per_turn": rollout.max_response_tokens,
        "max_completion_length": longest,
        "learning_rate": train.lr,
        "weight_decay": train.weight_decay,
        "adam_beta1": train.adam_betas[0],
        "adam_beta2": train.adam_betas[1],
        "lr_scheduler_type": train.schedule,
        "warmup_steps": train.warmup_steps * updates,
        "max_grad_norm": train.max_grad_norm,
        "loss_type": loss_of(algorithm),
        "importance_sampling_level": algorithm.ratio_level,
        "epsilon": algorithm.clip_low if clipped else UNCLIPPED,
        "epsilon_high": _high_clip(algorithm) if clipped else UNCLIPPED,
        "delta": algorithm.dual_clip,
        "beta": algorithm.kl_coef,
        "credit": algorithm.advantage,
        "max_concurrent": rollout.slots,
        "seed": config.seed,
        "shuffle_dataset": False,
        "gradient_checkpointing": recomputes(
            config,
            algorithm,
            device="cpu" if precision["use_cpu"] else "cuda",
            tokens=micro * longest,
            taken=config.trl.get("vllm_gpu_memory_utilization", 0.3) if colocated else 0.0,
        ),
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "steps" if config.checkpoint.every and config.checkpoint.write else "no",
        "save_steps": max(config.checkpoint.every, 1) * updates,
        "save_total_limit": config.checkpoint.keep,
        **precision,
    }
    known = {spec.name for spec in dataclasses.fields(VerifiersGRPOConfig)}
    if algorithm.entropy_coef:
        if "entropy_coef" not in known:
            raise ValueError(
                "algo.entropy_coef needs a TRL release whose GRPOConfig has entropy_coef (1.16)"
            )
        chosen["entropy_coef"] = algorithm.entropy_coef
    for key in config.trl:
        if key not in known:
            raise ValueError(f"trl.{key} is no argument of TRL's GRPOConfig")
    return {**chosen, **config.trl}


def _high_clip(algorithm: Algorithm) -> float:
    """CISPO's bound is a range around 1 here, and the largest weight itself in TRL."""
    return 1.0 + algorithm.clip_high if algorithm.surrogate == "cispo" else algorithm.clip_high


def updates_per_step(config: Config) -> int:
    """What TRL counts as steps, in one of turnwise's."""
    return config.train.mini_batches * config.train.epochs


def largest_divisor(number: int, most: int) -> int:
    """The largest divisor of a number that is at most `most`, and at least one.

    Example:
        >>> largest_divisor(64, 20), largest_divisor(12, 5), largest_divisor(7, 0)
        (16, 4, 1)
    """
    return next(size for size in range(max(min(most, number), 1), 0, -1) if number % size == 0)


def _precision(dtype: str, train: TrainConfig) -> dict[str, bool]:
    import torch

    cpu = train.device == "cpu" or (train.device == "auto" and not torch.cuda.is_available())
    half = dtype if dtype != "auto" else ("float32" if cpu else "bfloat16")
    return {"use_cpu": cpu, "bf16": half == "bfloat16", "fp16": half == "float16"}
