# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
"""Creates engine, rollout config and player from TRL's arguments."""

import logging
from typing import Any

from accelerate import DistributedType
from accelerate.utils import gather_object

from turnwise.chat.render import Renderer
from turnwise.config.schema import Config, EnvConfig, RolloutConfig, TrainConfig
from turnwise.envs.base import EnvError
from turnwise.generate.base import Generator
from turnwise.generate.hf import HFGenerator
from turnwise.generate.stops import end_ids
from turnwise.integrations.trl.config import VerifiersGRPOConfig, resolved
from turnwise.integrations.trl.engines import Budgeted, Gate, TRLGenerator, base_model, snapshot
from turnwise.integrations.trl.player import BatchPlayer
from turnwise.integrations.trl.sources import EnvSource

logger = logging.getLogger(__name__)
DEFAULT_TURNS = 10
PROBED_PROMPTS = 8


def refuse_unsupported(args: VerifiersGRPOConfig) -> None:
    """Raises ValueError for the first argument that a multi-turn run cannot honour."""
    where = "async generation" if args.enable_async_generation else "multi-turn training"
    changed: dict[str, Any] = {
        "top_p": args.top_p not in (None, 1.0),
        "top_k": args.top_k not in (None, 0, -1),
        "min_p": args.min_p not in (None, 0.0),
        "repetition_penalty": args.repetition_penalty not in (None, 1.0),
    }
    for name, wrong in changed.items():
        if wrong:
            raise ValueError(
                f"{name} = {getattr(args, name)} changes the sampled distribution but not the "
                f"scored one, so {where} "
                f"would learn from the wrong ratios; leave {name} at its default"
            )
    if args.temperature <= 0:
        raise ValueError(f"training needs a temperature above 0, got {args.temperature}")
    if args.generation_kwargs and args.engine == "local":
        raise ValueError(
            "generation_kwargs mean nothing to engine 'local'; remove them or set engine='trl'"
        )
    if args.credit != "group_relative":
        _refuse_beside_credit(args)


def _refuse_beside_credit(args: VerifiersGRPOConfig) -> None:
    """Raises ValueError for settings of TRL's own advantages if another credit replaces them."""
    # turn_level compares within groups, scaled or not; the estimators have their own scale.
    scales = ("group", "none") if args.credit == "turn_level" else ("group",)
    rules = [
        (
            "scale_rewards",
            args.scale_rewards not in scales,
            f"it is one of {', '.join(scales)} there",
        ),
        (
            "multi_objective_aggregation",
            args.multi_objective_aggregation != "sum_then_normalize",
            "rewards are summed",
        ),
        ("use_liger_kernel", args.use_liger_kernel, "liger's loss takes one advantage per episode"),
    ]
    for name, wrong, why in rules:
        if wrong:
            raise ValueError(
                f"{name} = {getattr(args, name)!r} cannot be honoured with credit {args.credit!r}: "
                f"{why}"
            )


def choose_engine(trainer: Any) -> str:
    """'local' where this process can sample by itself, else 'trl'."""
    args = trainer.args
    reason = _needs_trl(trainer)
    if reason is None:
        return "local" if args.engine == "auto" else args.engine
    if args.engine == "local":
        raise ValueError(
            f"engine 'local' samples in each process by itself, and {reason}; set engine='auto'"
        )
    return "trl"


def _needs_trl(trainer: Any) -> str | None:
    args, accelerator = trainer.args, trainer.accelerator
    if args.use_vllm:
        return "use_vllm is on"
    for name in ("use_transformers_continuous_batching", "use_transformers_paged"):
        if getattr(args, name, False):  # the first replaced the second between TRL releases
            return f"{name} is on"
    kind = accelerator.distributed_type
    if kind in (DistributedType.FSDP, DistributedType.MEGATRON_LM):
        return f"{kind.value} shards the model"
    if kind == DistributedType.DEEPSPEED and accelerator.state.deepspeed_plugin.zero_stage == 3:
        return "ZeRO-3 shards the model"
    if args.generation_kwargs:
        return "generation_kwargs are for TRL's engine"
    return None


