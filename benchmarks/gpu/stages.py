"""A recipe in stages: imitation of the environment's expert, by number of demonstrations, then
training; every stage evaluated on the same held-out tasks, each once.

    python benchmarks/gpu/stages.py --out FOLDER --model DIR [--gguf FILE]
        [--recipe qwen_1_5b_alfworld] [--tasks N] [--demonstrations FILE.jsonl.gz]
        [--sizes 0 50 200 1000 3000] [--train-from 200 --train-steps 100 --algorithms gigpo grpo]
        [--start FOLDER ...] [--keep FOLDER] [--seeds 0 1 2] [--lora 16] [--temperatures 0.4 1.0]
        [--turns LOCK] [--set KEY=VALUE ...] [--critic-set KEY=VALUE ...]

The environment's files are settings: --set env.options.floorplans=FILE env.options.games=FILE for
ALFWorld, --set env.options.products=FOLDER for WebShop. --tasks N evaluates the held-out tasks of
the seeds 0 to N-1; without it, every game of an environment that has a file of them. Demonstrations
may be made ahead, on a machine without a GPU:

    turnwise sft expert RECIPE [KEY=VALUE ...] sft.episodes=3400 --write demos.jsonl.gz

A size takes the first so many of them. An expert may fail (in ALFWorld in 3 to 5 % of the games, in
Sokoban in 9 %), so more are played than are asked for. Every seed imitates anew, and every
algorithm of a seed starts from the same model, the one after --train-from demonstrations.
--critic-set is for the algorithms that have a critic. FOLDER/results.json is written after every
stage: success and mean reward with 95 % intervals, successes by kind of task where the environment
names kinds, generated tokens, and the seconds of each part. Where replies have thoughts, every
evaluation is also made with the thoughts cut away. A stage that fails is in results.json with its
error, and the next one begins. Ctrl-C or --set train.max_minutes=M ends a training early; it is
evaluated then. Runs with the same --turns LOCK take turns on the GPU (turns.py).

In several stretches: nothing large stays in FOLDER, but with --lora it gets the adapter of every
imitation and training, in bfloat16. --start begins the training from such an adapter instead of an
imitation, or from several, one merged after the other. --keep leaves every imitated model in
another folder, as FOLDER/imitated-SIZE-sSEED, and --start takes those too. "{seed}" in --start is
the seed.

    stages.py --out a --lora 8 --sizes --train-from 50 --train-steps 50 ...
    stages.py --out b --lora 8 --start a/adapter-50-s0 --train-steps 50 --algorithms grpo ...
    stages.py --out c --lora 8 --start a/adapter-50-s0 a/adapter-gigpo-s0 --train-steps 50 ...

From a machine that ends commands at a limit and returns few, small files: a command within the
limit, one archive of results and curves, and an adapter in parts. The curve of a training up to
where it was killed is in FOLDER/runs.

    timeout -s KILL 560 python benchmarks/gpu/stages.py --out a ...
    tar cz --exclude 'adapter-*' a > a.tar.gz
    tar c a/adapter-50-s0 | split -b 15000000 - adapter.tar.
    cat adapter.tar.* | tar x                                      # at home
"""

import argparse
import gc
import json
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from learn import ALGORITHMS, NO_CRITIC, machine, plain_model, share
from turns import Turns, around, native_takes, nothing

WITHOUT_CRITIC = {name for name, words in ALGORITHMS.items() if set(NO_CRITIC) <= {*words}}
HOLD_SECONDS = 8.0
"""Of the GPU, before another run has a turn: an update of imitation takes a third of a second."""
SIZES = [0, 50, 200, 1000, 3000]
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
    model: Path
    """What imitation starts from."""
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
    from turnwise.train.networks import save_policy
    from turnwise.train.sft import SftTrainer

    seconds = Seconds()
    many = (f"sft.limit={max(size, 2)}", f"sft.epochs={epochs_of(size)}", f"seed={seed}")
    config = config_of(plan, "train.steps=0", *many, f"log.name=sft-{size}-s{seed}")
    whole = config.train.model_copy(update={"max_minutes": None})  # the limit is the training's
    config = config.model_copy(update={"train": whole})
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
        if result.stopped is not None:
            raise RuntimeError(f"stopped after {result.steps} steps: {result.stopped}")
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
        keep_adapter(trainer.policy, plan.out / f"adapter-{size}-s{seed}")
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


