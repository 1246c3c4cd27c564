"""Rollout speed with a scripted generator: AgentProxy against lockstep, and what our own loop costs
per turn.

    python benchmarks/rollout.py [--quick] [--json FILE]

Both rollouts play the same episodes in the same threads against environments that answer after 50
ms on average, a few of them (0.3 %) after eight seconds; the tokens are compared first, and times
are summed over the seeds. The loop's own CPU time is measured with environments that answer at
once, with the chat template and the tokenizer counted apart.
"""

import argparse
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from turnwise.config.schema import Config, GroupsConfig, RolloutConfig, TrainConfig
from turnwise.generate.base import Session
from turnwise.generate.scripted import ScriptedGenerator
from turnwise.rollout.proxy import AgentProxy
from turnwise.rollout.sync import SyncMultiTurnRollout
from turnwise.seeding import derive_seed
from turnwise.testing.tiny import tiny_tokenizer
from turnwise.types import Episode, Message, Observation, StepResult, Task

TAIL_SHARE, TAIL_SECONDS, MEAN_SECONDS = 0.003, 8.0, 0.05


class WaitingEnv:
    """Answers after a while: 50 ms on average (exponential), and rarely after eight seconds."""

    def __init__(self, turns: int, *, scale: float) -> None:
        self._turns = turns
        self._scale = scale
        self._random = random.Random(0)
        self._left = 0

    @property
    def max_turns(self) -> int | None:
        return None

    def make_task(self, seed: int, split: str) -> Task:
        return Task(id=f"wait/{split}/{seed}", seed=seed, split=split)

    def reset(self, task: Task, noise_seed: int = 0) -> Observation:
        self._left = self._turns
        self._random = random.Random(derive_seed(noise_seed, "wait"))
        return Observation(messages=(Message(role="user", content="Go on."),))

    def step(self, message: Message) -> StepResult:
        if self._scale:
            tail = self._random.random() < TAIL_SHARE
            time.sleep(
                self._scale * (TAIL_SECONDS if tail else self._random.expovariate(1 / MEAN_SECONDS))
            )
        self._left -= 1
        reply = Message(role="user", content=f"{self._left} left.")
        return StepResult(
            messages=(reply,), reward=1.0, terminated=self._left == 0, action=message.content
        )

    def finish(self) -> StepResult:
        return StepResult(messages=(), reward=0.0)

    def close(self) -> None:
        pass


class TimedTokenizer:
    """A tokenizer that adds up the CPU time of its template, encode and decode."""

    def __init__(self) -> None:
        self._inner = tiny_tokenizer()
        self.seconds = 0.0
        self.chat_template = self._inner.chat_template
        self.all_special_ids = self._inner.all_special_ids
        self.added_tokens_decoder = self._inner.added_tokens_decoder

    def _timed(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        started = time.process_time()
        result = function(*args, **options)
        self.seconds += time.process_time() - started
        return result

    def encode(self, text: str, **options: Any) -> list[int]:
        return self._timed(self._inner.encode, text, **options)

    def decode(self, ids: Any, **options: Any) -> str:
        return self._timed(self._inner.decode, ids, **options)

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        return self._timed(self._inner.apply_chat_template, conversation, **options)


def generator() -> ScriptedGenerator:
    tokenizer = tiny_tokenizer()
    said = tuple(tokenizer.encode("go<|im_end|>"))

    def script(session: Session, ids: tuple[int, ...], call: int) -> tuple[int, ...]:
        return said

    return ScriptedGenerator(script, end_id=said[-1])


def config_for(episodes: int, turns: int, *, threads: int, seed: int = 0) -> Config:
    groups = GroupsConfig(env_groups=episodes // 8, group_size=8, tags=("wait",))
    isolation = (
        {"isolation": "thread", "num_workers": threads} if threads else {"isolation": "inline"}
    )
    rollout = RolloutConfig(train=groups, max_response_tokens=16, **isolation)  # pyright: ignore
    return Config(seed=seed, rollout=rollout, train=TrainConfig(max_turn=turns + 1))


def ids_of(episodes: list[Episode]) -> list[tuple[int, ...]]:
    return [turn.prompt_ids + turn.completion.ids for episode in episodes for turn in episode.turns]


def compare(episodes: int, turns: int, *, scale: float, seeds: int) -> dict[str, float]:
    """Episodes per second of both rollouts."""
    times = [play_both(episodes, turns, scale=scale, seed=seed) for seed in range(seeds)]
    lockstep, proxy = (sum(column) for column in zip(*times, strict=True))
    return {
        "lockstep_episodes_per_second": seeds * episodes / lockstep,
        "async_episodes_per_second": seeds * episodes / proxy,
        "speedup": lockstep / proxy,
    }


def play_both(episodes: int, turns: int, *, scale: float, seed: int) -> tuple[float, float]:
    """Seconds of the lockstep and of the async rollout, which must play the same tokens."""
    config = config_for(episodes, turns, threads=episodes, seed=seed)
    factories = {"wait": lambda: WaitingEnv(turns, scale=scale)}
    started = time.perf_counter()
    lockstep = SyncMultiTurnRollout(generator(), config, tiny_tokenizer(), factories=factories)
    lockstep.rollout()
    lockstep_seconds = time.perf_counter() - started
    expected = ids_of(lockstep.episodes())
    lockstep.close()
    started = time.perf_counter()
    proxy = AgentProxy(config, generator(), tiny_tokenizer(), factories=factories)
    played = proxy.play(0)
    async_seconds = time.perf_counter() - started
    proxy.close()
    assert ids_of(list(played.episodes)) == expected, "the two rollouts played different tokens"
    return lockstep_seconds, async_seconds


def overhead(episodes: int, turns: int) -> dict[str, float]:
    """CPU microseconds per turn of our loop, and of template and tokenizer, with an instant
    environment."""
    tokenizer = TimedTokenizer()
    config = config_for(episodes, turns, threads=0)
    proxy = AgentProxy(
        config, generator(), tokenizer, factories={"wait": lambda: WaitingEnv(turns, scale=0.0)}
    )
    proxy.play(0)  # imports, and the template's compilation
    tokenizer.seconds = 0.0
    started = time.process_time()
    played = proxy.play(1)
    seconds = time.process_time() - started
    num_turns = sum(len(episode.turns) for episode in played.episodes)
    proxy.close()
    return {
        "loop_microseconds_per_turn": (seconds - tokenizer.seconds) / num_turns * 1e6,
        "template_and_tokenizer_microseconds_per_turn": tokenizer.seconds / num_turns * 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="fewer episodes and shorter waits")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    options = parser.parse_args()
    episodes, turns, scale, seeds = (128, 10, 0.25, 1) if options.quick else (512, 10, 1.0, 3)
    figures = {
        "episodes": episodes,
        "turns": turns,
        "seeds": seeds,
        **compare(episodes, turns, scale=scale, seeds=seeds),
        **overhead(episodes, turns),
    }
    for name, value in figures.items():
        print(f"{name:48s} {value:12.1f}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
