"""What VerifiersGRPOTrainer costs beside plain GRPOTrainer in single-turn training, and what
playing ahead saves.

    python benchmarks/trl_overhead.py                  # both
    python benchmarks/trl_overhead.py single --pairs 400
    python benchmarks/trl_overhead.py ahead --latency 0.5

Single-turn: both trainers run in one process and take turns, one step each, so that whatever else
the machine does slows both alike. Two neighbouring steps are a pair, and the order within a pair
alternates; a step lasts from where it gets its turn to where the next one would begin, logging and
data loading included. Told are the median of the pairs' ratios and the interval that holds it with
95 % confidence, whatever the distribution of the noise. Ahead: three turns with an environment that
sleeps between them; the settings take turns, whole runs of them.
"""

import argparse
import math
import os
import statistics
import tempfile
import threading
import time
import warnings
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOTrainer

from turnwise.envs.messages import MultiTurnEnv, Rubric, SingleTurnEnv
from turnwise.integrations.trl import (
    EnvironmentRewardAdapter,
    VerifiersGRPOConfig,
    VerifiersGRPOTrainer,
)
from turnwise.integrations.trl.sources import make_source
from turnwise.testing.tiny import tiny_model, tiny_tokenizer

WARM_UP = 2
"""Steps of each trainer that are not counted."""


class Steps(TrainerCallback):
    """Seconds per optimizer step by the clock, the first ones left out."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._last = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._last = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step > WARM_UP:
            self.seconds.append(time.perf_counter() - self._last)


class Turns:
    """Says whose step it is: a and b, b and a, a and b, and so on."""

    def __init__(self, names: tuple[str, str], *, pairs: int) -> None:
        self._order = [
            name for pair in range(pairs) for name in (names if pair % 2 == 0 else names[::-1])
        ]
        self._change = threading.Condition()
        self._failed = False

    def wait(self, name: str) -> None:
        with self._change:
            self._change.wait_for(lambda: self._failed or self._order[0] == name)
            if self._failed:
                raise RuntimeError("the other trainer failed")

    def hand_over(self, *, failed: bool = False) -> None:
        with self._change:
            self._failed |= failed
            self._order = self._order[1:]
            self._change.notify_all()


class TakesTurns(TrainerCallback):
    """Lets its trainer go on only when it is its turn, and keeps the (clock, processor) seconds of
    every step."""

    def __init__(self, name: str, turns: Turns) -> None:
        self.seconds: list[tuple[float, float]] = []
        self._name = name
        self._turns = turns
        self._began: tuple[float, float] | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._stop()
        self._turns.wait(self._name)
        self._began = time.perf_counter(), time.process_time()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._began is not None:
            self.seconds.append(
                (time.perf_counter() - self._began[0], time.process_time() - self._began[1])
            )
            self._turns.hand_over()


def arguments(folder: str, **changes: Any) -> VerifiersGRPOConfig:
    settings = {
        "per_device_train_batch_size": 16,
        "num_generations": 8,
        "max_completion_length": 32,
        "logging_steps": 1000,
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "disable_tqdm": True,
        "store_episodes": False,
    }
    return VerifiersGRPOConfig(folder, **{**settings, **changes})


def length(text: str) -> float:
    return float(len(text))


def single(folder: str, *, pairs: int) -> None:
    env = SingleTurnEnv(
        [{"question": f"{n}?"} for n in range(64)], Rubric([length]), val_fraction=0.0
    )
    source = make_source(env)
    rows = [
        {"prompt": [message.to_json() for message in opening.messages], "turnwise_row": n}
        for n, opening in enumerate(source.openings("train"))
    ]
    steps = pairs + WARM_UP
    # Replies of one length: what is compared is the trainers and not their luck in drawing an end
    # of sequence.
    args = {"max_steps": steps, "generation_kwargs": {"min_new_tokens": 32}}
    turns = Turns(("GRPOTrainer", "VerifiersGRPOTrainer"), pairs=steps)
    clocks = {name: TakesTurns(name, turns) for name in ("GRPOTrainer", "VerifiersGRPOTrainer")}
    plain = GRPOTrainer(
        tiny_model(),
        EnvironmentRewardAdapter(source),
        args=arguments(folder, **args),
        train_dataset=Dataset.from_list(rows),
        processing_class=tiny_tokenizer(),
        callbacks=[clocks["GRPOTrainer"]],
    )
    ours = VerifiersGRPOTrainer(
        tiny_model(),
        env,
        arguments(folder, **args),
        processing_class=tiny_tokenizer(),
        callbacks=[clocks["VerifiersGRPOTrainer"]],
    )
    errors: list[BaseException] = []

    def run(trainer: GRPOTrainer) -> None:
        try:
            trainer.train()
        except BaseException as error:
            errors.append(error)
            turns.hand_over(failed=True)

    threads = [threading.Thread(target=run, args=(trainer,)) for trainer in (plain, ours)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    for what, column in (("the clock", 0), ("the processor", 1)):
        compare(
            what,
            {
                name: [step[column] for step in clock.seconds[WARM_UP:]]
                for name, clock in clocks.items()
            },
        )


def compare(what: str, found: dict[str, list[float]]) -> None:
    """Prints medians, and the median of the pairs' ratios with its interval."""
    told = ", ".join(
        f"{name} {1e3 * statistics.median(seconds):.1f} ms" for name, seconds in found.items()
    )
    ratios = [
        b / a for a, b in zip(found["GRPOTrainer"], found["VerifiersGRPOTrainer"], strict=True)
    ]
    low, high = median_interval(ratios)
    print(f"by {what}, medians: {told}")
    print(
        f"by {what}, ratio within a pair: {statistics.median(ratios):.4f}, 95 % interval {low:.4f} "
        f"to {high:.4f} "
        f"({len(ratios)} pairs)"
    )


