"""A game with an expert that a tiny model learns in seconds, and configs to imitate it."""

from typing import Any

from turnwise.config.schema import Config
from turnwise.envs.base import BaseEnv

WORDS = ("red", "blue", "gold")


class Parrot(BaseEnv):
    """Two turns: a bird says a word, and wants to hear it. Each right word pays a half."""

    instruction = "Repeat the word."
    actions = WORDS
    expert = "parrot"

    def reset(self, seed: int | None = None, **kwargs: Any) -> str:
        self._seed, self._turn, self._right = seed or 0, 0, 0
        return self._show()

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        right = action == self._word()
        self._right += right
        self._turn += 1
        over = self._turn == 2
        shown = "Bye." if over else self._show()
        return shown, 0.5 * right, over, {"success": self._right == 2} if over else {}

    def expert_action(self) -> str:
        return self._word()

    def _word(self) -> str:
        return WORDS[(self._seed // 3**self._turn) % 3]

    def _show(self) -> str:
        return f"The bird says {self._word()}."


def parrot_config(
    *,
    rollout: dict[str, Any] | None = None,
    sft: dict[str, Any] | None = None,
    think: bool = False,
    **sections: Any,
) -> Config:
    """A small run on Parrot with the embedded model."""
    style = {"style": "answer", "think": True} if think else {"style": "raw", "think": False}
    base: dict[str, Any] = {
        "env": {
            "name": "learn_parts:Parrot",
            "format": {**style, "max_actions_per_turn": 1, "reminder": "never"},
        },
        "model": {
            "embedded": {
                "hidden_size": 32,
                "num_layers": 2,
                "num_heads": 2,
                "warmstart_episodes": 64,
            }
        },
        "rollout": {
            "max_response_tokens": 64,
            "isolation": "inline",
            "eval_temperature": 1.0,
            **(rollout or {}),
        },
        "train": {"max_turn": 2},
        "sft": sft or {},
    }
    for key, value in sections.items():
        base[key] = {**base.get(key, {}), **value}
    return Config.model_validate(base)