def episodes_config(source: EnvSource, args: VerifiersGRPOConfig, given: Config | None) -> Config:
    """The turnwise config of the run's episodes: the given one, or what the arguments say."""
    if given is not None:
        rollout = given.rollout.model_copy(update={"min_group_size": 1})
        return given.model_copy(update={"rollout": rollout})
    seconds, longest = (
        min(args.env_timeout, args.async_timeout),
        resolved(args.max_completion_length),
    )
    rollout = RolloutConfig(
        max_response_tokens=min(args.max_tokens_per_turn or longest, longest),
        temperature=args.temperature,
        slots=args.max_concurrent,
        # Objects run in threads, so that a slow or hanging one does not block the others.
        isolation="auto" if source.by_name else "thread",
        num_workers=args.env_threads,
        reset_timeout=seconds,
        step_timeout=seconds,
        generate_timeout=args.async_timeout,
        retries=args.episode_retries,
        min_group_size=1,
    )
    turns = args.max_turns or DEFAULT_TURNS
    if args.max_turns is None:
        turns = source.max_turns or turns
    env = EnvConfig.model_validate({**source.config.model_dump(), "name": source.name})
    return Config(seed=args.seed, env=env, rollout=rollout, train=TrainConfig(max_turn=turns))


def make_player(trainer: Any, *, engine: str, ahead: bool) -> BatchPlayer:
    """The player of a trainer's episodes, with the engine that it samples with."""
    args, source = trainer.args, trainer.source
    tokenizer = trainer._text_tokenizer()
    config = trainer.episode_config
    room = (
        args.max_context or config.rollout.max_context or _measure_context(source, tokenizer, args)
    )

    # Without a limit per reply, the first one could use up what the episode may say.
    halve = args.max_tokens_per_turn is None and config.train.max_turn > 1

    def make() -> Generator:
        if engine == "trl":
            model = base_model(trainer)
            stop_ids = end_ids(tokenizer, model.generation_config)
            return Budgeted(
                TRLGenerator(
                    trainer,
                    stop_ids=stop_ids,
                    max_context=_vllm_room(trainer, _model_room(model, room)),
                ),
                budget=args.max_completion_length,
                halve=halve,
            )
        model = base_model(trainer)
        if ahead:
            model = trainer._snapshot = snapshot(model)
        slots = min(config.rollout.slots, _episodes_at_once(trainer, ahead))
        version = trainer.state.global_step
        local = HFGenerator(
            model,
            tokenizer,
            slots=slots,
            max_context=_model_room(model, room),
            policy_version=version,
        )
        return Budgeted(
            Gate(local) if ahead else local, budget=args.max_completion_length, halve=halve
        )

    return BatchPlayer(
        config=config,
        source=source,
        make_generator=make,
        tokenizer=tokenizer,
        timeout=args.async_timeout,
        ahead=ahead,
        around=trainer.accelerator.autocast,
    )


def _episodes_at_once(trainer: Any, ahead: bool) -> int:
    rows = trainer.args.per_device_train_batch_size * trainer.args.steps_per_generation
    return max(
        rows * (1 + (trainer.args.num_batches_ahead if ahead else 0)),
        trainer.args.per_device_eval_batch_size,
    )


def _measure_context(source: EnvSource, tokenizer: Any, args: VerifiersGRPOConfig) -> int:
    """Context length: twice the longest of the first prompts, plus the completion."""
    renderer = Renderer(tokenizer)
    longest = 64
    try:
        for opening in source.openings("train", limit=PROBED_PROMPTS):
            longest = max(
                longest, len(renderer.encode(renderer.prompt(opening.messages, opening.tools)))
            )
    except EnvError as error:  # it fails in its episode too, where failures are counted
        logger.warning("could not measure the prompts: %s", error)
    return 2 * longest + resolved(args.max_completion_length)


def _model_room(model: Any, room: int) -> int:
    limit = getattr(model.config, "max_position_embeddings", None)
    return room if limit is None else min(room, limit)


def _vllm_room(trainer: Any, room: int) -> int:
    """Limits the context to vLLM's: a longer prompt raises there and would end the run instead of
    the episode."""
    args = trainer.args
    limits = [args.vllm_max_model_length] if args.use_vllm else []
    if args.use_vllm and args.vllm_mode == "server" and trainer.accelerator.is_main_process:
        # Only the first process has a client. That of old releases cannot be asked.
        ask = getattr(trainer.vllm_generation.vllm_client, "get_server_info", None)
        limits.append(None if ask is None else ask()["model_config"]["max_model_len"])
    limits = [limit for limit in gather_object(limits) if limit is not None]
    return min([room, *limits])
