"""Credit by turns learns faster than credit by tokens, where a later turn is loud. Only the
estimator differs."""

from pathlib import Path
from statistics import mean

from small_runs import small_config

from turnwise.log.store import RunReader
from turnwise.train.run import train

SEEDS = (0, 1, 2)


def successes(folder: Path, estimator: dict[str, object], *, seed: int) -> list[float]:
    config = small_config(
        folder,
        env={
            "name": "learn_envs:TwoTurnCredit",
            "options": {},
            "format": {"style": "raw", "think": False, "max_actions_per_turn": 1},
        },
        algo={"value_clip": None, **estimator},
        train={"steps": 20, "lr": 0.003, "critic_lr": 0.02},
        eval={"before": False, "after": False, "baselines": False},
    )
    config = config.model_copy(update={"seed": seed})
    return RunReader(train(config, sinks=()).path).curve("rollout/success")[1]


def test_bi_level_gae_learns_faster_than_token_gae_where_a_later_turn_is_loud(
    tmp_path: Path,
) -> None:
    """With a lambda over turns of its own, bi-level GAE keeps the second turn's coin out of the
    first turn's credit; token GAE has one lambda, and at 1 the coin is in every token before it."""
    by_turn = [
        successes(tmp_path / f"b{s}", {"name": "bi_level_gae", "high_level_lam": 0.0}, seed=s)
        for s in SEEDS
    ]
    by_token = [successes(tmp_path / f"t{s}", {"name": "ppo"}, seed=s) for s in SEEDS]
    last = [mean(mean(curve[-6:]) for curve in curves) for curves in (by_turn, by_token)]
    assert last[0] > 0.7, last
    assert last[0] > last[1] + 0.1, last
