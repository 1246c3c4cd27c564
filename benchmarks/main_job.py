"""The main job on the CPU: episodes per second, and where the time goes.

    python benchmarks/main_job.py [--steps N] [--episodes N] [--json FILE]

Three parts play the maps of the recipe `frozen_lake`, one after the other, in this process:

- turnwise: some steps of the recipe, with the seconds of each part of a step.
- stable-baselines3's PPO with a small MLP that sees the board one-hot: what the task costs without
  a language model. Success on the same held-out maps, over time.
- TRL's GRPOTrainer with the recipe's model, one reply per map: its reward is 1 where the move is on
  a shortest path. It plays no second turn, so an episode of TRL is a fifth of one of ours.

Seconds are CPU seconds of this process. A part whose package is missing is skipped and named.
"""

import argparse
import importlib.util
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from turnwise.config.load import load_config
from turnwise.config.schema import Config
from turnwise.envs.games.frozen_lake import FrozenLake
from turnwise.train import step as training
from turnwise.train.trainer import PPOTrainer

CELLS = "P_OGXV"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5, help="steps of turnwise and TRL")
    parser.add_argument("--episodes", type=int, default=40_000, help="episodes of the MLP")
    parser.add_argument("--warmstart", type=int, default=400, help="episodes of the warm start")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        settings = [
            f"log.dir={folder}",
            f"train.steps={asked.steps}",
            f"model.embedded.warmstart_episodes={asked.warmstart}",
            "eval.before=false",
            "eval.after=false",
            "eval.baselines=false",
        ]
        config = load_config("frozen_lake", settings)
        model = Path(folder) / "model"
        figures: dict[str, Any] = {"turnwise": play_turnwise(config, model)}
        figures["stable-baselines3"] = play_mlp(config, asked.episodes)
        figures["trl"] = play_trl(config, model, steps=asked.steps, folder=folder)
    for name, found in figures.items():
        print(f"{name}: {json.dumps(found)}")
    if asked.json:
        asked.json.write_text(json.dumps(figures, indent=2), encoding="utf-8")


def play_turnwise(config: Config, model: Path) -> dict[str, Any]:
    """Some steps of the recipe. Leaves the warm-started model behind, for TRL."""
    seconds: Counter[str] = Counter()

    class CpuClock(training.Clock):
        @contextmanager
        def __call__(self, name: str) -> Iterator[None]:
            started = time.process_time()
            with super().__call__(name):
                yield
            seconds[name] += time.process_time() - started

    found, training.Clock = training.Clock, CpuClock
    try:
        trainer = PPOTrainer(config)
        trainer.policy.model.save_pretrained(model)
        trainer.policy.tokenizer.save_pretrained(model)
        started = time.process_time()
        trainer.fit()
        whole = time.process_time() - started
    finally:
        training.Clock = found
    episodes = (
        config.train.steps * config.rollout.train.env_groups * config.rollout.train.group_size
    )
    parts = {name: round(spent / config.train.steps, 3) for name, spent in seconds.items()}
    parts["rest"] = round(whole / config.train.steps - sum(parts.values()), 3)
    return {"episodes_per_second": round(episodes / whole, 1), "seconds_per_step": parts}


def play_mlp(config: Config, episodes: int) -> dict[str, Any]:
    """PPO with an MLP on the board itself; success on held-out maps after each tenth."""
    if importlib.util.find_spec("stable_baselines3") is None:
        return {"skipped": "pip install stable-baselines3"}
    from stable_baselines3 import PPO
    from stable_baselines3.common.vec_env import DummyVecEnv

    boards = [board(config, offset=number, stride=16) for number in range(16)]
    learner = PPO("MlpPolicy", DummyVecEnv([lambda b=b: b for b in boards]), n_steps=128, seed=0)
    curve: list[dict[str, float]] = []
    spent = 0.0
    for _ in range(10):
        started = time.process_time()
        # An episode has about four moves.
        learner.learn(episodes * 4 // 10, reset_num_timesteps=False)
        spent += time.process_time() - started
        curve.append(
            {
                "episodes": sum(b.episodes for b in boards),
                "seconds": round(spent, 1),
                "success": held_out(config, lambda seen: int(learner.predict(seen)[0])),
            }
        )
    return {"episodes_per_second": round(curve[-1]["episodes"] / spent, 1), "curve": curve}


def board(config: Config, *, offset: int = 0, stride: int = 1, split: str = "train") -> Any:
    """The game for Gymnasium: the board one-hot, a map per episode, the recipe's turn limit."""
    import gymnasium

    options = dict(config.env.options) | {"max_steps": config.train.max_turn}
    size = options["size"]

    class Board(gymnasium.Env[Any, Any]):
        observation_space = gymnasium.spaces.Box(0.0, 1.0, (size * size * len(CELLS),))
        action_space = gymnasium.spaces.Discrete(4)

        def __init__(self) -> None:
            self.game = FrozenLake(**options)
            self.episodes = 0

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
            number = offset + stride * self.episodes if seed is None else seed
            self.episodes += 1
            return one_hot(self.game.reset(seed=number, split=split)), {}

        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            text, reward, done, cut, info = self.game.step(FrozenLake.actions[int(action)])
            return one_hot(text), reward, done, cut, info

    return Board()


def one_hot(text: str) -> Any:
    cells = text.split()
    seen = np.zeros((len(cells), len(CELLS)), dtype=np.float32)
    seen[np.arange(len(cells)), [CELLS.index(cell) for cell in cells]] = 1.0
    return seen.ravel()


def held_out(config: Config, choose: Callable[[Any], int]) -> float:
    """The share of held-out maps on which the goal is reached."""
    game, won = board(config, split="val"), 0
    for seed in range(config.eval.episodes):
        seen, _ = game.reset(seed=seed)
        done = cut = False
        while not (done or cut):
            seen, reward, done, cut, _ = game.step(choose(seen))
            won += reward > 0
    return round(won / config.eval.episodes, 3)


def play_trl(config: Config, model: Path, *, steps: int, folder: str) -> dict[str, Any]:
    """GRPO on the recipe's model, as many replies a step as we play episodes."""
    if importlib.util.find_spec("trl") is None:
        return {"skipped": "pip install 'turnwise[trl]'"}
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    rollout, group = config.rollout, 8
    replies = rollout.train.env_groups * rollout.train.group_size
    game = board(config).game
    rows: list[dict[str, Any]] = []
    for seed in range(steps * replies // group):
        shown = game.reset(seed=seed)
        prompt = [
            {"role": "system", "content": config.env.system_prompt},
            {"role": "user", "content": shown},
        ]
        rows.append({"prompt": prompt, "move": game.expert_action()})

    def on_path(completions: Any, move: list[str], **_: Any) -> list[float]:
        said = [completion[0]["content"].strip() for completion in completions]
        return [float(word == wanted) for word, wanted in zip(said, move, strict=True)]

    settings = GRPOConfig(
        output_dir=f"{folder}/trl",
        per_device_train_batch_size=replies,
        num_generations=group,
        num_iterations=config.train.epochs,
        max_completion_length=rollout.max_response_tokens,
        max_steps=steps * config.train.epochs,
        learning_rate=config.train.lr,
        bf16=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = GRPOTrainer(
        model=str(model),
        reward_funcs=on_path,
        args=settings,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    started = time.process_time()
    trainer.train()
    spent = time.process_time() - started
    return {"replies_per_second": round(steps * replies / spent, 1)}


if __name__ == "__main__":
    main()
