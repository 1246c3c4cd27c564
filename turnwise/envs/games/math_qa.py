"""Math questions: answer, and try again for half the reward."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

from turnwise.envs.base import BaseEnv, EnvError
from turnwise.envs.games.math_answers import Compare, is_right, require_math_verify
from turnwise.envs.games.math_data import Question, backward_questions, load_questions, questions_of
from turnwise.envs.validate import refuse_keywords
from turnwise.seeding import derive_seed


class MathQAEnv(BaseEnv):
    """One question per episode. A right answer at the first try earns 1, then 1/2, 1/4, ...; a
    wrong one earns 0.

    Train and validation questions are told apart by the content of the question they were made
    from, so a rewritten or backward question is never on the other side of its original.

    Example:
        >>> env = MathQAEnv(data=[{"question": "What is 6 times 7?", "answer": "42"}], max_tries=2)
        >>> env.reset(seed=0)
        'What is 6 times 7?'
        >>> env.step("41")[:3], env.step("42.0")[:3]
        (('Incorrect. Think again. What is 6 times 7?', 0.0, False), ('Correct.', 0.5, True))
    """

    instruction = (
        "Solve the math problem. Answer with the final result alone: a number or an expression, no "
        "sentence."
    )

    def __init__(
        self,
        *,
        data: str | Path | Sequence[dict[str, Any]] | None = None,
        val_data: str | Path | Sequence[dict[str, Any]] | None = None,
        question_column: str | None = None,
        answer_column: str | None = None,
        val_fraction: float = 0.1,
        compare: Compare = "exact",
        verify_timeout: float = 5.0,
        backward: int = 0,
        max_tries: int = 5,
    ) -> None:
        """Reads the questions; environments with the same file share them.

        Args:
            data: JSON (MetaMathQA), JSON lines (GSM8K), rows or "hf:owner/name[/subset][:split]".
                None: a small sample.
            val_data: questions for validation, of the same form. None: the share `val_fraction` of
                `data`.
            question_column: where it is not query, question or problem.
            answer_column: where it is not response, answer or solution.
            compare: exact (numbers and text, normalised) or math (math-verify, extra `math`).
            verify_timeout: seconds of computing that math-verify gets for one answer. One that
                takes more is wrong.
            backward: how many backward questions to add for each question (0: none).
            max_tries: answers per episode.
        """
        if compare not in ("exact", "math"):
            raise ValueError(f"compare is exact or math, got {compare!r}")
        if compare == "math":
            require_math_verify()
        if max_tries < 1 or backward < 0 or verify_timeout <= 0:
            raise ValueError(
                f"max_tries is at least 1, backward at least 0 and verify_timeout positive, "
                f"got {max_tries}, {backward} and {verify_timeout}"
            )
        if val_data is None and not 0.0 < val_fraction < 1.0:
            raise ValueError(
                "val_fraction lies between 0 and 1 so that both splits have questions, got "
                f"{val_fraction}"
            )
        columns = (question_column, answer_column)
        self.questions = _split(
            _read(data, columns),
            None if val_data is None else _read(val_data, columns),
            val_fraction,
        )
        if backward:
            self.questions = {
                split: _with_backward(side, backward) for split, side in self.questions.items()
            }
        self.compare: Compare = compare
        self.verify_timeout = verify_timeout
        self.max_tries = max_tries
        self.max_turns = max_tries
        self._question: Question | None = None
        self._tries = 0

    def reset(self, seed: int | None = None, *, split: str = "train", **kwargs: Any) -> str:
        """The question of this seed."""
        refuse_keywords(kwargs, name="math_qa")
        if split not in self.questions:
            raise ValueError(f"split is one of {', '.join(self.questions)}, got {split!r}")
        side = self.questions[split]
        self._question = side[derive_seed(seed or 0, "math_qa.question") % len(side)]
        self._tries = 0
        return self._question.text

    @property
    def question(self) -> Question:
        """The current question."""
        if self._question is None:
            raise EnvError(
                "an episode begins with reset(), but there is no question yet, or it is over"
            )
        return self._question

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        """(verdict, reward, over, info). The episode ends with the right answer or the last try."""
        question = self.question
        right = is_right(action, question.answer, compare=self.compare, timeout=self.verify_timeout)
        reward = 0.5**self._tries if right else 0.0
        self._tries += 1
        done = right or self._tries >= self.max_tries
        info = {"success": right, "tries": self._tries, "kind": question.kind}
        if done:
            self._question = None
            return (
                ("Correct." if right else f"Incorrect. The answer is {question.answer}."),
                reward,
                True,
                info,
            )
        return f"Incorrect. Think again. {question.text}", reward, False, info

    def state_key(self) -> str | None:
        return None if self._question is None else f"{self._tries} {self._question.text}"

    def random_action(self, rng: Random) -> str:
        """A number, rarely the right one."""
        return self.question.answer if rng.random() < 0.1 else str(rng.randint(0, 100))


def _read(
    data: str | Path | Sequence[dict[str, Any]] | None, columns: tuple[str | None, str | None]
) -> tuple[Question, ...]:
    if data is None or isinstance(data, str | Path):
        return load_questions(data, question_column=columns[0], answer_column=columns[1])
    return questions_of(data, question_column=columns[0], answer_column=columns[1])


def _split(
    questions: tuple[Question, ...], val: tuple[Question, ...] | None, val_fraction: float
) -> dict[str, tuple[Question, ...]]:
    """The questions of both splits. A training question that is also in `val_data` is removed."""
    if val is not None:
        keys = {question.key for question in val}
        sides = {
            "train": tuple(question for question in questions if question.key not in keys),
            "val": val,
        }
    elif len({question.key for question in questions}) == 1:
        return {"train": questions, "val": questions}
    else:
        sides = _split_by_content(questions, val_fraction)
    for split, side in sides.items():
        if not side:
            raise EnvError(
                f"math_qa: {len(questions)} questions leave none for {split}; "
                f"give more, or change val_fraction or val_data"
            )
    return sides


@lru_cache(maxsize=8)
def _split_by_content(
    questions: tuple[Question, ...], val_fraction: float
) -> dict[str, tuple[Question, ...]]:
    val = tuple(question.is_val(val_fraction) for question in questions)
    return {
        "train": tuple(question for question, flag in zip(questions, val, strict=True) if not flag),
        "val": tuple(question for question, flag in zip(questions, val, strict=True) if flag),
    }


@lru_cache(maxsize=8)
def _with_backward(questions: tuple[Question, ...], limit: int) -> tuple[Question, ...]:
    return questions + tuple(
        back for question in questions for back in backward_questions(question, limit=limit)
    )
