"""It must learn: every algorithm finds the better arm of a bandit."""

from pathlib import Path
from typing import get_args

import pytest
from small_runs import small_config

from turnwise.config.schema import AlgorithmName
from turnwise.log.store import RunReader
from turnwise.train.run import train


@pytest.mark.parametrize("name", get_args(AlgorithmName))
def test_every_algorithm_reaches_the_known_optimum(tmp_path: Path, name: str) -> None:
    config = small_config(
        tmp_path, algo={"name": name}, train={"steps": 26, "lr": 0.01, "critic_lr": 0.02}
    )
    result = train(config, sinks=())
    curve = RunReader(result.path).curve("rollout/success")[1]
    assert curve[0] < 0.8, "the warm start knows the format and nothing else"
    assert result.after is not None
    assert result.after.success is not None
    assert result.after.success[1] >= 0.9, f"{name}: {curve}"
