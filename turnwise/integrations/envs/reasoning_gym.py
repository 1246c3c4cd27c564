"""Puzzles of reasoning-gym: `reasoning_gym:countdown`. One question, one answer, scored by the data
set."""

import base64
import importlib
import math
import pickle
from collections.abc import Mapping
from typing import Any

from turnwise.envs.base import BadActionError, BaseEnv
from turnwise.envs.gate import describe
from turnwise.envs.tools.worker import STALLED_SECONDS, Worker, WorkerError, computing_limit
from turnwise.integrations.envs.common import (
    OwnRandom,
    SplitBy,
    require,
    split_rule,
    start_in_split,
    unknown_name,
)

SCORE_SECONDS = 5.0
"""Seconds of computing for the score of one answer."""


class ReasoningGymEnv(BaseEnv):
    """A data set of reasoning-gym. The reward is the data set's own score of the answer, from 0 to
    1. An answer that it cannot read, or not in five seconds of computing, is a failed action and
    ends the episode.

    Some data sets evaluate an answer as algebra or as Python. So it is scored in a process of its
    own, which can be killed.

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
            data = base64.b64encode(pickle.dumps((self._data, self._entry))).decode()
        except (pickle.PicklingError, AttributeError, TypeError):  # it holds a lambda
            score, refused = _scored(self._data, self._entry, answer)
        else:
            score, refused = _scored_beside(data, answer)
        if score is not None:
            return score
        with OwnRandom(0).drawing():
            # Where even this fails the data set is broken, and no answer is to blame.
            float(self._data.score_answer(self._entry["answer"], self._entry))
        raise BadActionError(
            "The answer could not be read.",
            over=True,
            info={"success": False, "answer": str(self._entry["answer"]), "refused": refused},
        )


def _scored(data: Any, entry: Mapping[str, Any], answer: str) -> tuple[float | None, str]:
    """(the score of an answer, ""), or (None, why there is none)."""
    try:
        with OwnRandom(0).drawing():
            found = float(data.score_answer(answer, entry))
    except Exception as error:
        return None, describe(error)
    return (found, "") if math.isfinite(found) else (None, f"the score is {found}")


def _scored_beside(data: str, answer: str) -> tuple[float | None, str]:
    limit = SCORE_SECONDS + STALLED_SECONDS
    try:
        score, refused = _scorer.call(data, answer, SCORE_SECONDS, timeout=limit)
    except WorkerError as error:
        if "died" not in str(error):
            raise
        return None, f"scoring took more than {SCORE_SECONDS:g} s of computing, or ended Python"
    return score, refused


def score_within(data: str, answer: str, seconds: float) -> tuple[float | None, str]:
    """`_scored` with a data set and its entry that another process pickled, or the end of this
    process after so many seconds of computing."""
    pair: Any = pickle.loads(base64.b64decode(data))  # imports reasoning-gym before seconds count
    with computing_limit(seconds):
        return _scored(pair[0], pair[1], answer)


_scorer = Worker("turnwise.integrations.envs.reasoning_gym:score_within", memory_mb=4096)
