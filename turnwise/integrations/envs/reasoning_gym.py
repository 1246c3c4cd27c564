"""Puzzles of reasoning-gym: `reasoning_gym:countdown`. One question, one answer, scored by the data
set."""

import importlib
import math
from collections.abc import Mapping
from typing import Any

from turnwise.envs.base import BadActionError, BaseEnv
from turnwise.envs.gate import describe
from turnwise.integrations.envs.common import (
    OwnRandom,
    SplitBy,
    require,
    split_rule,
    start_in_split,
    unknown_name,
)


class ReasoningGymEnv(BaseEnv):
    """A data set of reasoning-gym. The reward is the data set's own score of the answer, from 0 to
    1. An answer that it cannot read is a failed action and ends the episode.

    The seed determines the question. A hash of its text assigns it to train or, for a fifth of the
    questions, to val, so that no question is in both.

    Args:
        dataset: its name, such as countdown.
        config: further settings of the data set, such as {"max_numbers": 4}.
        success_at: the score from which an answer counts as right.
        split_by: `seed` makes one question where `opening` makes several until one fits; a question
            may then be in both splits.
    """

    instruction = (
        "Answer the question. Give the final answer only, without explanation, in the asked form."
    )
    max_turns = 1

    def __init__(
        self,
        dataset: str,
        *,
        config: Mapping[str, Any] | None = None,
        success_at: float = 0.99,
        split_by: str = "opening",
    ) -> None:
        self._gym = require("reasoning_gym", extra="reasoning-gym")
        known = importlib.import_module("reasoning_gym.factory").DATASETS
        if dataset not in known:
            raise unknown_name("reasoning_gym", dataset, sorted(known))
        self._name, self._config, self._success_at = dataset, dict(config or {}), success_at
        self._split_by: SplitBy = split_rule(split_by)
        self._data: Any = None
        self._entry: dict[str, Any] = {}

    def reset(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, seed: int | None = None, *, split: str = "train"
    ) -> str:
        return start_in_split(self._start, seed or 0, split, by=self._split_by)

    def _start(self, seed: int) -> str:
        with OwnRandom(seed).drawing():
            self._data = self._gym.create_dataset(self._name, seed=seed, size=1, **self._config)
            self._entry = self._data[0]
        return str(self._entry["question"])

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        with OwnRandom(0).drawing():
            score = self._score(action)
        return (
            "Answered.",
            score,
            True,
            {"success": score >= self._success_at, "answer": str(self._entry["answer"])},
        )

    def _score(self, answer: str) -> float:
        """The data set's score of an answer.

        Raises:
            BadActionError: the data set cannot read this answer, and it can read the right one.
        """
        try:
            score = float(self._data.score_answer(answer, self._entry))
            if not math.isfinite(score):
                raise ValueError(f"the score is {score}")
            return score
        except Exception as error:
            # Where even this fails the data set is broken, and no answer is to blame.
            float(self._data.score_answer(self._entry["answer"], self._entry))
            raise BadActionError(
                "The answer could not be read.",
                over=True,
                info={
                    "success": False,
                    "answer": str(self._entry["answer"]),
                    "refused": describe(error),
                },
            ) from error
