"""create_trainer: an environment object, a tokenizer and a ConfigStore; verl does the rest. On the
CPU.

python examples/verl_custom_trainer.py [FOLDER]
"""

import sys
from pathlib import Path

from turnwise.config.store import ConfigStore
from turnwise.envs.games.simple_game import SimpleGameEnvironment
from turnwise.integrations.verl import create_trainer
from turnwise.testing.tiny import tiny_tokenizer


def main(folder: Path) -> None:
    config = ConfigStore()
    config.training.num_epochs = 2
    config.train.device = "cpu"
    config.train.lr = 1e-3
    config.train.max_turn = 3
    config.rollout.train.env_groups = 2
    config.rollout.train.group_size = 2
    config.rollout.max_response_tokens = 8
    config.rollout.max_context = 768
    config.eval.before = config.eval.after = False
    config.log.dir = str(folder / "runs")

    env = SimpleGameEnvironment(config.environment)
    trainer = create_trainer(config=config, environment=env, tokenizer=tiny_tokenizer())
    trainer.fit()
    for step, metrics in trainer.recorder.history:
        print(
            f"step {step}: reward {metrics['rollout/reward']:.2f}, turns "
            f"{metrics['rollout/turns']:.1f}"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "verl_example"))
