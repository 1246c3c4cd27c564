"""Multi-turn PPO from the command line, with the flags of align-anything's trainer.

    python -m turnwise.trainers.ppo_multi_turn --train_cfgs.multi_turn true --env_cfgs.env_name frozen_lake

The first word may be a recipe or a YAML file; every key of turnwise is taken as well. Without one, the recipe
is `default`.
"""

import sys
from collections.abc import Sequence

from turnwise.cli.args import config_from, fail
from turnwise.config import ConfigError

USAGE = "usage: [recipe or config.yaml] [--key value | key=value]...   (`turnwise config keys` lists the keys)"


def main(argv: Sequence[str] | None = None) -> None:
    """Trains with the config that the words stand for."""
    words = list(sys.argv[1:] if argv is None else argv)
    if "--help" in words or "-h" in words:
        print(f"{__doc__}\n{USAGE}")
        return
    try:
        config = config_from(words, default="default")
    except ConfigError as error:
        fail(str(error))
    from turnwise.train.run import train

    train(config)


if __name__ == "__main__":
    main()
