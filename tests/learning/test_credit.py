"""Credit by turns learns faster than one reward at the end, where a later turn is loud."""

from pathlib import Path
from statistics import mean

from small_runs import small_config

from turnwise.log.store import RunReader
from turnwise.train.run import train


def curve(folder: Path, *, algorithm: dict[str, object], terminal: bool, seed: int) -> list[float]:
    env = {
        "name": "learn_envs:TwoTurnCredit",
        "options": {"terminal": terminal},
        "format": {"style": "raw", "think": False, "max_actions_per_turn": 1},
    }
    config = small_config(folder, env=env, algo=algorithm, train={"steps": 22, "lr": 0.005, "critic_lr": 0.02})
    config = config.model_copy(update={"seed": seed, "eval": config.eval.model_copy(update={"after": False})})
    return RunReader(train(config, sinks=()).path).curve("rollout/success")[1]


def test_bi_level_gae_is_faster_than_token_gae_with_a_terminal_reward(tmp_path: Path) -> None:
    bi_level = {"name": "bi_level_gae", "high_level_lam": 0.0, "value_clip": None}
    token = {"name": "ppo", "lam": 1.0, "value_clip": None}
    ours, theirs = [], []
    for seed in (0, 1):
        ours.append(mean(curve(tmp_path / f"b{seed}", algorithm=bi_level, terminal=False, seed=seed)[-6:]))
        theirs.append(mean(curve(tmp_path / f"t{seed}", algorithm=token, terminal=True, seed=seed)[-6:]))
    assert mean(ours) > 0.75, (ours, theirs)
    assert mean(ours) > mean(theirs) + 0.1, (ours, theirs)
