"""Rewards for prompts with an answer beside them: `data.reward: exact` and `data.reward: math`."""

import re
from collections.abc import Callable, Mapping
from typing import Any, cast, get_args

from turnwise.envs.base import EnvError
from turnwise.envs.games.math_answers import Compare, final_answer, is_right, require_math_verify

MARKED = 300
"""Where a line `Answer: ...` is asked for, it is looked for in this many last characters, as verl
does."""
_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_SOURCES = (
    *("openai/gsm8k", "lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "math_dapo"),
    *("numina_aops_forum", "numina_synthetic_math", "numina_amc_aime", "numina_synthetic_amc"),
    *("numina_cn_k12", "numina_olympiads"),
)
"""Names in verl's data files of data sets whose questions have one answer."""


def built_in_reward(name: str, *, answer_column: str) -> Callable[..., float] | None:
    """The reward function of this name, called with a row's columns; None where it is another's.

    A right answer pays 1, a wrong one 0. In verl's data files, the column `data_source` names the
    set of questions: for math_dapo and those that begin with aime, a wrong answer pays -1, and only
    a line `Answer: ...` near the end counts, as there.

    Example:
        >>> reward = built_in_reward("exact", answer_column="answer")
        >>> reward(completion="6 * 7 is 42.\\n#### 42", answer="42.0")
        1.0
        >>> reward = built_in_reward("exact", answer_column="reward_model.ground_truth")
        >>> row = {"data_source": "math_dapo", "reward_model": {"ground_truth": "34"}}
        >>> reward(completion="So it is 34.\\nAnswer: 34", **row), reward(completion="34", **row)
        (1.0, -1.0)
    """
    if name not in get_args(Compare):
        return None
    compare = cast(Compare, name)
    if compare == "math":
        require_math_verify()

    def reward(*, completion: str, **row: Any) -> float:
        gold = str(_at(row, answer_column)).strip()
        source = row.get("data_source")
        strict = source == "math_dapo" or str(source).startswith("aime")
        if source is not None and source not in _SOURCES and not strict:
            raise EnvError(
                f"data.reward: {name} does not score data_source {source!r}; set data.reward to a "
                "function of yours, file.py:name"
            )
        marked = _ANSWER.findall(completion[-MARKED:] if strict else completion)
        if strict and not marked:
            return -1.0
        said = marked[-1] if marked else final_answer(completion)
        right = is_right(said.strip(), gold, compare=compare)
        return 1.0 if right else (-1.0 if strict else 0.0)

    return reward


def _at(row: Mapping[str, Any], path: str) -> Any:
    """The value at a column, or inside one."""
    value: Any = row
    for part in (path,) if path in row else path.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise EnvError(f"a row has no column {path!r}; see data.answer_column")
        value = cast(Mapping[str, Any], value)[part]
    return value
