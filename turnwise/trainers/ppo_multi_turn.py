"""Multi-turn PPO from the command line, with the flags of align-anything's trainer.

    python -m turnwise.trainers.ppo_multi_turn --train_cfgs.multi_turn true --env_cfgs.env_name
    frozen_lake

It is `turnwise train` under another name. The first word may be a recipe or a YAML file; every key
of turnwise is taken as well. Without one, defaults suit the model, and where neither a model nor
another environment is given the recipe is frozen_lake.
"""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from turnwise.cli.main import main as command

if TYPE_CHECKING:
    from turnwise.train.trainer import PPOTrainer

__all__ = ["PPOTrainer", "main"]
USAGE = (
    "usage: [recipe or config.yaml] [--key value | key=value]...   (`turnwise config keys` lists "
    "the keys)"
)


def main(argv: Sequence[str] | None = None) -> None:
    """Trains with the config that the words stand for, and exits as `turnwise train` does."""
    words = list(sys.argv[1:] if argv is None else argv)
    if "--help" in words or "-h" in words:
        print(f"{__doc__}\n{USAGE}")
        return
    command(["train", *words])


def __getattr__(name: str) -> Any:
    if name != "PPOTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from turnwise.train.trainer import PPOTrainer  # torch: only where it is asked for

    return PPOTrainer


if __name__ == "__main__":
    main()
