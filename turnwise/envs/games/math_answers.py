"""Whether an answer is right: as normalised text and numbers, or as mathematics by math-verify."""

import re
import threading
from fractions import Fraction
from typing import Any, Literal

from turnwise.envs.tools.worker import Worker, WorkerError

Compare = Literal["exact", "math"]
MAX_ANSWER_CHARS = 1000
"""A longer answer is wrong: no final answer is that long."""
_NUMBER = re.compile(r"([+-]?)(\d{1,40})(?:\.(\d{1,40}))?(?:/(\d{1,40}))?")
_MARK = re.compile(r"the answer is:?|####", re.IGNORECASE)


def final_answer(text: str) -> str:
    """What stands after the last mark of a final answer ("The answer is:", "####", a box), or the whole text.

    Example:
        >>> final_answer("6 * 7 = 42, so\\n#### 42"), final_answer("The answer is: $x + 1$"), final_answer(" 7 ")
        ('42', '$x + 1$', '7')
    """
    end = max((match.end() for match in _MARK.finditer(text)), default=-1)
    return text[end:].strip() if end >= 0 else _boxed(text) or text.strip()


def _boxed(text: str) -> str | None:
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 1, start + len("\\boxed{")
    for place in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[begin:place].strip()
    return None


def normal_form(answer: str) -> str | Fraction:
    """The number that an answer is, or its text in lower case without decoration.

    Example:
        >>> normal_form("$1,234.50") == normal_form("1234.5"), normal_form(" Blue  Whale. ")
        (True, 'blue whale')
    """
    text = " ".join(answer.casefold().split()).rstrip(".").strip("$ ").replace("\\$", "").removesuffix("\\%")
    text = text.removesuffix("%").strip()
    plain = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text).replace(" ", "").replace("$", "")
    match = _NUMBER.fullmatch(plain)
    if match is None:
        return text
    sign, whole, decimals, below = match.groups()
    value = Fraction(int(whole + (decimals or "")), 10 ** len(decimals or ""))
    if below is not None:
        if int(below) == 0:
            return text
        value /= int(below)
    return -value if sign == "-" else value


def is_right(answer: str, gold: str, *, compare: Compare = "exact", timeout: float = 5.0) -> bool:
    """Whether an answer equals the gold one. Never evaluates the model's text in this process.

    exact: the same number or the same text after normalisation. math: what exact accepts, and what math-verify holds
    for equal; it runs in a process of its own with `timeout`, so it is safe in threads, and an expression that would
    never end is wrong.

    Example:
        >>> is_right("42.0", "42"), is_right("9**9**9**9", "42"), is_right("1/2", "0.5")
        (True, False, True)
    """
    if len(answer) > MAX_ANSWER_CHARS:
        return False
    # The reply may be a sentence; the gold answer was taken from its mark when the data was read.
    if normal_form(answer) == normal_form(gold) or normal_form(final_answer(answer)) == normal_form(gold):
        return True
    return compare == "math" and _math_equal(answer, gold, timeout)


_lock = threading.Lock()
_worker: Worker | None = None


def require_math_verify() -> None:
    """Raises where math-verify is not installed; the message names the extra."""
    from importlib.util import find_spec

    if find_spec("math_verify") is None:
        raise ImportError("compare: math needs math-verify, not installed; run: pip install 'turnwise[math]'")


def _math_equal(answer: str, gold: str, timeout: float) -> bool:
    global _worker
    require_math_verify()
    with _lock:
        if _worker is None:
            _worker = Worker("turnwise.envs.games.math_answers:verify_here", memory_mb=4096)
    try:
        return bool(_worker.call(answer, gold, timeout=timeout))
    except TimeoutError:
        return False
    except WorkerError as error:
        if "died" in str(error) or "MemoryError" in str(error):
            return False  # the expression was too much for the limits, which is an answer that is not right
        raise


def verify_here(answer: str, gold: str) -> bool:
    """math-verify's verdict, computed in this process without its signal timeouts: the caller kills the process."""
    import math_verify

    library: Any = math_verify  # its annotations leave out None, which its documentation gives for "no timeout"
    wanted = library.parse(_as_math(gold), parsing_timeout=None)
    given = library.parse(_as_math(answer), parsing_timeout=None)
    return bool(wanted) and bool(given) and bool(library.verify(wanted, given, timeout_seconds=None))


def _as_math(text: str) -> str:
    """LaTeX is found between dollar signs; a bare expression is put there."""
    return text if "$" in text or "\\boxed" in text else f"${text}$"
