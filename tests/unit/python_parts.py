"""An environment and parts of a user's own, small enough for tests that train."""

import torch

from turnwise import BaseEnv, Callback

SMALL = {
    "model": {
        "embedded": {
            "hidden_size": 16,
            "num_layers": 1,
            "num_heads": 2,
            "warmstart_episodes": 256,
        }
    },
    "env": {"format": {"style": "raw", "think": False, "max_actions_per_turn": 1}},
    "rollout": {
        "train": {"env_groups": 4, "group_size": 4},
        "max_response_tokens": 4,
        "isolation": "inline",
    },
    "algo": {"name": "grpo", "singleton": "zero"},
    "train": {"steps": 2, "max_turn": 1, "lr": 1e-3, "max_idle_steps": 100},
    "eval": {"episodes": 8},
    "log": {"report": False},
}
"""What any run of these tests starts from."""


class Coin(BaseEnv):
    instruction = "Call the coin."
    actions = ("heads", "tails")

    def reset(self, seed=None, **kwargs):
        self.side = self.actions[(seed or 0) % 2]
        return f"A little bird says {self.side}."

    def step(self, action):
        won = action == self.side
        return f"It was {self.side}.", float(won), True, {"success": won}


def above_group(rewards, mask, group_ids):
    """Each episode's return less its group's mean: Dr.GRPO's advantage."""
    returns = torch.where(mask, rewards, 0.0).sum(-1)
    mean = torch.stack([returns[group_ids == group].mean() for group in group_ids])
    return torch.where(mask, (returns - mean)[:, None], 0.0)


def reinforce(ratio, advantages):
    return -ratio * advantages


def brevity(text, done):
    return -0.25 if done and text else 0.0


class Counts(Callback):
    """Counts what it hears."""

    def __init__(self):
        self.heard = {
            "turn": 0,
            "episode": 0,
            "step": 0,
            "evaluation": 0,
            "checkpoint": 0,
            "end": 0,
        }

    def on_turn(self, turn, *, episode_id, index):
        assert turn.text or index >= 0
        self.heard["turn"] += 1

    def on_episode(self, episode):
        self.heard["episode"] += len(episode.turns) > 0

    def on_step(self, step, metrics):
        assert "rollout/reward" in metrics
        self.heard["step"] += 1

    def on_evaluation(self, result):
        self.heard["evaluation"] += 1

    def on_checkpoint(self, path, step):
        assert (path / "manifest.json").is_file()
        self.heard["checkpoint"] += 1

    def on_end(self, run):
        self.heard["end"] += 1
