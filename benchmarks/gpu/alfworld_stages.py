"""ALFWorld in stages: imitation of a searching player on made games, by number of games, then
training; every stage evaluated on each held-out game once.

    python benchmarks/gpu/alfworld_stages.py --out FOLDER --model DIR [--gguf FILE]
        --floorplans FILE --games FILE [--demonstrations FILE.jsonl.gz]
        [--sizes 50 200 1000 3000] [--train-from 200 --train-steps 100] [--lora 16]
        [--set KEY=VALUE ...]

Games are made in all rooms but those of the held-out games (valid_unseen), which are never trained
on. Demonstrations may be made ahead, on a machine without a GPU:

    turnwise sft expert qwen_1_5b_alfworld env.options.floorplans=FILE env.options.games=FILE
        sft.episodes=3000 --write demos.jsonl.gz

A size takes the first so many of them. Nothing large is written: with --lora, FOLDER gets the
adapter of every size. FOLDER/results.json is written after every stage: success with 95 %
intervals, in all and by kind of task, and the seconds of each part.
"""

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from learn import machine, plain_model, share

RECIPE = "qwen_1_5b_alfworld"
LOSS = "sft/held_out_loss"
TINY = [
    *("model.dtype=float32", "train.device=cpu", "rollout.slots=4", "rollout.max_context=4096"),
    *("sft.batch_tokens=8192", "rollout.max_response_tokens=4", "env.max_turn=2"),
    *("rollout.train.env_groups=2", "rollout.train.group_size=2", "train.max_idle_steps=9"),
]
"""A byte per token, and a model of random weights: it shows that the stages run."""


