"""FrozenLake 3x3 over many turns, from a model that only knows the format."""

from pathlib import Path

from small_runs import small_config

from turnwise.train.run import train


def test_multi_turn_ppo_with_bi_level_gae_learns_to_cross_the_lake(tmp_path: Path) -> None:
    config = small_config(
        tmp_path,
        model={"embedded": {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "warmstart_episodes": 320}},
        env={
            "name": "frozen_lake",
            "options": {"size": 3, "p": 0.9},
            "format": {"style": "raw", "think": False, "max_actions_per_turn": 1, "reminder": "never"},
            "system_prompt": "Walk.",
        },
        rollout={
            "train": {"env_groups": 8, "group_size": 8},
            "max_response_tokens": 3,
            "max_context": 192,
            "slots": 64,
            "eval_temperature": 1.0,
        },
        algo={"name": "bi_level_gae", "lam": 0.95, "entropy_coef": 0.01, "value_clip": None},
        train={"steps": 25, "max_turn": 8, "lr": 0.004, "critic_lr": 0.004, "mini_batches": 2},
        eval={"episodes": 128, "before": True},
    )
    result = train(config, sinks=())
    assert result.before is not None
    assert result.after is not None
    assert result.before.success is not None
    assert result.after.success is not None
    assert result.before.success[1] < 0.25, result.before
    assert result.after.success[0] > 2 * result.before.success[2], (result.before, result.after)
