"""The benchmark runs, its numbers agree with plain loops, and its targets hold."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "advantages.py"


def test_quick_benchmark_meets_its_targets() -> None:
    """Ratios of CPU times, best of many: a busy machine slows both sides. Three tries for what noise is left."""
    seen: list[dict[str, float]] = []
    for _ in range(3):
        done = subprocess.run([sys.executable, str(SCRIPT), "--quick"], capture_output=True, text=True, check=True)
        seen.append(json.loads(done.stdout.splitlines()[-1]))
        if seen[-1]["targets_met"]:
            break
    assert seen[-1]["targets_met"], [(run["bi_level_speedup"], run["bi_level_over_token_gae"]) for run in seen]
