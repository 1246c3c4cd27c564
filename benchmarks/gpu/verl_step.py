"""One recipe through every backend on one GPU: seconds a step, success, log-prob gap, resume.

    python benchmarks/gpu/verl_step.py --out FOLDER --model DIR [--steps 10] [--limit-s 500]
        [--arms native hf ...] [--recipe qwen_1_5b_frozen_lake] [--seed 0] [--set KEY=VALUE ...]
        [--turns LOCK]
    python benchmarks/gpu/verl_step.py --out FOLDER --tiny        # a random model on the CPU

| arm | what runs |
|---|---|
| native, native-grpo, native-lora | our trainer: bi-level GAE with a critic, GRPO, GRPO and LoRA |
| hf, hf-grpo | verl with turnwise's `hf` engine: the same two |
| vllm, vllm-grpo, vllm-lora | verl with vLLM: the same three |
| trl | TRL with vLLM colocated, GRPO (TRL has no critic); with --tiny without vLLM |

DIR is a folder of safetensors: verl reads no GGUF. All arms have the same tasks and seeds, and the
same number of steps. Each is a process of its own, stopped after --limit-s. A step's seconds are
those of rollout, scoring, update and weight sync (turns.py); the first step is left out, because it
has a start in it. Then the run is taken up again for one more step, unless the arm is trl or
--no-resume is given.
Verl and vLLM take minutes to start. Several of these commands may run on one GPU with the same
--turns LOCK, and the same FOLDER: their steps take turns, so that one starts while another trains.
FOLDER/ARM.json is written after every arm, and FOLDER/table.md from all of them.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from learn import ALGORITHMS, machine
from stages import tiny_folder

ENGINE = "actor_rollout_ref.rollout.name"
LORA = ("model.lora.rank=16", "model.lora.alpha=32", "train.lr=1e-4")
GRAPHS = {
    "mode": 0,
    "cudagraph_mode": "FULL_DECODE_ONLY",
    "cudagraph_capture_sizes": [1, 2, 4, 8, *range(16, 257, 16)],
}
"""CUDA graphs for decoding, and no compiler, which takes vLLM a minute at every start."""
VLLM = {
    ENGINE: "vllm",
    "actor_rollout_ref.rollout.gpu_memory_utilization": 0.1,
    "actor_rollout_ref.rollout.enable_sleep_mode": False,
    "actor_rollout_ref.rollout.free_cache_engine": False,
    "actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes": 8 * 2**30,
    "actor_rollout_ref.rollout.engine_kwargs.vllm.compilation_config": json.dumps(GRAPHS),
}
"""vLLM that may share the GPU with other runs. Its sleep fails where another process takes memory
meanwhile, and the size of its cache would depend on what they hold."""
PLACES: dict[str, tuple[str, ...]] = {
    "native": ("backend=native",),
    "hf": ("backend=verl", f"verl={json.dumps({ENGINE: 'hf'})}"),
    "vllm": ("backend=verl", f"verl={json.dumps(VLLM)}"),
    "trl": (
        "backend=trl",
        "trl={use_vllm: true, vllm_mode: colocate, vllm_gpu_memory_utilization: 0.15}",
    ),
}
ARMS: dict[str, tuple[str, str]] = {
    "native": ("native", "bi_level_gae"),
    "native-grpo": ("native", "grpo"),
    "native-lora": ("native", "lora"),
    "hf": ("hf", "bi_level_gae"),
    "hf-grpo": ("hf", "grpo"),
    "vllm": ("vllm", "bi_level_gae"),
    "vllm-grpo": ("vllm", "grpo"),
    "vllm-lora": ("vllm", "lora"),
    "trl": ("trl", "grpo"),
}
"""Arm -> (place, method)."""
GRPO = (*ALGORITHMS["grpo"], "algo.penalty_only_groups=train", "train.target_kl=null")
"""Without what TRL lacks, on every backend."""
METHODS: dict[str, tuple[str, ...]] = {
    "bi_level_gae": tuple(ALGORITHMS["bi_level_gae"]),
    "grpo": GRPO,
    "lora": (*GRPO, *LORA),
}
GROUPS = (
    *("rollout.train.env_groups=32", "rollout.train.group_size=8", "algo.entropy_coef=0"),
    "train.compile=false",
)
"""The same episodes for every method, and nothing that one of the backends lacks."""
TINY = (
    *("model.dtype=float32", "train.device=cpu", "rollout.slots=4", "rollout.max_context=1024"),
    *("rollout.max_response_tokens=8", "env.max_turn=2", "eval.episodes=4"),
    *("rollout.train.env_groups=2", "rollout.train.group_size=2", "train.max_idle_steps=9"),
    *("train.micro_batch_tokens=4096", "train.mini_batches=2"),
)
"""It shows that the arms run, and nothing else."""
GAPS = ("train/gap_mean", "sampling/sampling_logp_difference/mean")
SUCCESSES = ("rollout/success", "rollouts/success")
REWARDS = ("rollout/reward", "reward")


@dataclass(kw_only=True, slots=True)
class Measured:
    """What an arm came to."""

    arm: str
    method: str
    code: int | None = None
    """The exit status; None: stopped at the limit."""
    seconds: list[float] = field(default_factory=list[float])
    """Of each step but the first."""
    start: float | None = None
    """Seconds until the first step was over."""
    success: list[float | None] = field(default_factory=list[float | None])
    reward: list[float | None] = field(default_factory=list[float | None])
    gap: list[float | None] = field(default_factory=list[float | None])
    held_out: list[float] = field(default_factory=list[float])
    """Success on held-out tasks, before and after; reward where no success is told."""
    resumed: bool | None = None
    """True where the run went on with the next step. None: not tried."""
    words: str = ""
    """The last ones of a run that failed."""


def training_rows(run: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl that are training steps."""
    rows = read_lines(run / "metrics.jsonl")
    return [row for row in rows if "rollout/reward" in row or "loss" in row]