def median_interval(values: list[float], *, confidence: float = 0.95) -> tuple[float, float]:
    """Bounds of the median: order statistics, chosen by how many of `values` lie below it, which is
    binomial."""
    count, ordered = len(values), sorted(values)
    below = 0.5**count
    rank = 0
    while below <= (1 - confidence) / 2:
        rank += 1
        below += math.comb(count, rank) * 0.5**count
    if rank == 0:
        raise ValueError(f"{count} pairs are too few for an interval; take at least 6")
    return ordered[rank - 1], ordered[count - rank]


class Slow(MultiTurnEnv):
    """Three turns, and so many seconds before every answer."""

    latency = 0.5

    def is_completed(self, messages: Any, state: Any, **kwargs: Any) -> bool:
        state["turn_reward"] = float(len(messages[-1]["content"]))
        return state["turn"] == 3

    def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        time.sleep(self.latency)
        return [{"role": "user", "content": "go on"}], state


def ahead(folder: str, *, steps: int, rounds: int, latency: float) -> None:
    Slow.latency = latency
    found: dict[int, list[float]] = {0: [], 1: [], 2: []}
    for _ in range(rounds):
        for batches, seconds in found.items():
            clock = Steps()
            env = Slow([{"prompt": f"{n}"} for n in range(64)], val_fraction=0.0, max_turns=3)
            args = arguments(
                folder,
                max_steps=steps + WARM_UP,
                max_tokens_per_turn=4,
                max_completion_length=96,
                enable_async_generation=batches > 0,
                num_batches_ahead=max(batches, 1),
            )
            trainer = VerifiersGRPOTrainer(
                tiny_model(), env, args, processing_class=tiny_tokenizer(), callbacks=[clock]
            )
            trainer.train()
            trainer.close()
            seconds.append(statistics.mean(clock.seconds))
    for batches, seconds in found.items():
        ratios = [alone / here for alone, here in zip(found[0], seconds, strict=True)]
        told = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        speed = statistics.median(ratios)
        print(
            f"{batches} ahead: {statistics.median(seconds):.2f} s a step, {speed:.2f} times as "
            "fast as synchronous "
            f"(rounds: {told})"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=["single", "ahead", "both"], default="both")
    parser.add_argument("--pairs", type=int, default=200, help="pairs of single-turn steps")
    parser.add_argument("--steps", type=int, default=12, help="steps of each run ahead")
    parser.add_argument(
        "--rounds", type=int, default=3, help="how often each number of batches ahead is run"
    )
    parser.add_argument("--latency", type=float, default=0.5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory() as folder:
        if options.what in ("single", "both"):
            single(folder, pairs=options.pairs)
        if options.what in ("ahead", "both"):
            ahead(folder, steps=options.steps, rounds=options.rounds, latency=options.latency)


if __name__ == "__main__":
    main()
