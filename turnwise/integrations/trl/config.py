"""VerifiersGRPOConfig: TRL's GRPOConfig with the settings of multi-turn environments."""

import dataclasses
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from trl.trainer.grpo_config import GRPOConfig

from turnwise.integrations.trl.mapping import CREDITS, check_credit


def _setting(default: Any, help_: str) -> Any:
    return field(default=default, metadata={"help": help_})


@dataclass
class VerifiersGRPOConfig(GRPOConfig):
    """Arguments of a run; the first one is the output directory, all others go by name.

    Example:
        >>> config = VerifiersGRPOConfig("runs/tools", num_batches_ahead=2,
        ...     enable_async_generation=True, use_cpu=True,
        ...                              bf16=False, async_generation_timeout=60, report_to="none")
        >>> config.output_dir, config.async_timeout
        ('runs/tools', 60)
    """

    num_batches_ahead: int = _setting(
        1, "Generation batches that are played ahead of training, with async generation."
    )
    enable_async_generation: bool = _setting(
        False,
        "Play the next batches while this one is trained on. They are then older than the policy; "
        "see docs.",
    )
    async_timeout: float = _setting(
        300.0, "Seconds that a batch of episodes may take; what is not over then failed."
    )
    async_generation_timeout: float | None = _setting(None, "The older spelling of async_timeout.")
    multi_turn: bool | None = _setting(
        None, "Single-turn or multi-turn. None: found out from the environment."
    )
    max_turns: int | None = _setting(
        None, "Turns per episode. None: the environment's limit, else 10."
    )
    max_tokens_per_turn: int | None = _setting(
        None,
        "Tokens of one reply. None: half of what is left of max_completion_length, which bounds "
        "the whole episode.",
    )
    max_context: int | None = _setting(
        None,
        "Tokens of a whole conversation, for the in-process engine's cache. None: measured on the "
        "first prompts.",
    )
    credit: str = _setting("group_relative", f"Who gets credit for what: {', '.join(CREDITS)}.")
    turn_discount: float = _setting(1.0, "Discount per turn of turn_level, gigpo and hgpo credit.")
    engine: str = _setting(
        "auto",
        "Who samples: 'local' (in process, keeps its cache between turns), 'trl' (TRL's own "
        "engine), or 'auto'.",
    )
    max_concurrent: int = _setting(
        64, "Episodes that generate at the same time on the in-process engine."
    )
    env_threads: int = _setting(
        64, "Threads for environments given as objects; 1 runs them one at a time."
    )
    env_timeout: float = _setting(60.0, "Seconds for one reset or step of an environment.")
    episode_retries: int = _setting(
        1, "How often a failed episode is restarted before its row is given up."
    )
    num_tasks: int = _setting(1024, "Tasks to draw from an environment that has no data set.")
    store_episodes: bool = _setting(
        True, "Write episodes, credit, metrics and ledger into <output_dir>/run."
    )

    def __post_init__(self) -> None:
        if self.bf16 is None and not self.fp16 and not torch.accelerator.is_available():
            self.bf16 = (
                False  # TRL's default, bfloat16, is refused on machines that have only a CPU
            )
        super().__post_init__()
        if self.async_generation_timeout is not None:
            self.async_timeout = self.async_generation_timeout
        for name in ("async_timeout", "env_timeout"):
            if getattr(self, name) <= 0:
                raise ValueError(
                    f"{name} is a number of seconds above 0, got {getattr(self, name)}"
                )
        for name in (
            "max_concurrent",
            "env_threads",
            "num_tasks",
            "max_turns",
            "max_tokens_per_turn",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is at least 1, got {value}")
        if self.num_batches_ahead < 0:
            raise ValueError(
                f"num_batches_ahead is 0 or more, got {self.num_batches_ahead}; 0 is on policy"
            )
        if self.engine not in ("auto", "local", "trl"):
            raise ValueError(f"engine is auto, local or trl, got {self.engine!r}")
        check_credit(self.credit)
        if self.enable_async_generation and self.num_batches_ahead == 0:
            warnings.warn(
                "num_batches_ahead is 0: nothing is played ahead, generation is synchronous",
                stacklevel=2,
            )


def resolved(value: int | None) -> int:
    """A number that TRL declares as optional and sets in its `__post_init__`."""
    assert value is not None
    return value


def with_our_fields(args: GRPOConfig) -> "VerifiersGRPOConfig":
    """The arguments as a VerifiersGRPOConfig; a plain GRPOConfig gets our defaults."""
    if isinstance(args, VerifiersGRPOConfig):
        return args
    config = object.__new__(VerifiersGRPOConfig)
    # Already resolved: running __post_init__ twice would resolve it again.
    config.__dict__.update(args.__dict__)
    for spec in dataclasses.fields(VerifiersGRPOConfig):
        if spec.name not in config.__dict__ and spec.default is not dataclasses.MISSING:
            config.__dict__[spec.name] = spec.default
    return config
