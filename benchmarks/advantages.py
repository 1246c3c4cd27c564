"""CPU time of the advantage estimators, beside plain loops that compute the same numbers.

    python benchmarks/advantages.py [--quick] [--json FILE]

Equality is asserted first. Times are CPU seconds of this process on one thread, the best of several
runs, so that a busy machine disturbs them little; ratios come from one run. The plain loops are
timed twice: reading the [B, T] tensors element by element, which is what the targets refer to, and
on nested lists, the fastest form that plain Python allows (without the conversion to lists).
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from turnwise.algos import compute_bi_level_gae_advantage_return, token_gae, turn_gae
from turnwise.testing import reference as slow

GAMMA, LAM, HIGH_LEVEL_GAMMA = 0.99, 0.95, 0.9
MIN_SPEEDUP, MAX_OVER_TOKEN_GAE = 200.0, 2.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """Episodes of the same number of turns; about two thirds of the tokens are the model's."""

    rewards: Tensor  # [B, T], turn rewards on turn ends, zero for a third of the turns
    values: Tensor  # [B, T]
    mask: Tensor  # [B, T]
    turn_ids: Tensor  # [B, T]
    bootstrap: Tensor  # [B], set on every fourth row


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    name: str
    fast_ms: float
    loop_ms: float
    list_loop_ms: float
    largest_difference: float

    @property
    def speedup(self) -> float:
        return self.loop_ms / self.fast_ms


def make_inputs(*, rows: int, width: int, turns: int, seed: int = 0) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.zeros(rows, width), torch.randn(rows, width, generator=generator)
    mask, turn_ids = torch.zeros(rows, width, dtype=torch.bool), torch.full((rows, width), -1)
    span = width // turns
    for row in range(rows):
        for turn in range(turns):
            cuts = torch.rand(2, generator=generator)
            start = turn * span + 1 + int(cuts[0] * span * 0.4)
            stop = (turn + 1) * span - int(cuts[1] * span * 0.2)
            mask[row, start:stop] = True
            turn_ids[row, start:stop] = turn
            if turn % 3:
                rewards[row, stop - 1] = float(torch.randn((), generator=generator))
    bootstrap = torch.where(
        torch.arange(rows) % 4 == 0, torch.randn(rows, generator=generator), 0.0
    )
    return Inputs(rewards=rewards, values=values, mask=mask, turn_ids=turn_ids, bootstrap=bootstrap)


def cpu_ms(functions: list[Callable[[], object]], *, repeats: int) -> list[float]:
    """Best CPU time of one call of each, in milliseconds. In turns, so that a busy moment hits all
    of them alike."""
    best = [float("inf")] * len(functions)
    for _ in range(repeats):
        for index, function in enumerate(functions):
            start = time.process_time()
            function()
            best[index] = min(best[index], time.process_time() - start)
    return [1e3 * seconds for seconds in best]


def measure(inputs: Inputs, *, repeats: int) -> list[Row]:
    """One row per estimator. Raises AssertionError where fast and slow numbers differ."""
    x = inputs
    tensors = (x.rewards, x.values, x.mask)
    lists = (x.rewards.tolist(), x.values.tolist(), x.mask.tolist())
    ids, last = x.turn_ids, x.bootstrap
    list_ids, list_last = ids.tolist(), last.tolist()
    rates = {"gamma": GAMMA, "lam": LAM}
    bi_rates = {**rates, "high_level_gamma": HIGH_LEVEL_GAMMA}
    cases: dict[str, tuple[Callable[[], tuple[Tensor, Tensor]], ...]] = {
        "token GAE": (
            lambda: token_gae(*tensors, **rates, bootstrap=last),
            lambda: slow.token_gae(*tensors, **rates, bootstrap=last),
            lambda: slow.token_gae(*lists, **rates, bootstrap=list_last),
        ),
        "turn GAE": (
            lambda: turn_gae(*tensors, **rates, turn_ids=ids, bootstrap=last),
            lambda: slow.turn_gae(*tensors, **rates, turn_ids=ids, bootstrap=last),
            lambda: slow.turn_gae(*lists, **rates, turn_ids=list_ids, bootstrap=list_last),
        ),
        "bi-level GAE": (
            lambda: compute_bi_level_gae_advantage_return(
                *tensors, **bi_rates, turn_ids=ids, bootstrap=last
            ),
            lambda: slow.bi_level_gae(*tensors, **bi_rates, turn_ids=ids, bootstrap=last),
            lambda: slow.bi_level_gae(*lists, **bi_rates, turn_ids=list_ids, bootstrap=list_last),
        ),
    }
    gaps: list[float] = []
    for name, (fast, _, list_loops) in cases.items():
        pairs = zip(fast(), list_loops(), strict=True)
        gaps.append(
            max(
                float((a.double() - torch.tensor(b, dtype=torch.float64)).abs().max())
                for a, b in pairs
            )
        )
        assert gaps[-1] < 1e-4, f"{name}: fast and slow numbers differ by {gaps[-1]}"
    fast_ms = cpu_ms([case[0] for case in cases.values()], repeats=repeats)
    loop_ms = cpu_ms([case[1] for case in cases.values()], repeats=1)
    list_ms = cpu_ms([case[2] for case in cases.values()], repeats=2)
    return [
        Row(name=name, fast_ms=fast, loop_ms=loops, list_loop_ms=lists, largest_difference=gap)
        for name, fast, loops, lists, gap in zip(
            cases, fast_ms, loop_ms, list_ms, gaps, strict=True
        )
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="32 x 1024 in place of 128 x 2048")
    parser.add_argument("--json", type=Path, help="write the numbers here, too")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    size = (
        {"rows": 32, "width": 1024, "turns": 10}
        if arguments.quick
        else {"rows": 128, "width": 2048, "turns": 10}
    )
    inputs = make_inputs(**size)
    table = measure(inputs, repeats=30)
    by_name = {row.name: row for row in table}
    bi_level, token = by_name["bi-level GAE"], by_name["token GAE"]
    result = {
        **size,
        "action_tokens": int(inputs.mask.sum()),
        "torch": torch.__version__,
        "estimators": [asdict(row) | {"speedup": row.speedup} for row in table],
        "bi_level_speedup": bi_level.speedup,
        "bi_level_over_token_gae": bi_level.fast_ms / token.fast_ms,
        "targets": {"bi_level_speedup": MIN_SPEEDUP, "bi_level_over_token_gae": MAX_OVER_TOKEN_GAE},
    }
    result["targets_met"] = (
        result["bi_level_speedup"] >= MIN_SPEEDUP
        and result["bi_level_over_token_gae"] <= MAX_OVER_TOKEN_GAE
    )
    print(
        f"{size['rows']} x {size['width']}, {size['turns']} turns, {result['action_tokens']} "
        "action tokens"
    )
    print(
        f"{'estimator':14}{'ours ms':>10}{'loops ms':>12}{'lists ms':>12}{'speed-up':>10}{'difference':>12}"
    )
    for row in table:
        print(
            f"{row.name:14}{row.fast_ms:10.2f}{row.loop_ms:12.1f}{row.list_loop_ms:12.1f}"
            f"{row.speedup:10.0f}{row.largest_difference:12.1e}"
        )
    print(f"bi-level / token GAE: {result['bi_level_over_token_gae']:.2f}")
    line = json.dumps(result)
    print(line)
    if arguments.json is not None:
        arguments.json.write_text(line + "\n")


if __name__ == "__main__":
    main()
