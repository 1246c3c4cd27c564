"""A three-turn environment from chance to near its maximum on a tiny model, played ahead of
training.

python examples/trl_three_turns.py [FOLDER] [STEPS]

Each turn asks for a character of one half of ASCII and pays a third for it; 40 steps take about a
minute on a laptop.
"""

import sys
from typing import Any

from turnwise.envs import MultiTurnEnv
from turnwise.testing.tiny import tiny_model, tiny_tokenizer
from turnwise.trainers import VerifiersGRPOConfig, VerifiersGRPOTrainer

WANTED = ("low", "high", "low")


class Halves(MultiTurnEnv):
    def is_completed(self, messages: Any, state: Any, **kwargs: Any) -> bool:
        code = ord(messages[-1]["content"][:1] or "\ufffd")
        found = "low" if code < 64 else "high" if code < 128 else "none"
        state["turn_reward"] = float(found == WANTED[state["turn"] - 1]) / 3
        return state["turn"] == len(WANTED)

    def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        return [{"role": "user", "content": WANTED[state["turn"]]}], state


def main() -> None:
    env = Halves(dataset=[{"prompt": f"low {n}"} for n in range(16)], max_turns=3)
    args = VerifiersGRPOConfig(
        sys.argv[1] if len(sys.argv) > 1 else "runs/trl-three-turns",
        max_steps=int(sys.argv[2]) if len(sys.argv) > 2 else 4,
        per_device_train_batch_size=64,
        num_generations=16,
        max_completion_length=64,
        max_tokens_per_turn=1,
        learning_rate=5e-3,
        lr_scheduler_type="constant",
        credit="turn_level",
        enable_async_generation=True,
        logging_steps=1,
        use_cpu=True,
        bf16=False,
        report_to="none",
    )
    trainer = VerifiersGRPOTrainer(tiny_model(), env, args, processing_class=tiny_tokenizer())
    trainer.train()
    trainer.close()


if __name__ == "__main__":
    main()
