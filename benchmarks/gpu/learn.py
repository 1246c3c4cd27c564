"""Does it learn? Trains real models on held-out tasks, several runs at once on one GPU, and reports
before and after.

    python benchmarks/gpu/learn.py --model DIR [--gguf FILE] --out FOLDER [--jobs 4] [--limit-s 600]
                                   --runs RECIPE[/ALGORITHM[/SEED]][,KEY=VALUE...] ... [--set
                                   KEY=VALUE ...]
    python benchmarks/gpu/learn.py --report FOLDER

A run is a process of its own: one that fails takes no other down, and its last words stand in
summary.json. Every run is told to take no further step when its share of --limit-s is over, and
then evaluates; one that is still going at the limit is stopped, and its curve is kept. FOLDER gets
summary.json, report.md, curves/*.jsonl and episodes/*.txt. Without --model the recipes' own model
is trained.
"""

import argparse
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

NO_CRITIC = ["algo.lam=1.0", "algo.value_clip=0.2", "train.critic_warmup=0"]
ALGORITHMS = {
    "bi_level_gae": ["algo.name=bi_level_gae"],
    "ppo": ["algo.name=ppo"],
    "grpo": ["algo.name=grpo", *NO_CRITIC],
    "gigpo": ["algo.name=gigpo", *NO_CRITIC],
}
"""Token GAE is `ppo`. GRPO and GiGPO have neither lambda nor critic, so their settings go back to
the defaults."""
EVAL_SHARE, STOP_SECONDS = 0.15, 15.0
TAIL, SAMPLES = 1500, 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One run of the list.

    Example:
        >>> Run.parse("bandit/grpo/2,train.steps=5")
        Run(recipe='bandit', algorithm='grpo', seed=2, settings=('train.steps=5',))
        >>> Run.parse("bandit").name
        'bandit-bi_level_gae-s0'
    """

    recipe: str
    algorithm: str = "bi_level_gae"
    seed: int = 0
    settings: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> "Run":
        head, *settings = text.split(",")
        recipe, algorithm, seed = [*head.split("/"), "", ""][:3]
        algorithm = algorithm or "bi_level_gae"
        if algorithm not in ALGORITHMS:
            raise ValueError(
                f"an algorithm is one of {', '.join(ALGORITHMS)}, got {algorithm!r} in {text!r}"
            )
        return cls(
            recipe=recipe, algorithm=algorithm, seed=int(seed or 0), settings=tuple(settings)
        )

    @property
    def name(self) -> str:
        extra = "".join(f"-{re.sub(r'[^0-9A-Za-z.]+', '_', setting)}" for setting in self.settings)
        return f"{self.recipe}-{self.algorithm}-s{self.seed}{extra}"[:120]


def train_one(run: Run, *, overrides: Sequence[str], memory_file: Path) -> None:
    """Trains in this process; leaves the peak of memory behind, however it ends."""
    import resource

    import torch

    from turnwise.config.load import load_config
    from turnwise.train.run import train

    try:
        words = [*ALGORITHMS[run.algorithm], f"seed={run.seed}", *overrides, *run.settings]
        train(load_config(run.recipe, words))
    finally:
        on_device = torch.cuda.is_available()
        peak = (
            torch.cuda.max_memory_reserved()
            if on_device
            else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        )
        memory_file.write_text(str(peak), encoding="utf-8")


def plain_model(folder: Path, gguf: str, where: Path) -> Path:
    """The folder of the same model with expanded weights: expanding takes a minute, and every run
    would do it again."""
    from turnwise.config.schema import ModelConfig
    from turnwise.models.policy import load_model, load_tokenizer

    config = ModelConfig(path=str(folder), gguf_file=gguf)
    model: Any = load_model(config)
    model.save_pretrained(where)
    load_tokenizer(config).save_pretrained(where)
    return where


@dataclass(slots=True)
class Job:
    """A run in progress."""

    run: Run
    process: subprocess.Popen[bytes]
    started: float
    stopped: bool = False


def run_all(
    runs: Sequence[Run], *, out: Path, jobs: int, limit_s: float, overrides: Sequence[str]
) -> list[dict[str, Any]]:
    """Trains all runs, `jobs` at once; returns what they came to, in order."""
    machine()  # imports take seconds, and later they would hold up the next start
    began = time.monotonic()
    waiting, going, results = list(runs), list[Job](), dict[str, dict[str, Any]]()
    while waiting or going:
        left = limit_s - (time.monotonic() - began)
        while waiting and len(going) < jobs and left > 0:
            waves = math.ceil((len(waiting) + len(going)) / jobs)
            minutes = max(left / waves * (1.0 - EVAL_SHARE), 1.0) / 60.0
            going.append(
                start(
                    waiting.pop(0),
                    out=out,
                    overrides=[*overrides, f"train.max_minutes={minutes:.3f}"],
                )
            )
        if left <= 0:
            waiting.clear()
            stop(going)
        for job in [job for job in going if job.process.poll() is not None]:
            going.remove(job)
            results[job.run.name] = conclude(job, out=out)
            write_summary(out, runs, results)
        time.sleep(0.2)
    for run in runs:
        results.setdefault(run.name, {**asdict(run), "name": run.name, "state": "not started"})
    return write_summary(out, runs, results)


def start(run: Run, *, out: Path, overrides: Sequence[str]) -> Job:
    settings = [
        *overrides,
        f"log.dir={out / 'runs'}",
        f"log.name={run.name}",
        "log.episodes_every=0",
        "log.credit=false",
        "log.report=false",
    ]
    log = (out / "logs" / f"{run.name}.txt").open("wb")
    command = [
        sys.executable,
        __file__,
        "--child",
        run_text(run),
        "--out",
        str(out),
        "--set",
        *settings,
    ]
    environment = {
        "OMP_NUM_THREADS": "2",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        **os.environ,
    }
    process = subprocess.Popen(
        command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
    )
    log.close()
    print(f"{time.strftime('%H:%M:%S')} started {run.name}", flush=True)
    return Job(run=run, process=process, started=time.monotonic())


def run_text(run: Run) -> str:
    return ",".join([f"{run.recipe}/{run.algorithm}/{run.seed}", *run.settings])


def stop(jobs: Sequence[Job]) -> None:
    """Asks all of them first, as Ctrl-C does; then insists."""
    for job in jobs:
        job.stopped = True
        signal_group(job, signal.SIGINT)
    deadline = time.monotonic() + STOP_SECONDS
    for job in jobs:
        try:
            job.process.wait(max(deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            signal_group(job, signal.SIGKILL)
            job.process.wait()


def signal_group(job: Job, number: signal.Signals) -> None:
    """The run and its workers, which share a session of their own."""
    if job.process.poll() is None:
        os.killpg(job.process.pid, number)


def conclude(job: Job, *, out: Path) -> dict[str, Any]:
    """What a run came to, read from its run directory; a failed one has the end of what it said."""
    code = job.process.returncode
    state = "stopped" if job.stopped else "done" if code == 0 else f"failed ({code})"
    found: dict[str, Any] = {
        **asdict(job.run),
        "name": job.run.name,
        "state": state,
        "minutes": round((time.monotonic() - job.started) / 60.0, 2),
    }
    memory = out / "logs" / f"{job.run.name}.memory"
    if memory.is_file():
        found["peak_memory_gib"] = round(int(memory.read_text()) / 2**30, 2)
    if state != "done":
        text = (out / "logs" / f"{job.run.name}.txt").read_text(encoding="utf-8", errors="replace")
        found["error"] = text[-TAIL:]
    try:
        found |= read_run(out / "runs" / job.run.name, out=out, name=job.run.name)
    except Exception as error:  # the others' results must not hang on one broken folder
        found["error"] = f"{found.get('error', '')}\nits run directory cannot be read: {error!r}"
    print(f"{time.strftime('%H:%M:%S')} {state} {job.run.name}: {line_of(found)}", flush=True)
    return found


def read_run(folder: Path, *, out: Path, name: str) -> dict[str, Any]:
    """Steps, episodes, tokens, evaluations of a run directory. Writes its curve and sample
    episodes."""
    from turnwise.log.store import RunReader

    if not (folder / "config.yaml").is_file():
        return {}
    reader = RunReader(folder)
    timings = {row["step"]: row for row in reader.timings()}
    rows = [row | timings.get(row["step"], {}) for row in reader.metrics()]
    (out / "curves").mkdir(exist_ok=True)
    (out / "curves" / f"{name}.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
    )
    steps = [row for row in rows if row.get("rollout/episodes")]
    found: dict[str, Any] = {
        "steps": len(steps),
        "episodes": int(sum(row["rollout/episodes"] or 0 for row in steps)),
        "generated_tokens": int(sum(row.get("rollout/tokens") or 0 for row in steps)),
        "eval_temperature": reader.config.rollout.eval_temperature,
    }
    if steps:
        found["training_success_first_last"] = [
            steps[0].get("rollout/success"),
            steps[-1].get("rollout/success"),
        ]
        found["seconds_per_step"] = round(
            sum(
                sum(
                    row.get(f"time/{part}") or 0.0
                    for part in ("rollout", "batch", "score", "update")
                )
                for row in steps
            )
            / len(steps),
            2,
        )
    evaluated = [row for row in rows if row.get("eval/episodes")]
    first = [row for row in evaluated if row["step"] == 0]
    # Of a run that was cut short, the last one on its way.
    later = [row for row in evaluated if row["step"] != 0]
    for label, row in (("before", first), ("after", later[-1:])):
        if row:
            found[label] = evaluation(reader, row[0], label=label, out=out, name=name)
    return found


def evaluation(
    reader: Any, row: dict[str, Any], *, label: str, out: Path, name: str
) -> dict[str, Any]:
    """One evaluation: success with Wilson's interval, legal replies. Writes two of its episodes as
    text."""
    step = int(row["step"])
    episodes = reader.episodes(step, split="eval")
    turns = [turn for episode in episodes for turn in episode.turns]
    (out / "episodes").mkdir(exist_ok=True)
    shown = "\n\n".join(episode_text(episode) for episode in episodes[:SAMPLES])
    (out / "episodes" / f"{name}-{label}.txt").write_text(shown + "\n", encoding="utf-8")
    keys = ("eval/success", "eval/success_low", "eval/success_high")
    return {
        "step": step,
        "tasks": int(row["eval/episodes"]),
        "success": [row.get(key) for key in keys],
        "reward": row["eval/reward"],
        "legal_share": sum(turn.action is not None for turn in turns) / max(len(turns), 1),
        "reply_tokens": sum(len(turn.completion.ids) for turn in turns) / max(len(turns), 1),
        "turns": len(turns) / max(len(episodes), 1),
    }


def episode_text(episode: Any) -> str:
    lines = [f"[{message.role}] {message.content}" for message in episode.prompt]
    for turn in episode.turns:
        lines.append(f"[model] {turn.text}")
        lines += [f"[{message.role}] {message.content}" for message in turn.messages]
    return "\n".join(
        [f"--- {episode.task.id}: {episode.status.value}, reward {episode.reward:g}", *lines]
    )


def write_summary(
    out: Path, runs: Sequence[Run], results: dict[str, dict[str, Any]]
) -> list[dict[str, Any]]:
    """Also after every single run: what is there already must not be lost with what is still to
    come."""
    rows = [results[run.name] for run in runs if run.name in results]
    beside = out / "summary.json.tmp"
    beside.write_text(
        json.dumps({"machine": machine(), "command": sys.argv, "runs": rows}, indent=1),
        encoding="utf-8",
    )
    beside.replace(out / "summary.json")
    (out / "report.md").write_text(report(out), encoding="utf-8")
    return rows


@cache
def machine() -> dict[str, str]:
    import torch
    import transformers

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    day = time.strftime("%Y-%m-%d")
    return {
        "device": device,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": day,
    }


def share(values: Sequence[float | None] | None) -> str:
    """Example:
    >>> share([0.5, 0.4, 0.6])
    '50.0 % [40.0, 60.0]'
    """
    if not values or values[0] is None:
        return "none"
    estimate, low, high = (100.0 * (value or 0.0) for value in values)
    return f"{estimate:.1f} % [{low:.1f}, {high:.1f}]"


def line_of(row: dict[str, Any]) -> str:
    before, after = (row.get(label, {}).get("success") for label in ("before", "after"))
    return (
        f"{share(before)} -> {share(after)} after {row.get('steps', 0)} steps, "
        f"{row.get('minutes', 0)} min"
    )


def report(folder: Path) -> str:
    """The folder's results as Markdown: a table, and the curve of training success of every run."""
    data = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    facts = data["machine"]
    lines = [
        f"{facts['device']}, torch {facts['torch']}, transformers {facts['transformers']}, "
        f"{facts['date']}.",
        "",
        "| recipe | algorithm | seed | before | after | legal before | legal after | steps | "
        "episodes | tokens "
        "| minutes | GiB | state |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in data["runs"]:
        before, after = row.get("before", {}), row.get("after", {})
        legal = [f"{100 * one['legal_share']:.0f} %" if one else "" for one in (before, after)]
        recipe = ", ".join([row["recipe"], *(f"`{setting}`" for setting in row["settings"])])
        cells = [
            recipe,
            row["algorithm"],
            row["seed"],
            share(before.get("success")),
            share(after.get("success")),
        ]
        cells += [
            *legal,
            row.get("steps", 0),
            row.get("episodes", 0),
            row.get("generated_tokens", 0),
        ]
        cells += [row.get("minutes", ""), row.get("peak_memory_gib", ""), row["state"]]
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    lines += ["", "Training success by step, ten steps to a figure, in per cent:", "", "```"]
    for row in data["runs"]:
        lines.append(f"{row['name']:60} {' '.join(curve(folder, row['name']))}")
    return "\n".join([*lines, "```", ""])


def curve(folder: Path, name: str, *, width: int = 10) -> list[str]:
    """Mean training success over every `width` steps, in per cent."""
    path = folder / "curves" / f"{name}.jsonl"
    rows = (
        [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        if path.is_file()
        else []
    )
    values = [row["rollout/success"] for row in rows if row.get("rollout/success") is not None]
    parts = [values[start : start + width] for start in range(0, len(values), width)]
    return [f"{100 * sum(part) / len(part):3.0f}" for part in parts]


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path)
    parser.add_argument("--gguf", help="the model's file in its folder, where it is a GGUF")
    parser.add_argument("--runs", nargs="+", default=[])
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--limit-s", type=float, default=600.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--set", nargs="*", default=[], dest="settings")
    parser.add_argument("--report", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.report is not None:
        print(report(options.report))
        return 0
    if options.out is None:
        parser.error("--out names the folder for the results")
    if options.child is not None:
        run = Run.parse(options.child)
        train_one(
            run, overrides=options.settings, memory_file=options.out / "logs" / f"{run.name}.memory"
        )
        return 0
    runs = [Run.parse(text) for text in options.runs]
    if not runs or len({run.name for run in runs}) < len(runs):
        parser.error("--runs names each run once, and one at least")
    began = time.monotonic()
    (options.out / "logs").mkdir(parents=True, exist_ok=True)
    overrides = ["checkpoint.write=false", *options.settings]
    with tempfile.TemporaryDirectory(prefix="turnwise-model-") as scratch:
        if options.model is not None:
            where = (
                plain_model(options.model, options.gguf, Path(scratch))
                if options.gguf
                else options.model
            )
            overrides.insert(0, f"model.path={where}")
        left = options.limit_s - (time.monotonic() - began)
        rows = run_all(runs, out=options.out, jobs=options.jobs, limit_s=left, overrides=overrides)
    print(report(options.out))
    return 0 if all(row["state"] == "done" for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