def keep_adapter(policy: Any, folder: Path) -> None:
    """Writes the policy's adapter, where it has one, with 16 bits to a number: half the size."""
    import torch
    from safetensors.torch import load_file, save_file

    from turnwise.train.networks import save_adapter

    save = save_adapter(policy)
    if save is not None:
        save(folder)
        file = folder / "adapter_model.safetensors"
        halved = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(file).items()}
        save_file(halved, file, metadata={"format": "pt"})


def begin_with(model: Path, folders: Sequence[Path], where: Path) -> Path:
    """The folder of the model that --start means: one of the folders, or adapters that are merged
    into `model`, one after the other. What had to be merged is in `where`."""
    from turnwise.config.schema import ModelConfig
    from turnwise.models.policy import load_model, load_tokenizer
    from turnwise.train.networks import save_pretrained

    for number, folder in enumerate(folders):
        if (folder / "config.json").is_file():
            model = folder
            continue
        merged = ModelConfig(path=str(model), adapter=str(folder))
        model = where / str(number)
        save_pretrained(load_model(merged), load_tokenizer(merged), model)
    return model


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
    keep_adapter(trainer.policy, plan.out / f"adapter-{algorithm}-s{seed}")
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
        f"sft.episodes={count + count // 4}",  # not every one is a success
        f"sft.limit={count}",
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
    if "failed" in row:
        return f"{row['stage']:26} {row.get('demonstrations', ''):>5}  failed: {row['failed']}"
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


def given_model(options: argparse.Namespace, scratch: Path) -> Path:
    """The folder of the model that --tiny, --gguf or --model mean."""
    if options.tiny:
        return tiny_folder(scratch)
    if options.gguf:
        return plain_model(options.model, options.gguf, scratch)
    return options.model


def attempt(work: Callable[[], dict[str, Any]], **facts: Any) -> dict[str, Any]:
    """The stage's row, or the facts and the error of one that failed: the others go on."""
    try:
        return work()
    except Exception as error:
        traceback.print_exc()
        failed = {**facts, "failed": f"{type(error).__name__}: {error}", "seconds": {}}
    make_room()
    return failed


def run_all(options: argparse.Namespace, plan: Plan) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []

    def done(row: dict[str, Any]) -> bool:
        rows.append(row)
        print(line(row), flush=True)
        data = {"machine": machine(), "command": sys.argv, "stages": rows}
        for path in (plan.out / "results.json", *([options.json] if options.json else [])):
            beside = path.with_name(f".{path.name}")
            beside.write_text(json.dumps(data, indent=1), encoding="utf-8")
            beside.replace(path)
        return "failed" not in row

    first = options.train_from if options.train_steps and not options.start else None
    sizes = sizes_of(options)
    if sizes and not plan.demonstrations.is_file():
        done(make_demonstrations(plan, max(sizes)))
        wrong = too_few(plan.demonstrations, sizes)
        if wrong is not None:
            raise SystemExit(wrong)
    for seed in options.seeds:
        start, ready = plan.scratch, bool(options.start)
        for size in sizes:
            model = (options.keep or plan.scratch) / f"imitated-{size}-s{seed}"
            kept = size == first or (options.keep is not None and size > 0)
            work = partial(imitate, plan, size, seed, model if kept else None)
            well = done(attempt(work, stage="imitation", demonstrations=size, seed=seed))
            if size == first:
                start, ready = model, well
        merged = plan.scratch / f"start-s{seed}"
        if options.start:
            named = [of_seed(folder, seed) for folder in options.start]
            start = begin_with(plan.model, named, merged)
        begun = {"start": list(map(str, options.start))} if options.start else {}
        for algorithm in options.algorithms if options.train_steps and ready else ():
            facts = {"stage": f"imitation, then {algorithm}", "seed": seed}
            work = partial(train, plan, start, options.train_steps, algorithm, seed)
            done({**attempt(work, **facts), **(begun or {"demonstrations": first})})
        shutil.rmtree(merged, ignore_errors=True)
        if options.keep is None:
            shutil.rmtree(plan.scratch / f"imitated-{first}-s{seed}", ignore_errors=True)
    return rows


