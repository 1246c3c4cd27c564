"""docs/algorithms.md says what the code does: its examples run, every preset, metric and check is
in it."""

import re
from pathlib import Path
from typing import Any

import torch
from algo_batches import make_batch

from turnwise.algos import (
    PRESETS,
    build_algorithm,
    compute_advantages,
    filter_groups,
    policy_loss,
    token_weights,
)
from turnwise.algos import value_loss as value_loss
from turnwise.config.schema import AlgoConfig
from turnwise.testing.conformance import check_estimator

TEXT = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()


def test_examples_run() -> None:
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL):
        exec(block, names)
    torch.testing.assert_close(names["advantages"], torch.tensor([[0.0, 0.4, 0.4, 0.0, 0.5, 0.5]]))


def test_the_table_is_the_presets() -> None:
    rows = {
        name: line
        for line in TEXT.splitlines()
        for name in PRESETS
        if f"| `name: {name}` |" in line
    }
    assert set(rows) == set(PRESETS)
    for name, preset in PRESETS.items():
        _, _, _, _, surrogate, reduction, critic, groups, _ = [
            cell.strip() for cell in rows[name].split("|")
        ]
        assert reduction == preset.reduction
        assert (critic == "yes", groups == "yes") == (preset.needs_critic, preset.needs_groups)
        assert surrogate.startswith(f"{preset.ratio_level}, {preset.surrogate}")
        if preset.surrogate == "clip":
            low, high = surrogate.rsplit("clip ", 1)[1].split(" / ")
            assert (float(low), float(high)) == (preset.clip_low, preset.clip_high)


def test_every_metric_and_check_is_defined() -> None:
    batch = make_batch([[(2, 1.0)], [(2, 0.0)]], states=[[0], [0]])
    seen: set[str] = set()
    for name in PRESETS:
        algorithm = build_algorithm(
            AlgoConfig(name=name, kl_coef=0.1, entropy_coef=0.1, tis_cap=2.0)
        )
        scored, metrics = compute_advantages(batch, algorithm)
        seen |= set(metrics) | set(filter_groups(batch, algorithm)[1])
        ready = scored.replace(
            weights=token_weights(batch, algorithm),
            ref_logprobs=batch.logprobs,
            old_logprobs=batch.logprobs,
        )
        seen |= set(policy_loss(batch.logprobs, ready, algorithm, entropies=batch.logprobs)[1])
        if algorithm.needs_critic:
            seen |= set(value_loss(batch.rewards, ready, algorithm)[1])
    seen |= {result.name for result in check_estimator(lambda r, v, m, gamma, lam: r).results}
    assert not {
        name for name in seen if not re.search(rf"(?<![\w/]){re.escape(name)}(?![\w/])", TEXT)
    }
