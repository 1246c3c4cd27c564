"""FrozenLake 3x3 over many turns, start and goal anywhere: the policy must read the board."""

from pathlib import Path
from typing import Any

from small_runs import small_config

from turnwise.config.schema import Config
from turnwise.envs.games.frozen_lake import FrozenLake
from turnwise.log.events import Evaluated
from turnwise.log.store import RunReader
from turnwise.train.run import train


class ShuffledLake(FrozenLake):
    """Shows another episode's board, and plays on its own."""

    def reset(self, seed: int | None = None, **kwargs: Any) -> str:
        self._shown = FrozenLake(size=self.size, p=self.p, random_goal=self.random_goal)
        self._shown.reset((seed or 0) + 1, **kwargs)
        super().reset(seed, **kwargs)
        return self._text()

    def _text(self) -> str:
        return self._shown._text()


def lake_config(folder: Path, env: str) -> Config:
    return small_config(
        folder,
        model={
            "critic": "shared",
            "embedded": {
                "hidden_size": 32,
                "num_layers": 2,
                "num_heads": 2,
                "warmstart_episodes": 2500,
                "warmstart_epochs": 1,
                "warmstart_observations": True,
            },
        },
        env={
            "name": env,
            "options": {"size": 3, "p": 0.9, "random_start": True, "random_goal": True},
            "max_turn": 3,
            "format": {
                "style": "raw",
                "think": False,
                "max_actions_per_turn": 1,
                "reminder": "never",
            },
            "system_prompt": "Walk.",
        },
        rollout={
            "train": {"env_groups": 192, "group_size": 1},
            "max_response_tokens": 2,
            "max_context": 128,
            "slots": 192,
            "eval_temperature": 1.0,
        },
        algo={
            "name": "bi_level_gae",
            "lam": 0.9,
            "high_level_gamma": 0.9,
            "entropy_coef": 0.002,
            "value_clip": None,
        },
        train={
            "steps": 16,
            "max_turn": 3,
            "epochs": 3,
            "mini_batches": 4,
            "lr": 0.002,
            "critic_lr": 0.004,
            "schedule": "linear",
        },
        eval={"episodes": 384, "before": False, "baselines": True},
    )


def reads_the_board(folder: Path, env: str) -> tuple[bool, str]:
    """Whether the trained policy beats the best player that does not look, and the figures."""
    result = train(lake_config(folder, env), sinks=())
    blind = next(
        Evaluated.from_json(one)
        for one in RunReader(result.path).summary()["baselines"]
        if one["player"] == "best blind player"
    )
    assert result.after is not None
    assert result.after.success is not None
    assert blind.success is not None
    return result.after.success[0] > blind.success[
        2
    ], f"after {result.after.success}, blind {blind.success}"


def test_multi_turn_ppo_with_bi_level_gae_reads_the_board(tmp_path: Path) -> None:
    learned, figures = reads_the_board(tmp_path, "frozen_lake")
    assert learned, figures


def test_nothing_beats_the_blind_player_where_boards_are_shuffled_between_episodes(
    tmp_path: Path,
) -> None:
    learned, figures = reads_the_board(tmp_path, f"{__file__}:ShuffledLake")
    assert not learned, figures
