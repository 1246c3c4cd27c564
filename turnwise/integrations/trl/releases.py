# pyright: reportUnknownArgumentType=false
"""Checks at import that the installed TRL has everything that the trainer relies on.

TRL's private methods change between releases. Without the check, a renamed key would show up in the
middle of a run, or not at all.
"""

import dataclasses
import inspect
from collections.abc import Iterator
from types import CodeType
from typing import Any

TESTED = "1.0 to 1.16"
"""The releases that the tests run with."""

PARAMETERS = {
    "__init__": (
        *("model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class"),
        *("reward_processing_classes", "callbacks", "peft_config", "tools", "rollout_func"),
    ),
    "_generate_and_score_completions": ("inputs",),
    "_calculate_rewards": ("inputs", "prompts", "completions", "completion_ids_list"),
    "_get_train_sampler": (),
    "_generate_single_turn": ("prompt_ids",),
    "compute_loss": ("model", "inputs", "return_outputs", "num_items_in_batch"),
    "evaluate": ("eval_dataset",),
}
"""Methods of GRPOTrainer and the parameters that are passed to them or taken from them."""

KEYS = (
    # of the batch, as the loss reads it
    *("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages"),
    *("num_items_in_batch", "old_per_token_logps", "sampling_per_token_logps", "tool_mask"),
    *("importance_sampling_ratio", "ref_per_token_logps"),
    # of what rollout_func returns
    *("logprobs", "env_mask"),
)
ATTRIBUTES = (
    *("_metrics", "loss_type", "multi_objective_aggregation", "num_generations", "num_iterations"),
    *("reward_func_names", "reward_weights", "scale_rewards"),
)
SETTINGS = (
    *("beta", "generation_batch_size", "generation_kwargs", "loss_type"),
    *("max_completion_length", "min_p", "multi_objective_aggregation", "num_generations"),
    *("num_iterations", "repetition_penalty", "reward_weights", "scale_rewards"),
    *("steps_per_generation", "temperature", "top_k", "top_p", "use_liger_kernel", "use_vllm"),
    *("vllm_mode", "vllm_max_model_length"),
)


def check_release(trainer: type, config: type, version: str) -> None:
    """Raises ImportError where GRPOTrainer or GRPOConfig lacks something.

    Example:
        >>> from trl import GRPOConfig, GRPOTrainer
        >>> check_release(GRPOTrainer, GRPOConfig, "1.16.0")
        >>> class Next(GRPOTrainer):
        ...     def _calculate_rewards(self, batch): ...
        >>> check_release(Next, GRPOConfig, "2.0.0")
        Traceback (most recent call last):
        ImportError: turnwise works with TRL 1.0 to 1.16, and TRL 2.0.0 is installed, which lacks: \
parameter inputs, prompts, completions, completion_ids_list of GRPOTrainer._calculate_rewards; \
run: pip install 'turnwise[trl]'
    """
    lacking = [*_methods(trainer), *_words(trainer), *_settings(config)]
    if lacking:
        raise ImportError(
            f"turnwise works with TRL {TESTED}, and TRL {version} is installed, which lacks: "
            f"{'; '.join(lacking)}; run: pip install 'turnwise[trl]'"
        )


def _methods(trainer: type) -> Iterator[str]:
    for name, needed in PARAMETERS.items():
        method = getattr(trainer, name, None)
        if method is None:
            yield f"GRPOTrainer.{name}"
            continue
        known = inspect.signature(method).parameters
        missing = [parameter for parameter in needed if parameter not in known]
        if missing:
            yield f"parameter {', '.join(missing)} of GRPOTrainer.{name}"


def _words(trainer: type) -> Iterator[str]:
    """Keys and attributes that stand nowhere in the trainer's methods."""
    written: set[str] = set()
    for cls in trainer.__mro__:
        for member in vars(cls).values():
            function = inspect.unwrap(member) if callable(member) else None
            if inspect.isfunction(function):
                written |= _strings(function.__code__)
    yield from (f"key {key!r}" for key in KEYS if key not in written)
    yield from (f"attribute {name}" for name in ATTRIBUTES if name not in written)


def _strings(code: CodeType) -> set[str]:
    found = set(code.co_names)
    waiting: list[Any] = list(code.co_consts)
    while waiting:
        constant = waiting.pop()
        if isinstance(constant, str):
            found.add(constant)
        elif isinstance(constant, tuple | frozenset):
            waiting.extend(constant)
        elif isinstance(constant, CodeType):
            found |= _strings(constant)
    return found


def _settings(config: type) -> Iterator[str]:
    known = {field.name for field in dataclasses.fields(config)}
    yield from (f"GRPOConfig.{name}" for name in SETTINGS if name not in known)
