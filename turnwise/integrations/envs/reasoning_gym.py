"""Puzzles of reasoning-gym: `reasoning_gym:countdown`. One question, one answer, scored by the data set."""

import importlib
from collections.abc import Mapping
from typing import Any

from turnwise.envs.base import BaseEnv
from turnwise.integrations.envs.common import OwnRandom, require, start_in_split, unknown_name


class ReasoningGymEnv(BaseEnv):
    """A data set of reasoning-gym. The reward is the data set's own score of the answer, from 0 to 1.

    The seed makes the question. The question's text decides whether it is for training or held out (a fifth), so
    that no question is in both.

    Args:
        dataset: its name, such as countdown.
        config: further settings of the data set, such as {"max_numbers": 4}.
        success_at: the score from which an answer counts as right.
    """

    instruction = "Answer the question. Give the final answer only, without explanation, in the asked form."
    max_turns = 1

    def __init__(self, dataset: str, *, config: Mapping[str, Any] | None = None, success_at: float = 0.99) -> None:
        self._gym = require("reasoning_gym", extra="reasoning-gym")
        known = importlib.import_module("reasoning_gym.factory").DATASETS
        if dataset not in known:
            raise unknown_name("reasoning_gym", dataset, sorted(known))
        self._name, self._config, self._success_at = dataset, dict(config or {}), success_at
        self._data: Any = None
        self._entry: dict[str, Any] = {}

    def reset(self, seed: int | None = None, *, split: str = "train") -> str:
        return start_in_split(self._start, seed or 0, split)

    def _start(self, seed: int) -> str:
        with OwnRandom(seed).drawing():
            self._data = self._gym.create_dataset(self._name, seed=seed, size=1, **self._config)
            self._entry = self._data[0]
        return str(self._entry["question"])

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        with OwnRandom(0).drawing():
            score = float(self._data.score_answer(action, self._entry))
        return "Answered.", score, True, {"success": score >= self._success_at, "answer": str(self._entry["answer"])}