def of_seed(folder: Path, seed: int) -> Path:
    """Example:
    >>> of_seed(Path("adapter-50-s{seed}"), 2).name
    'adapter-50-s2'
    """
    return Path(str(folder).replace("{seed}", str(seed)))


def sizes_of(options: argparse.Namespace) -> list[int]:
    """Numbers of demonstrations to imitate: those asked for, and the one that training needs."""
    asked = options.sizes
    if asked is None:
        asked = [] if options.start else SIZES
    needed = {options.train_from} if options.train_steps and not options.start else set[int]()
    return sorted({*asked, *needed})


def too_few(demonstrations: Path, sizes: Sequence[int]) -> str | None:
    """What is wrong with a file of demonstrations that has fewer than a size asks for."""
    from turnwise.json_lines import read_json_lines

    if not sizes or not demonstrations.is_file():
        return None
    count = sum(1 for _ in read_json_lines(demonstrations, lambda row: row))
    if count >= max(sizes):
        return None
    return (
        f"{demonstrations} has {count} demonstrations, and {max(sizes)} are asked for; make more, "
        "or give another number to --sizes and --train-from"
    )


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--gguf", help="the model's file in its folder, where it is a GGUF")
    parser.add_argument("--recipe", default="qwen_1_5b_alfworld")
    parser.add_argument("--demonstrations", type=Path)
    parser.add_argument("--sizes", type=int, nargs="*", help="default: 0 50 200 1000 3000")
    parser.add_argument("--train-from", type=int, default=200, help="demonstrations before it")
    parser.add_argument("--algorithms", nargs="+", choices=sorted(ALGORITHMS), default=["gigpo"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.4, 1.0])
    parser.add_argument("--train-steps", type=int, default=0)
    parser.add_argument("--start", type=Path, nargs="+", default=[], help="model or adapters")
    parser.add_argument("--keep", type=Path, help="folder that imitated models stay in")
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
    if not sizes_of(options) and not options.train_steps:
        parser.error("nothing to do: give --sizes, or --train-steps")
    for folder in (of_seed(folder, seed) for folder in options.start for seed in options.seeds):
        if not any((folder / f"{kind}config.json").is_file() for kind in ("", "adapter_")):
            parser.error(f"--start: {folder} is neither a model nor an adapter")
    if (options.out / "runs").exists():
        parser.error(f"{options.out} has runs already; give another folder to --out")
    options.out.mkdir(parents=True, exist_ok=True)
    if options.turns is not None:
        take_turns(options.turns)
    with tempfile.TemporaryDirectory(prefix="turnwise-model-") as scratch:
        model = given_model(options, Path(scratch))
        rates = ("sft.lr=1e-4", "train.lr=4e-5")
        lora = [f"model.lora.rank={options.lora}", *rates] if options.lora else []
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
            model=model,
            scratch=Path(scratch),
        )
        wrong = too_few(plan.demonstrations, sizes_of(options))
        if wrong is not None:
            parser.error(wrong)
        try:
            held_out_plans(
                config_of(plan, "train.steps=0"), plan.tasks
            )  # said before hours of work
        except ValueError as error:
            parser.error(str(error))
        rows = run_all(options, plan)
    return int(any("failed" in row for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