@dataclass(slots=True)
class Seconds:
    """What each part of a stage took."""

    parts: dict[str, float] = field(default_factory=dict[str, float])

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.parts[name] = round(time.perf_counter() - started, 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What all stages share."""

    words: tuple[str, ...]
    """Overrides of the recipe."""
    demonstrations: Path
    tasks: int | None
    """Held-out games that are played. None: every game of the file."""
    keep: str
    """Which demonstrations: sft.keep."""
    out: Path


def config_of(plan: Plan, *words: str) -> Any:
    from turnwise.config import run_config

    folder = plan.out / "runs"
    quiet = ["log.report=false", "log.credit=false", "log.episodes_every=0", f"log.dir={folder}"]
    off = ["eval.before=false", "eval.after=false", "checkpoint.write=false"]
    source = f"sft.source=[{json.dumps(str(plan.demonstrations))}]"
    return run_config(RECIPE, [*quiet, *off, source, "sft.keep=all", *plan.words, *words])


def evaluate(config: Any, generator: Any, tokenizer: Any, *, tasks: int | None) -> dict[str, Any]:
    """Success on each held-out game once, in all and by kind of task."""
    from turnwise.envs.games.alfworld import AlfWorldEnv
    from turnwise.envs.registry import make_env
    from turnwise.evaluate.evaluation import EvalResult
    from turnwise.rollout.plan import EpisodePlan
    from turnwise.rollout.proxy import AgentProxy
    from turnwise.seeding import derive_seed

    game = AlfWorldEnv(**config.env.options)
    env = make_env(config.env)
    count = len(game._splits["val"]) if tasks is None else tasks
    kinds: dict[str, str] = {}
    plans: list[EpisodePlan] = []
    for number in range(count):
        task = env.make_task(number, "val")  # a file's games are numbered by their seeds
        kinds[task.id] = game.reset(seed=task.seed, split="val")[1]["task_type"]
        plans.append(
            EpisodePlan(
                env_id=number,
                group_id=number,
                index=0,
                tag=config.env.name,
                task=task,
                seed=derive_seed(config.seed, "stages/tokens", number),
                noise_seed=0,
                episode_id=f"val-{number}",
                max_turn=config.env.max_turn,
            )
        )
    proxy = AgentProxy(config, generator, tokenizer, split="val")
    try:
        result = EvalResult.of("policy", proxy.play_these(plans))
    finally:
        proxy.close()
    by_kind: dict[str, list[bool]] = {}
    for outcome in result.outcomes:
        by_kind.setdefault(kinds[outcome.task_id], []).append(bool(outcome.success))
    known = result.success
    return {
        "games": len(result.outcomes),
        "success": None if known is None else [known.estimate, known.low, known.high],
        "by_kind": {kind: [sum(won), len(won)] for kind, won in sorted(by_kind.items())},
        "turns": sum(outcome.turns for outcome in result.outcomes) / len(result.outcomes),
        "failures": result.failures,
    }


def imitate(plan: Plan, size: int) -> dict[str, Any]:
    """One size: imitation and its evaluation. Size 0 is the model as it is."""
    from turnwise.train.generators import make_generator
    from turnwise.train.networks import save_adapter
    from turnwise.train.sft import SftTrainer

    seconds = Seconds()
    config = config_of(plan, "train.steps=0", f"sft.limit={max(size, 2)}", f"log.name=sft-{size}")
    with seconds("load"):
        trainer = SftTrainer(config)
    found: dict[str, Any] = {"stage": "imitation" if size else "none", "demonstrations": size}
    if size:
        with seconds("imitate"):
            result = trainer.fit()
        rows = result.metrics()
        tokens = sum(row.get("sft/tokens") or 0.0 for row in rows)
        found |= {
            "steps": result.steps,
            "tokens": tokens,
            "tokens_per_second": round(tokens / max(seconds.parts["imitate"], 1e-9)),
            "held_out_loss": [
                row["sft/held_out_loss"] for row in rows if "sft/held_out_loss" in row
            ],
            "token_accuracy": rows[-1].get("sft/token_accuracy"),
        }
        save = save_adapter(trainer.policy)
        if save is not None:
            save(plan.out / f"adapter-{size}")
    else:
        trainer.run.close()
    with seconds("evaluate"):
        generator = make_generator(trainer.config, trainer.policy, version=1)
        tokenizer = trainer.policy.tokenizer
        found["held_out"] = evaluate(trainer.config, generator, tokenizer, tasks=plan.tasks)
    del trainer, generator
    make_room()
    return found | {"seconds": seconds.parts}


def train(plan: Plan, size: int, steps: int) -> dict[str, Any]:
    """Imitation of one size and training after it, as one config, and the evaluation of the
    result."""
    from turnwise.train.trainer import PPOTrainer

    seconds = Seconds()
    words = (f"sft.limit={size}", f"train.steps={steps}", f"log.name=train-{size}")
    with seconds("imitate"):
        trainer = PPOTrainer(config_of(plan, *words))
    with seconds("train"):
        result = trainer.fit()
    rows = result.metrics()[1:]
    with seconds("evaluate"):
        trainer.generator.weights_updated(steps + 1)
        tokenizer = trainer.policy.tokenizer
        held_out = evaluate(trainer.config, trainer.generator, tokenizer, tasks=plan.tasks)
    del trainer
    make_room()
    return {
        "stage": "imitation, then training",
        "demonstrations": size,
        "steps": result.steps,
        "held_out": held_out,
        "train_success": [row.get("rollout/success") for row in rows],
        "train_turns": [row.get("rollout/turns") for row in rows],
        "seconds_per_step": round(seconds.parts["train"] / max(len(rows), 1), 2),
        "seconds": seconds.parts,
    }


def make_room() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def make_demonstrations(plan: Plan, count: int) -> dict[str, Any]:
    """Plays the games here, where no file of demonstrations was given."""
    from turnwise.train.sources import collect, write_messages

    seconds = Seconds()
    words = (
        "sft.source=[expert]",
        f"sft.keep={plan.keep}",
        f"sft.episodes={count}",
        "train.steps=0",
    )
    with seconds("play"):
        found = collect(config_of(plan, *words), factories={}, say=print)
        write_messages(plan.demonstrations, found)
    size = plan.demonstrations.stat().st_size
    return {
        "stage": "demonstrations",
        "episodes": len(found),
        "bytes": size,
        "seconds": seconds.parts,
    }


def line(row: Mapping[str, Any]) -> str:
    """A stage in a line."""
    times = ", ".join(f"{name} {value:g} s" for name, value in row["seconds"].items())
    success = (
        share(row["held_out"]["success"]) if "held_out" in row else f"{row['episodes']} episodes"
    )
    return f"{row['stage']:26} {row.get('demonstrations', ''):>5}  {success:24} {times}"


def tiny_folder(where: Path) -> Path:
    from turnwise.testing.tiny import tiny_model, tiny_tokenizer

    tiny_model("qwen2").save_pretrained(where)
    tiny_tokenizer().save_pretrained(where)
    return where


def run_all(options: argparse.Namespace, plan: Plan) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []

    def done(row: dict[str, Any]) -> None:
        rows.append(row)
        print(line(row), flush=True)
        data = {"machine": machine(), "command": sys.argv, "stages": rows}
        for path in (plan.out / "results.json", *([options.json] if options.json else [])):
            path.write_text(json.dumps(data, indent=1), encoding="utf-8")

    if not plan.demonstrations.is_file():
        done(make_demonstrations(plan, max(options.sizes)))
    for size in [0, *options.sizes]:
        done(imitate(plan, size))
    if options.train_steps:
        done(train(plan, options.train_from or options.sizes[0], options.train_steps))
    return rows


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--gguf", help="the model's file in its folder, where it is a GGUF")
    parser.add_argument("--floorplans", type=Path)
    parser.add_argument("--games", type=Path)
    parser.add_argument("--demonstrations", type=Path)
    parser.add_argument("--sizes", type=int, nargs="+", default=[50, 200, 1000, 3000])
    parser.add_argument("--train-from", type=int, help="demonstrations before training")
    parser.add_argument("--train-steps", type=int, default=0)
    parser.add_argument("--lora", type=int, default=0, help="rank of the adapters; 0: full")
    parser.add_argument("--tasks", type=int, help="held-out games; default: all of the file")
    parser.add_argument("--set", nargs="*", default=[], dest="settings")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU, made games")
    parser.add_argument("--json", type=Path, help="another copy of results.json")
    options = parser.parse_args(words)
    if options.tiny == (options.model is not None):
        parser.error("give --model DIR, or --tiny")
    if options.games is None and options.tasks is None:
        parser.error("give --games FILE with held-out games, or --tasks N of made ones")
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="turnwise-model-") as scratch:
        if options.tiny:
            model = tiny_folder(Path(scratch))
        elif options.gguf:
            model = plain_model(options.model, options.gguf, Path(scratch))
        else:
            model = options.model
        files = {"floorplans": options.floorplans, "games": options.games}
        given = [f"env.options.{key}={path}" for key, path in files.items() if path is not None]
        lora = [f"model.lora.rank={options.lora}", "sft.lr=1e-4"] if options.lora else []
        plan = Plan(
            words=(
                *(f"model.path={model}", f"train.device={options.device}", *given, *lora),
                *([*TINY] if options.tiny else []),
                *options.settings,
            ),
            demonstrations=options.demonstrations or options.out / "demos.jsonl.gz",
            tasks=options.tasks,
            keep="all" if options.tiny else "success",  # nobody succeeds in a tiny run's two turns
            out=options.out,
        )
        run_all(options, plan)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
