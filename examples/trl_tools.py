"""GRPO on TRL with tools: the model calls functions until it answers without a call. Detected as
multi-turn.

python examples/trl_tools.py [FOLDER]
"""

import sys

from turnwise.envs import Rubric, ToolEnv
from turnwise.testing.tiny import tiny_model, tiny_tokenizer
from turnwise.trainers import VerifiersGRPOConfig, VerifiersGRPOTrainer


def lookup(city: str) -> str:
    """Looks up the weather.

    Args:
        city: where
    """
    return {"Oslo": "snow", "Cairo": "sun"}.get(city, "unknown")


def right(text: str, answer: str) -> float:
    return float(answer in text)


def main() -> None:
    rows = [
        {"prompt": "Weather in Oslo?", "answer": "snow"},
        {"prompt": "Weather in Cairo?", "answer": "sun"},
    ]
    env = ToolEnv(tools=[lookup], dataset=rows, rubric=Rubric([right]), max_turns=3)
    args = VerifiersGRPOConfig(
        sys.argv[1] if len(sys.argv) > 1 else "runs/trl-tools",
        max_steps=2,
        max_completion_length=32,
        use_cpu=True,
        bf16=False,
        report_to="none",
    )
    trainer = VerifiersGRPOTrainer(tiny_model(), env, args, processing_class=tiny_tokenizer())
    trainer.train()
    trainer.close()


if __name__ == "__main__":
    main()
