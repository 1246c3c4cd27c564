"""A taskset of verifiers 0.4 on TRL, in one process: verifiers' stop conditions and rewards, no
model server.

python examples/trl_taskset.py [FOLDER]
"""

import sys
from collections.abc import Iterable
from typing import Any

import verifiers.v1 as vf

from turnwise.integrations.verifiers import TasksetEnv
from turnwise.testing.tiny import tiny_model, tiny_tokenizer
from turnwise.trainers import VerifiersGRPOConfig, VerifiersGRPOTrainer


class GuessData(vf.TaskData):
    target: int = 0


class GuessTask(vf.Task[GuessData]):
    @vf.reward
    async def won(self, trace: Any) -> float:
        return float(
            any(str(self.data.target) in (said.content or "") for said in trace.assistant_messages)
        )


class Guess(vf.Taskset[GuessTask]):
    def load(self) -> Iterable[GuessTask]:
        for target in range(8):
            yield GuessTask(GuessData(prompt="Guess a digit.", target=target))


def user(messages: list[dict[str, Any]], data: GuessData) -> str | None:
    """What the user says to a reply; None ends the episode."""
    return None if str(data.target) in messages[-1]["content"] else "No. Again."


def main() -> None:
    env = TasksetEnv(Guess(vf.TasksetConfig(id="guess")), user=user, max_turns=3)
    args = VerifiersGRPOConfig(
        sys.argv[1] if len(sys.argv) > 1 else "runs/trl-taskset",
        max_steps=2,
        max_completion_length=96,
        max_tokens_per_turn=4,
        use_cpu=True,
        bf16=False,
        report_to="none",
    )
    trainer = VerifiersGRPOTrainer(tiny_model(), env, args, processing_class=tiny_tokenizer())
    trainer.train()
    trainer.close()


if __name__ == "__main__":
    main()
