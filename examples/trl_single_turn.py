"""GRPO on TRL, single-turn: a data set and a rubric. TRL generates, the rubric is its reward
function.

python examples/trl_single_turn.py [FOLDER]
"""

import sys

from turnwise.envs import Rubric, SingleTurnEnv
from turnwise.testing.tiny import tiny_model, tiny_tokenizer
from turnwise.trainers import VerifiersGRPOConfig, VerifiersGRPOTrainer


def digits(text: str) -> float:
    """The share of digits in the reply."""
    return sum(letter.isdigit() for letter in text) / max(len(text), 1)


def main() -> None:
    env = SingleTurnEnv(
        dataset=[{"question": f"Say {n}."} for n in range(16)], rubric=Rubric([digits])
    )
    args = VerifiersGRPOConfig(
        sys.argv[1] if len(sys.argv) > 1 else "runs/trl-single-turn",
        max_steps=3,
        max_completion_length=8,
        use_cpu=True,
        bf16=False,
        report_to="none",
    )
    trainer = VerifiersGRPOTrainer(tiny_model(), env, args, processing_class=tiny_tokenizer())
    trainer.train()


if __name__ == "__main__":
    main()
