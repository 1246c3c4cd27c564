"""A recipe in stages: imitation of the environment's expert, by number of demonstrations, then
training; every stage evaluated on the same held-out tasks, each once.

    python benchmarks/gpu/stages.py --out FOLDER --model DIR [--gguf FILE]
        [--recipe qwen_1_5b_alfworld] [--tasks N] [--demonstrations FILE.jsonl.gz]
        [--sizes 0 50 200 1000 3000] [--train-from 200 --train-steps 100 --algorithms gigpo grpo]
        [--seeds 0 1 2] [--lora 16] [--temperatures 0.4 1.0] [--turns LOCK]
        [--set KEY=VALUE ...] [--critic-set KEY=VALUE ...]

The environment's files are settings: --set env.options.floorplans=FILE env.options.games=FILE for
ALFWorld, --set env.options.products=FOLDER for WebShop. --tasks N evaluates the held-out tasks of
the seeds 0 to N-1; without it, every game of an environment that has a file of them. Demonstrations
may be made ahead, on a machine without a GPU:

    turnwise sft expert RECIPE [KEY=VALUE ...] sft.episodes=3000 --write demos.jsonl.gz

A size takes the first so many of them. Every seed imitates anew, and every algorithm of a seed
starts from the same model, the one after --train-from demonstrations. --critic-set is for the
algorithms that have a critic. Nothing large stays in FOLDER: with --lora, it gets the adapter of
every size. FOLDER/results.json is written after every stage: success and mean reward with 95 %
intervals, successes by kind of task where the environment names kinds, generated tokens, and the
seconds of each part. Where replies have thoughts, every evaluation is also made with the thoughts
cut away. Ctrl-C ends one training early; it is evaluated then. Runs with the same --turns LOCK take
turns on the GPU (turns.py).
"""

import argparse
import gc
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from learn import ALGORITHMS, NO_CRITIC, machine, plain_model, share
from turns import Turns, around, native_takes, nothing

