"""Puzzles of reasoning-gym: `reasoning_gym:countdown`. One question, one answer, scored by the data set."""

import hashlib
import importlib
from collections.abc import Mapping
from typing import Any

from turnwise.envs.base import BaseEnv, EnvError
from turnwise.integrations.doors import OwnRandom, require, unknown_name
from turnwise.seeding import derive_seed

ATTEMPTS = 200


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
        for attempt in range(ATTEMPTS):
            number = derive_seed(seed or 0, f"reasoning-gym/{self._name}", attempt) % 2**31
            with OwnRandom(number).drawing():
                self._data = self._gym.create_dataset(self._name, seed=number, size=1, **self._config)
                self._entry = self._data[0]
            if _is_val(self._entry["question"]) == (split != "train"):
                return str(self._entry["question"])
        raise EnvError(
            f"reasoning_gym:{self._name}: none of {ATTEMPTS} questions belongs to split {split!r}; there are too few "
            "different ones, give it a larger config"
        )

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        with OwnRandom(0).drawing():
            score = float(self._data.score_answer(action, self._entry))
        return "Answered.", score, True, {"success": score >= self._success_at, "answer": str(self._entry["answer"])}


def _is_val(question: str) -> bool:
    return hashlib.blake2b(question.encode(), digest_size=4).digest()[0] % 5 == 0
