"""A program that calls the model learns through the endpoint, as the same task does as an
environment."""

from pathlib import Path

import pytest

import turnwise

Bounds = tuple[float, float, float]
HERE = Path(__file__).parent / "lamp_agent.py"
SETTINGS = {
    "model": {
        "embedded": {
            "hidden_size": 48,
            "num_layers": 2,
            "num_heads": 3,
            "warmstart_episodes": 700,
            "warmstart_epochs": 6,
            "warmstart_lr": 0.004,
            "warmstart_observations": True,
        }
    },
    "rollout": {
        "train": {"env_groups": 16, "group_size": 8},
        "max_response_tokens": 40,
        "max_context": 400,
        "slots": 128,
        "eval_temperature": 1.0,
    },
    "algo": {"name": "grpo"},
    "train": {
        "steps": 30,
        "epochs": 2,
        "mini_batches": 2,
        "lr": 1.0e-3,
        "max_grad_norm": 0.5,
        "max_turn": 3,
    },
    "eval": {"episodes": 128, "before": True},
}


def success(name: str, folder: Path, **more: object) -> tuple[Bounds, Bounds]:
    """(low, estimate, high) before and after training, of 128 held-out tasks."""
    run = turnwise.train(
        env=name, config=SETTINGS, overrides={"log.dir": str(folder), **more}, quiet=True
    )
    assert run.before is not None
    assert run.after is not None
    assert run.before.success is not None
    assert run.after.success is not None
    return run.before.success, run.after.success


@pytest.mark.slow
def test_a_program_learns_through_the_endpoint(tmp_path: Path) -> None:
    before, after = success(f"agent:{HERE}:lamp", tmp_path, **{"env.options.workers": 0})
    assert before[2] < 0.3
    assert after[1] > 0.8


@pytest.mark.slow
def test_it_learns_as_the_environment_does(tmp_path: Path) -> None:
    _, agent = success(f"agent:{HERE}:lamp", tmp_path / "a", **{"env.options.workers": 0})
    _, env = success(f"{HERE}:Lamp", tmp_path / "b", **{"rollout.isolation": "inline"})
    assert agent[2] >= env[0]
    assert env[2] >= agent[0]
