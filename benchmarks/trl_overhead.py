"""What VerifiersGRPOTrainer costs beside plain GRPOTrainer in single-turn training, and what playing ahead saves.

    python benchmarks/trl_overhead.py                  # both
    python benchmarks/trl_overhead.py single --steps 40
    python benchmarks/trl_overhead.py ahead --latency 0.5

Single-turn: both trainers alternate, a few steps at a time, in one process, so that a loaded machine slows both alike;
processor time and low percentiles say what a step costs undisturbed. Ahead: three turns with an environment that
sleeps between them.
"""

import argparse
import os
import statistics
import tempfile
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
from turnwise.integrations.trl import EnvironmentRewardAdapter, VerifiersGRPOConfig, VerifiersGRPOTrainer
from turnwise.integrations.trl.sources import make_source
from turnwise.testing.tiny import tiny_model, tiny_tokenizer


class Steps(TrainerCallback):
    """Seconds per optimizer step, by the clock and of the processor, the first two steps left out."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.cpu: list[float] = []
        self._last = self._last_cpu = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._last, self._last_cpu = time.perf_counter(), time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step > 2:
            self.seconds.append(time.perf_counter() - self._last)
            self.cpu.append(time.process_time() - self._last_cpu)


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


def single(folder: str, *, steps: int, rounds: int) -> None:
    env = SingleTurnEnv([{"question": f"{n}?"} for n in range(64)], Rubric([length]), val_fraction=0.0)
    source = make_source(env)
    rows = [
        {"prompt": [message.to_json() for message in opening.messages], "turnwise_row": n}
        for n, opening in enumerate(source.openings("train"))
    ]

    def plain(callbacks: list[Any]) -> GRPOTrainer:
        score = EnvironmentRewardAdapter(source)
        data = Dataset.from_list(rows)
        args = arguments(folder, max_steps=steps)
        kwargs = {"train_dataset": data, "processing_class": tiny_tokenizer(), "callbacks": callbacks}
        return GRPOTrainer(tiny_model(), score, args=args, **kwargs)

    def ours(callbacks: list[Any]) -> GRPOTrainer:
        args = arguments(folder, max_steps=steps)
        return VerifiersGRPOTrainer(tiny_model(), env, args, processing_class=tiny_tokenizer(), callbacks=callbacks)

    order = [("GRPOTrainer", plain), ("VerifiersGRPOTrainer", ours)]
    clocks: dict[str, list[Steps]] = {name: [] for name, _ in order}
    for number in range(rounds):
        for name, make in order if number % 2 == 0 else order[::-1]:
            clocks[name].append(Steps())
            make([clocks[name][-1]]).train()
    compare("processor", {name: [s for clock in of for s in clock.cpu] for name, of in clocks.items()})
    compare("clock", {name: [s for clock in of for s in clock.seconds] for name, of in clocks.items()})


def compare(what: str, found: dict[str, list[float]]) -> None:
    for share in (10, 25, 50):
        marks = {name: statistics.quantiles(seconds, n=100)[share - 1] for name, seconds in found.items()}
        told = ", ".join(f"{name} {1e3 * seconds:.1f} ms" for name, seconds in marks.items())
        ratio = marks["VerifiersGRPOTrainer"] / marks["GRPOTrainer"]
        count = len(found["GRPOTrainer"])
        print(f"seconds of the {what}, percentile {share}: {told}, ratio {ratio:.3f} ({count} steps each)")


class Slow(MultiTurnEnv):
    """Three turns, and so many seconds before every answer."""

    latency = 0.5

    def is_completed(self, messages: Any, state: Any, **kwargs: Any) -> bool:
        state["turn_reward"] = float(len(messages[-1]["content"]))
        return state["turn"] == 3

    def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        time.sleep(self.latency)
        return [{"role": "user", "content": "go on"}], state


def ahead(folder: str, *, steps: int, latency: float) -> None:
    Slow.latency = latency
    measured: dict[int, float] = {}
    for batches in (0, 1, 2):
        clock = Steps()
        env = Slow([{"prompt": f"{n}"} for n in range(64)], val_fraction=0.0, max_turns=3)
        args = arguments(
            folder,
            max_steps=steps,
            max_tokens_per_turn=4,
            max_completion_length=96,
            enable_async_generation=batches > 0,
            num_batches_ahead=max(batches, 1),
        )
        trainer = VerifiersGRPOTrainer(tiny_model(), env, args, processing_class=tiny_tokenizer(), callbacks=[clock])
        started = time.perf_counter()
        trainer.train()
        measured[batches] = statistics.mean(clock.seconds)
        trainer.close()
        whole = time.perf_counter() - started
        speed = measured[0] / measured[batches]
        print(
            f"{batches} ahead: {measured[batches]:.2f} s a step ({speed:.2f} times synchronous), {whole:.1f} s in all"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["single", "ahead", "both"], default="both")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--latency", type=float, default=0.5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory() as folder:
        if options.what in ("single", "both"):
            single(folder, steps=options.steps, rounds=options.rounds)
        if options.what in ("ahead", "both"):
            ahead(folder, steps=options.steps, latency=options.latency)


if __name__ == "__main__":
    main()