def read_lines(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def play(line: Sequence[str], log: Path, *, limit: float) -> int | None:
    """The exit status of a process that may take so long; None: it was stopped."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            line, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def measure(arm: str, plan: Sequence[str], options: argparse.Namespace) -> Measured:
    """Runs an arm, and takes it up again."""
    place, method = ARMS[arm]
    run, steps = options.out / "runs" / arm, options.steps
    places = PLACES[place][:1] if place == "trl" and options.tiny else PLACES[place]
    words = [options.recipe, *places, *METHODS[method], *plan, f"train.steps={steps}"]
    words += [f"log.dir={options.out / 'runs'}", f"log.name={arm}", *options.settings]
    resumes = options.resume and place != "trl"
    words += [f"checkpoint.every={steps}", f"checkpoint.write={str(resumes).lower()}"]
    log, times = options.out / f"{arm}.log", options.out / f"{arm}.times.jsonl"
    backend = "verl" if place in ("hf", "vllm") else place
    turns = [sys.executable, str(Path(__file__).with_name("turns.py")), str(options.turns)]
    began = time.time()
    line = [*turns, str(times), backend, "train", *words]
    code = play(line, log, limit=options.limit_s)
    found = Measured(arm=arm, method=method, code=code)
    rows, timed = training_rows(run), read_lines(times)
    if place == "trl" and len(rows) >= steps:  # TRL's rows are updates
        updates = len(rows) // steps
        timed = [
            {**last, "seconds": sum(row["seconds"] for row in timed[end - updates : end])}
            for end, last in enumerate(timed, 1)
            if end % updates == 0
        ]
        rows = rows[::updates]
    if timed:
        found.start = timed[0]["ended"] - began
        found.seconds = [row["seconds"] for row in timed[1:]]
    for row in rows:
        found.success.append(_first(row, SUCCESSES))
        found.reward.append(_first(row, REWARDS))
        found.gap.append(_first(row, GAPS))
    found.held_out = held_out(run) if rows else []
    if code == 0 and resumes:
        line = [*turns, str(times), backend, "train", "--resume", str(run)]
        line += [f"train.steps={steps + 1}"]
        play(line, options.out / f"{arm}-resume.log", limit=options.limit_s)
        after = [row["step"] for row in training_rows(run)]
        found.resumed = len(after) == steps + 1 == after[-1] - after[0] + 1
    elif code != 0:
        found.words = log.read_text(encoding="utf-8", errors="replace")[-1500:]
    return found


def held_out(run: Path) -> list[float]:
    from turnwise.log.store import RunReader

    reader = RunReader(run)
    return reader.curve("eval/success")[1] or reader.curve("eval/reward")[1]


def _first(row: Mapping[str, Any], names: Sequence[str]) -> float | None:
    return next((row[name] for name in names if row.get(name) is not None), None)


def table(found: Sequence[Measured]) -> str:
    """What was measured, an arm per line."""
    lines = [
        "| arm | method | seconds a step (median, first left out) | until the first step "
        "| success (else reward) by step | held out, before -> after "
        "| log-prob gap, largest mean | resumed |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in found:
        middle = f"{statistics.median(one.seconds):.2f}" if one.seconds else "-"
        gaps = [gap for gap in one.gap if gap is not None]
        known = any(value is not None for value in one.success)
        curve = one.success if known else one.reward
        cells = [
            one.arm,
            one.method,
            middle if one.code == 0 else f"{middle} (exit {one.code})",
            "-" if one.start is None else f"{one.start:.0f} s",
            " ".join("-" if value is None else f"{value:.2f}" for value in curve) or "-",
            " -> ".join(f"{value:.3f}" for value in one.held_out) or "-",
            f"{max(gaps):.4f}" if gaps else "-",
            {None: "-", True: "yes", False: "no"}[one.resumed],
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def run_all(options: argparse.Namespace, plan: Sequence[str]) -> list[Measured]:
    found: list[Measured] = []
    for arm in options.arms:
        one = measure(arm, plan, options)
        found.append(one)
        data = {"machine": machine(), "command": sys.argv, **asdict(one)}
        (options.out / f"{arm}.json").write_text(json.dumps(data, indent=1), encoding="utf-8")
        text = table(known(options.out))
        (options.out / "table.md").write_text(text, encoding="utf-8")
        print(table([one]).splitlines()[-1], flush=True)
        if one.words:
            print(one.words, flush=True)
    print(table(known(options.out)))
    return found


def known(folder: Path) -> list[Measured]:
    """Every arm that was measured into the folder."""
    paths = [folder / f"{arm}.json" for arm in ARMS]
    rows = [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.is_file()]
    return [
        Measured(**{field: row[field] for field in Measured.__dataclass_fields__}) for row in rows
    ]


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--recipe", default="qwen_1_5b_frozen_lake")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=None)
    parser.add_argument("--steps", type=int, default=None, help="default: 10; with --tiny 2")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-s", type=float, default=500.0, help="of one process")
    parser.add_argument("--no-resume", action="store_false", dest="resume")
    parser.add_argument("--set", nargs="*", default=[], dest="settings")
    parser.add_argument("--turns", type=Path, help="file that runs on one GPU share")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU")
    options = parser.parse_args(words)
    if options.tiny == (options.model is not None):
        parser.error("give --model DIR, or --tiny")
    if options.arms is None:
        without = [arm for arm in ARMS if not arm.startswith("vllm")]
        options.arms = without if options.tiny else list(ARMS)
    options.steps = options.steps or (2 if options.tiny else 10)
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    options.turns = options.turns or options.out / "gpu.lock"
    with tempfile.TemporaryDirectory(prefix="turnwise-model-") as scratch:
        model = tiny_folder(Path(scratch)) if options.tiny else options.model.resolve()
        plan = [f"model.path={model}", f"seed={options.seed}", *GROUPS]
        plan += ["log.report=false", "log.credit=false", "eval.baselines=false"]
        found = run_all(options, plan + list(TINY if options.tiny else ()))
    return int(any(one.code != 0 or one.resumed is False for one in found))


if __name__ == "__main__":
    raise SystemExit(main())
