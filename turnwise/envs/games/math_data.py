# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""Questions with answers: MetaMathQA's JSON, GSM8K's JSON lines, other files and hub data sets,
backward ones."""

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from turnwise.envs.base import EnvError
from turnwise.envs.games.math_answers import MAX_ANSWER_CHARS, final_answer
from turnwise.json_lines import FileError, read_json, read_json_lines, read_text

SAMPLE = Path(__file__).with_name("math_sample.jsonl")
"""Questions written for turnwise."""
HUB = "hf:"
SHAPES = (
    ("query", "response"),
    ("question", "answer"),
    ("problem", "solution"),
    ("problem", "answer"),
)
"""Columns that are known without being named: MetaMathQA's, GSM8K's, and two common ones."""
_WORD_VALUES = {
    "two": 2,
    "three": 3,
    "four": 4,
    "five": 5,
    "six": 6,
    "seven": 7,
    "eight": 8,
    "nine": 9,
    "ten": 10,
}
_WORD_VALUES.update(
    {"eleven": 11, "twelve": 12, "twenty": 20, "thirty": 30, "forty": 40, "fifty": 50}
)
_DIGITS = r"\d+(?:,\d{3})*(?:\.\d+)?"
_NUMBER = re.compile(
    rf"(?<![\w./:^-])(?:{_DIGITS}|(?i:{'|'.join(_WORD_VALUES)}))(?![\w/:^]|\.\d|,\d|-\w)"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A question and its answer.

    Example:
        >>> Question(text="What is 6 times 7?", answer="42",
        ...     source="What is 6 times 7?").is_val(0.0)
        False
    """

    text: str
    answer: str
    source: str
    """The question that this one was made from, or itself. Those of one source stay on one side of
    a split."""
    kind: str = "given"

    @property
    def key(self) -> str:
        """Names the source by its content: letters and digits only, so that spacing and punctuation
        do not matter."""
        return "".join(char for char in self.source.casefold() if char.isalnum())

    def is_val(self, val_fraction: float) -> bool:
        digest = hashlib.blake2b(self.key.encode(), digest_size=7).digest()
        return int.from_bytes(digest, "big") / (1 << 56) < val_fraction


def load_questions(
    source: str | Path | None = None,
    *,
    question_column: str | None = None,
    answer_column: str | None = None,
) -> tuple[Question, ...]:
    """The questions of a file (JSON list or lines), a hub data set
    ("hf:owner/name[/subset][:split]"), or the sample.

    The answer is what stands after "The answer is:" or "####" in the answer column, or all of it.

    Raises:
        EnvError: a column is missing, or a row has no usable answer; the message names the row.
    """
    text = str(SAMPLE if source is None else source)
    stamp = 0
    if not text.startswith(HUB):
        path = Path(text).expanduser()
        if not path.is_file():
            raise FileNotFoundError(
                f"no question file at {path}; give JSON or JSON lines, or {HUB}owner/name for a "
                "data set of the hub"
            )
        text, stamp = str(path.resolve()), path.stat().st_mtime_ns
    return _load(text, stamp, question_column, answer_column)


@lru_cache(maxsize=8)
def _load(
    source: str, _modified: int, question_column: str | None, answer_column: str | None
) -> tuple[Question, ...]:
    rows = (
        _hub_rows(source.removeprefix(HUB)) if source.startswith(HUB) else _file_rows(Path(source))
    )
    return questions_of(
        rows, question_column=question_column, answer_column=answer_column, where=source
    )


def questions_of(
    rows: Iterable[Any],
    *,
    question_column: str | None = None,
    answer_column: str | None = None,
    where: str = "questions",
) -> tuple[Question, ...]:
    """The questions of rows that are at hand.

    Example:
        >>> questions_of([{"query": "2 + 2?", "response": "Easy. The answer is: 4"}])[0].answer
        '4'
    """
    questions: list[Question] = []
    columns: tuple[str, str] | None = None
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, Mapping):
            raise EnvError(f"{where}, row {number}: a row is an object, got {type(row).__name__}")
        fields = cast(Mapping[str, Any], row)
        columns = columns or _columns(fields, question_column, answer_column, where)
        questions.append(_question(fields, columns, f"{where}, row {number}"))
    if not questions:
        raise EnvError(f"{where}: a data set has at least one question, got none")
    return tuple(questions)


