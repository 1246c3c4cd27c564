"""Configs of runs that end within seconds."""

from pathlib import Path
from typing import Any

from turnwise.config.schema import Config

TINY = {
    "hidden_size": 16,
    "num_layers": 1,
    "num_heads": 2,
    "warmstart_episodes": 256,
    "warmstart_lr": 0.01,
}


def small_config(folder: Path, **changes: dict[str, Any]) -> Config:
    """A run on a bandit whose second arm pays 0.9 on average and whose first pays 0.1."""
    base: dict[str, Any] = {
        "model": {"embedded": TINY},
        "env": {
            "name": "bandit",
            "options": {"low": 0.1, "chance": 0.9, "arms": ["Clerk", "Diver"]},
            "format": {"style": "raw", "think": False, "max_actions_per_turn": 1},
            "system_prompt": "Choose.",
        },
        "rollout": {
            "train": {"env_groups": 4, "group_size": 8},
            "max_response_tokens": 4,
            "max_context": 128,
            "slots": 32,
            "eval_temperature": 1.0,
            "isolation": "inline",
        },
        "train": {
            "steps": 12,
            "lr": 0.02,
            "critic_lr": 0.02,
            "max_turn": 2,
            "micro_batch_tokens": 2048,
        },
        "eval": {"episodes": 64, "before": False},
        "log": {"dir": str(folder), "report": False},
        "checkpoint": {"every": 0},
    }
    for key, value in changes.items():
        base[key] = {**base.get(key, {}), **value} if isinstance(value, dict) else value
    return Config.model_validate(base)