WITHOUT_CRITIC = {name for name, words in ALGORITHMS.items() if set(NO_CRITIC) <= {*words}}
HOLD_SECONDS = 8.0
"""Of the GPU, before another run has a turn: an update of imitation takes a third of a second."""
MOST_GAMES = 2000
"""Held-out tasks that are looked at for the end of a file of games."""
TINY = [
    *("model.dtype=float32", "train.device=cpu", "rollout.slots=4", "rollout.max_context=4096"),
    *("sft.batch_tokens=8192", "rollout.max_response_tokens=4", "env.max_turn=2"),
    *("rollout.train.env_groups=2", "rollout.train.group_size=2", "train.max_idle_steps=9"),
    "train.compile=false",
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

    recipe: str
    words: tuple[str, ...]
    """Overrides of the recipe."""
    last: tuple[str, ...]
    """Overrides from the command line, which have the last word."""
    demonstrations: Path
    tasks: int | None
    """Held-out tasks that are played. None: every game of the environment's file."""
    keep: str
    """Which demonstrations: sft.keep."""
    temperatures: tuple[float, ...]
    """At which held-out tasks are played, each once."""
    out: Path
    critic: tuple[str, ...]
    """Overrides for algorithms that have a critic."""
    scratch: Path
    """For what is large and not kept."""


def config_of(plan: Plan, *words: str) -> Any:
    from turnwise.config import run_config

    folder = plan.out / "runs"
    quiet = ["log.report=false", "log.credit=false", "log.episodes_every=0", f"log.dir={folder}"]
    off = [f"eval.{name}=false" for name in ("before", "after", "baselines")]
    off.append("checkpoint.write=false")
    source = f"sft.source=[{json.dumps(str(plan.demonstrations))}]"
    words = (*quiet, *off, source, "sft.keep=all", *plan.words, *words, *plan.last)
    return run_config(plan.recipe, words)


def evaluate(plan: Plan, config: Any, generator: Any, tokenizer: Any) -> dict[str, Any]:
    """Temperature -> success and reward on each held-out task once, in all and by kind of task."""
    from turnwise.evaluate.evaluation import EvalResult
    from turnwise.evaluate.thoughts import without_thought
    from turnwise.rollout.proxy import AgentProxy

    found: dict[str, Any] = {}
    plans, kinds = held_out_plans(config, plan.tasks)
    ways = {"": config}
    if config.env.format.think:
        ways[" without thoughts"] = without_thought(config, tokenizer)
    for way, chosen in ways.items():
        for temperature in plan.temperatures:
            rollout = chosen.rollout.model_copy(update={"eval_temperature": temperature})
            played = chosen.model_copy(update={"rollout": rollout})
            proxy = AgentProxy(played, generator, tokenizer, split="val")
            try:
                result = EvalResult.of("policy", proxy.play_these(plans))
            finally:
                proxy.close()
            found[f"{temperature:g}{way}"] = summary(result, kinds)
    return found


def summary(result: Any, kinds: Mapping[str, str]) -> dict[str, Any]:
    """One evaluation: success and reward, successes by kind of task, lengths, thoughts."""
    from turnwise.log.metrics import rollout_metrics

    by_kind: dict[str, list[bool]] = {}
    for outcome in result.outcomes:
        if outcome.task_id in kinds:
            by_kind.setdefault(kinds[outcome.task_id], []).append(bool(outcome.success))
    known = result.success
    metrics = rollout_metrics(result.episodes)
    return {
        "tasks": len(result.outcomes),
        "success": None if known is None else [known.estimate, known.low, known.high],
        "reward": [result.reward.estimate, result.reward.low, result.reward.high],
        "by_kind": {kind: [sum(won), len(won)] for kind, won in sorted(by_kind.items())},
        "turns": sum(outcome.turns for outcome in result.outcomes) / len(result.outcomes),
        "generated_tokens": metrics["rollout/tokens"],
        "thoughts": {key: value for key, value in metrics.items() if "/thought_" in key},
        "failures": result.failures,
    }


def held_out_plans(config: Any, tasks: int | None) -> tuple[list[Any], dict[str, str]]:
    """(an episode per held-out task, task -> its kind where the environment names one).

    Raises:
        ValueError: `tasks` is None, and the environment has no end of held-out tasks.
    """
    from turnwise.envs.registry import make_env
    from turnwise.rollout.plan import EpisodePlan
    from turnwise.seeding import derive_seed

    env = make_env(config.env)
    kinds: dict[str, str] = {}
    plans: list[Any] = []
    first: Any = None
    while tasks is None or len(plans) < tasks:
        number = len(plans)
        task = env.make_task(number, "val")
        info = env.reset(task).info
        if tasks is None:
            # A file's games are numbered by their seeds and begin again after the last.
            game = info.get("game")
            if game is not None and game == first:
                break
            first = game if number == 0 else first
            if game is None or number >= MOST_GAMES:
                raise ValueError(
                    f"{config.env.name} has no file of held-out games, so their number is given: "
                    "--tasks N"
                )
        if "task_type" in info:
            kinds[task.id] = str(info["task_type"])
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
    env.close()
    return plans, kinds


def epochs_of(size: int) -> int:
    """Passes over so many demonstrations: few of them need more for the same number of steps.

    Example:
        >>> [epochs_of(size) for size in (50, 200, 1000, 3000)]
        [10, 5, 3, 3]
    """
    return max(3, min(10, 1000 // max(size, 1)))


def imitate(plan: Plan, size: int, seed: int, keep: Path | None) -> dict[str, Any]:
    """One size: imitation and its evaluation. Size 0 is the model as it is.

    Args:
        keep: gets the model, for what is trained from it.
    """
    from turnwise.train.generators import make_generator
    from turnwise.train.networks import save_adapter, save_policy
    from turnwise.train.sft import SftTrainer

    seconds = Seconds()
    many = (f"sft.limit={max(size, 2)}", f"sft.epochs={epochs_of(size)}", f"seed={seed}")
    config = config_of(plan, "train.steps=0", *many, f"log.name=sft-{size}-s{seed}")
    with seconds("load"):
        trainer = SftTrainer(config)
    found: dict[str, Any] = {
        "stage": "imitation" if size else "none",
        "demonstrations": size,
        "seed": seed,
    }
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
            save(plan.out / f"adapter-{size}-s{seed}")
    else:
        trainer.run.close()
    with seconds("evaluate"):
        generator = make_generator(trainer.config, trainer.policy, version=1)
        tokenizer = trainer.policy.tokenizer
        found["held_out"] = evaluate(plan, trainer.config, generator, tokenizer)
    if keep is not None:
        with seconds("save"):
            save_policy(trainer.policy)(keep)
    del trainer, generator
    make_room()
    return found | {"seconds": seconds.parts}


def train(plan: Plan, start: Path, steps: int, algorithm: str, seed: int) -> dict[str, Any]:
    """Training from an imitated model, and its evaluation."""
    from turnwise.train.trainer import PPOTrainer

    seconds = Seconds()
    words = (f"model.path={start}", "sft.source=[]", f"train.steps={steps}", f"seed={seed}")
    critic = () if algorithm in WITHOUT_CRITIC else plan.critic
    name = f"log.name={algorithm}-s{seed}"
    with seconds("load"):
        trainer = PPOTrainer(config_of(plan, *ALGORITHMS[algorithm], *words, *critic, name))
    tokenizer = trainer.policy.tokenizer
    with seconds("train"):
        result = trainer.fit()
    rows = result.metrics()[1:]
    with seconds("evaluate"):
        trainer.generator.weights_updated(result.steps + 1)
        held_out = evaluate(plan, trainer.config, trainer.generator, tokenizer)
    del trainer
    make_room()
    return {
        "stage": f"imitation, then {algorithm}",
        "seed": seed,
        "steps": result.steps,
        "held_out": held_out,
        "train_success": [row.get("rollout/success") for row in rows],
        "train_turns": [row.get("rollout/turns") for row in rows],
        "train_tokens": sum(row.get("rollout/tokens") or 0.0 for row in rows),
        "seconds_per_step": round(seconds.parts["train"] / max(len(rows), 1), 2),
        "seconds": seconds.parts,
    }


def take_turns(lock: Path) -> None:
    """Computes only while no other run with the same lock does."""
    from turnwise.rollout.proxy import AgentProxy
    from turnwise.train.base import RunTrainer

    turns = Turns(lock, hold_s=HOLD_SECONDS)
    native_takes(turns)
    around(AgentProxy, "play_these", turns.begin, turns.end_other)
    for owner, name in ((RunTrainer, "fit"), (AgentProxy, "play_these")):
        around(owner, name, nothing, turns.leave)


def make_room() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def make_demonstrations(plan: Plan, count: int) -> dict[str, Any]:
    """Plays the tasks here, where no file of demonstrations was given."""
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
    success = ", ".join(
        f"{share(played['success'])}, reward {played['reward'][0]:.3g} at {temperature}"
        + (f" ({played['failures']} failed)" if played["failures"] else "")
        for temperature, played in row.get("held_out", {}).items()
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

    first = options.train_from if options.train_steps else None
    sizes = sorted({*options.sizes, *(() if first is None else (first,))})
    if not plan.demonstrations.is_file():
        done(make_demonstrations(plan, max(sizes)))
    for seed in options.seeds:
        start = plan.scratch / f"imitated-s{seed}"
        for size in sizes:
            done(imitate(plan, size, seed, start if size == first else None))
        for algorithm in options.algorithms if first is not None else ():
            row = train(plan, start, options.train_steps, algorithm, seed)
            done({**row, "demonstrations": first})
        shutil.rmtree(start, ignore_errors=True)
    return rows


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--gguf", help="the model's file in its folder, where it is a GGUF")
    parser.add_argument("--recipe", default="qwen_1_5b_alfworld")
    parser.add_argument("--demonstrations", type=Path)
    parser.add_argument("--sizes", type=int, nargs="*", default=[0, 50, 200, 1000, 3000])
    parser.add_argument("--train-from", type=int, default=200, help="demonstrations before it")
    parser.add_argument("--algorithms", nargs="+", choices=sorted(ALGORITHMS), default=["gigpo"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.4, 1.0])
    parser.add_argument("--train-steps", type=int, default=0)
    parser.add_argument("--lora", type=int, default=0, help="rank of the adapters; 0: full")
    parser.add_argument("--tasks", type=int, help="held-out tasks; default: all games of a file")
    parser.add_argument("--turns", type=Path, help="file that runs on one GPU share")
    parser.add_argument("--set", nargs="*", default=[], dest="settings")
    parser.add_argument("--critic-set", nargs="*", default=[], dest="critic_settings")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--json", type=Path, help="another copy of results.json")
    options = parser.parse_args(words)
    if options.tiny == (options.model is not None):
        parser.error("give --model DIR, or --tiny")
    if not options.sizes and not options.train_steps:
        parser.error("nothing to do: give --sizes, or --train-steps")
    options.out.mkdir(parents=True, exist_ok=True)
    if options.turns is not None:
        take_turns(options.turns)
    with tempfile.TemporaryDirectory(prefix="turnwise-model-") as scratch:
        if options.tiny:
            model = tiny_folder(Path(scratch))
        elif options.gguf:
            model = plain_model(options.model, options.gguf, Path(scratch))
        else:
            model = options.model
        lora = [f"model.lora.rank={options.lora}", "sft.lr=1e-4"] if options.lora else []
        plan = Plan(
            recipe=options.recipe,
            words=(
                *(f"model.path={model}", f"train.device={options.device}", *lora),
                *([*TINY] if options.tiny else []),
            ),
            last=tuple(options.settings),
            temperatures=tuple(options.temperatures),
            demonstrations=options.demonstrations or options.out / "demos.jsonl.gz",
            tasks=options.tasks,
            keep="all" if options.tiny else "success",  # nobody succeeds in a tiny run's two turns
            out=options.out,
            critic=tuple(options.critic_settings),
            scratch=Path(scratch),
        )
        try:
            held_out_plans(
                config_of(plan, "train.steps=0"), plan.tasks
            )  # said before hours of work
        except ValueError as error:
            parser.error(str(error))
        run_all(options, plan)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
