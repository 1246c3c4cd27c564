"""AgentTrainer with an agent class of one's own: two steps of multi-turn PPO on verl, on the CPU.

python examples/verl_agent_trainer.py [FOLDER]
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from omegaconf import OmegaConf

from turnwise.integrations.verl import AgentTrainer
from turnwise.rollout.agents import Agent
from turnwise.testing.tiny import tiny_model, tiny_tokenizer
from turnwise.types import Message


class CountingAgent(Agent):
    """Says how many turns are left; the environment is given only the last line of the model's
    reply.

    What the model said stays as it said it: its tokens are kept apart, and trained on unchanged.
    """

    def observe(self, messages: Sequence[Message]) -> Sequence[Message]:
        left = self.plan.max_turn - len(self.turns)
        return [
            replace(message, content=f"{message.content}\n({left} turns left)")
            if message.role == "user"
            else message
            for message in messages
        ]

    def act(self, text: str) -> str:
        return text.splitlines()[-1] if text.strip() else text


def main(folder: Path) -> None:
    model = folder / "model"
    tokenizer = tiny_tokenizer()
    tiny_model("qwen2", hidden_size=64).save_pretrained(model)
    tokenizer.save_pretrained(model)
    config = OmegaConf.create(
        {
            "trainer": {"total_training_steps": 2, "save_freq": -1},
            "algorithm": {"adv_estimator": "bi_level_gae"},
            "agent": {"max_turn": 3, "agent_length": 4},
            "env_template": [{"name": "simple_game", "max_turn": 3, "options": {"size": 5}}],
            "model": {"path": str(model)},
            "rollout": {"train": {"group_size": 2}, "max_response_tokens": 8, "max_context": 768},
            "train": {"device": "cpu", "lr": 1e-3},
            "eval": {"before": False, "after": False, "episodes": 2},
            "log": {"dir": str(folder / "runs")},
        }
    )
    trainer = AgentTrainer(
        config=config,
        tokenizer=tokenizer,
        role_worker_mapping=None,  # verl's own
        resource_pool_manager=None,  # one pool over all devices
        agent_cls=CountingAgent,
        processor=None,
        reward_fn=None,  # the environment's rewards
    )
    trainer.init_workers()
    trainer.fit()
    for step, metrics in trainer.recorder.history:
        print(
            f"step {step}: reward {metrics['rollout/reward']:.2f}, turns "
            f"{metrics['rollout/turns']:.1f}"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "verl_example"))