def _columns(
    row: Mapping[str, Any], question: str | None, answer: str | None, source: str
) -> tuple[str, str]:
    for known_question, known_answer in SHAPES:
        pair = (question or known_question, answer or known_answer)
        if all(name in row for name in pair):
            return pair
    raise EnvError(
        f"{source}: no column pair like query/response or question/answer among "
        f"{', '.join(map(str, row))}; "
        f"set question_column and answer_column"
    )


def _question(row: Mapping[str, Any], columns: tuple[str, str], where: str) -> Question:
    missing = [name for name in columns if name not in row]
    if missing:
        raise EnvError(f"{where}: column {missing[0]!r} is missing")
    text, raw = row[columns[0]], row[columns[1]]
    if not isinstance(text, str) or not text.strip():
        raise EnvError(f"{where}: the question is text that is not empty, got {text!r:.80}")
    if isinstance(raw, float) and raw.is_integer():
        raw = int(raw)
    answer = final_answer(str(raw))
    if raw is None or not answer or len(answer) > MAX_ANSWER_CHARS:
        raise EnvError(
            f"{where}: the answer has 1 to {MAX_ANSWER_CHARS} characters, got {answer!r:.80}"
        )
    original = row.get("original_question")
    source = original if isinstance(original, str) and original.strip() else text
    return Question(
        text=text.strip(), answer=answer, source=source, kind=str(row.get("type", "given"))
    )


def _file_rows(path: Path) -> Sequence[Any]:
    try:
        if read_text(path).lstrip().startswith("["):
            return cast(list[Any], read_json(path, lambda rows: rows))
        return [row for _, row in read_json_lines(path, lambda row: row)]
    except FileError as error:
        raise EnvError(f"{error}; it is a JSON list or JSON lines in UTF-8") from error


def _hub_rows(name: str) -> Iterable[Any]:
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError(
            f"{HUB}{name} needs the library datasets ({error}); run: pip install datasets"
        ) from error
    place, _, split = name.partition(":")
    owner, _, rest = place.partition("/")
    repository, _, subset = rest.partition("/")
    load: Any = datasets.load_dataset
    return cast(
        Iterable[Any], load(f"{owner}/{repository}", subset or None, split=split or "train")
    )


def backward_questions(question: Question, *, limit: int = 1) -> tuple[Question, ...]:
    """Up to `limit` questions that ask for a number of this one, given its answer (FOBAR, arXiv
    2308.07758).

    A number in the text, in digits or a word, becomes an unknown; the answer is the number. Numbers
    that are part of something else (a fraction, a time, "3rd") are left alone, and so are questions
    whose answer is not a plain number.

    Example:
        >>> question = Question(text="Ann has 3 bags of 4 nuts. How many nuts?", answer="12",
        ...     source="")
        >>> for back in backward_questions(question, limit=2):
        ...     print(back.answer, "<-", back.text)
        3 <- Ann has x bags of 4 nuts. How many nuts?
        The answer to the question above is 12. What is the value of x?
        4 <- Ann has 3 bags of x nuts. How many nuts?
        The answer to the question above is 12. What is the value of x?
    """
    if not re.fullmatch(r"-?\d+(?:,\d{3})*(?:\.\d+)?", question.answer):
        return ()
    name = next(
        (name for name in "xyzuvw" if not re.search(rf"\b{name}\b", question.text, re.IGNORECASE)),
        None,
    )
    if name is None:
        return ()
    backward: list[Question] = []
    for match in _NUMBER.finditer(question.text):
        if len(backward) == limit:
            break
        masked = question.text[: match.start()] + name + question.text[match.end() :]
        text = (
            f"{masked}\nThe answer to the question above is {question.answer}. What is the value "
            f"of {name}?"
        )
        answer = str(_WORD_VALUES.get(match[0].lower(), match[0].replace(",", "")))
        backward.append(Question(text=text, answer=answer, source=question.source, kind="backward"))
    return tuple(backward)
