"""Whether an answer is right: as normalised text and numbers, or as mathematics by math-verify."""

import importlib
import re
import threading
from fractions import Fraction
from typing import Any, Literal

from turnwise.envs.tools.worker import STALLED_SECONDS, Worker, WorkerError, computing_limit

Compare = Literal["exact", "math"]
MAX_ANSWER_CHARS = 1000
"""A longer answer is wrong: no final answer is that long."""
MAX_POWER_DIGITS = 100_000
"""An answer with a larger power of numbers is wrong, and not computed."""
_NUMBER = re.compile(r"([+-]?)(?=\.?\d)(\d{0,40})(?:\.(\d{1,40}))?(?:/(\d{1,40}))?")
_MIXED = re.compile(r"([+-]?) ?(\d{1,40}) (\d{1,40}) ?/ ?(\d{1,40})")
_MIXED_WITHIN = re.compile(r"(?<![\d./^_{])(\d+) +(\d+) ?/ ?(\d+)(?![\d./])")
_LIST = re.compile(r"(\\?[(\[{])([^()\[\]{}]*,[^()\[\]{}]*)(\\?[)\]}])")
_WORD = re.compile(r"(?<![\\a-z])(?!(?:sin|cos|tan|log|exp|sqrt)\b)[a-z]{3,}", re.IGNORECASE)
_MARK = re.compile(r"the answer is:?|####", re.IGNORECASE)


def final_answer(text: str) -> str:
    """The text after the last mark of a final answer ("The answer is:", "####", a box), or the
    whole text.

    Example:
        >>> final_answer("6 * 7 = 42, so\\n#### 42"), final_answer("The answer is: $x + 1$")
        ('42', '$x + 1$')
        >>> final_answer(" 7 ")
        '7'
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

    Spaces count between words only.

    Example:
        >>> normal_form("$1,234.50") == normal_form("1234.5"), normal_form(" Blue  Whale. ")
        (True, 'blue whale')
        >>> normal_form("3 1/2"), normal_form("-.5")
        (Fraction(7, 2), Fraction(-1, 2))
        >>> normal_form("( 1, 2.0 )"), normal_form("x + 1")
        ('(1,2)', 'x+1')
    """
    text = (
        " ".join(answer.casefold().split())
        .rstrip(".")
        .strip("$ ")
        .replace("\\$", "")
        .removesuffix("\\%")
    )
    text = text.removesuffix("%").strip()
    value = _number(text)
    if value is not None:
        return value
    text = re.sub(r" ?([^\w\s]) ?", r"\1", text)
    text = re.sub(r"(?<=\d) (?=[^\W\d])", "", text)
    several = _LIST.fullmatch(text)
    if several is not None:
        first, inside, last = several.groups()
        text = first + ",".join(str(normal_form(part)) for part in inside.split(",")) + last
    return text


def _number(text: str) -> Fraction | None:
    """The value of a whole number, a decimal, a fraction or a mixed number; None for all else."""
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text).replace("$", "")
    mixed = _MIXED.fullmatch(text)
    match = mixed or _NUMBER.fullmatch(text.replace(" ", ""))
    if match is None:
        return None
    sign, whole, further, below = match.groups(default="")
    divisor = int(below or "1")
    if divisor == 0:
        return None
    if mixed is not None:
        value = int(whole) + Fraction(int(further), divisor)
    else:
        value = Fraction(int(whole + further), divisor * 10 ** len(further))
    return -value if sign == "-" else value


def is_right(answer: str, gold: str, *, compare: Compare = "exact", timeout: float = 5.0) -> bool:
    """Whether an answer equals the gold one. Never evaluates the model's text in this process.

    exact: the same number or the same text after normalisation. math: what exact accepts, and what
    math-verify holds for equal; it runs in a process of its own, so it is safe in threads, and an
    expression that takes more than `timeout` seconds of computing is wrong. Where the gold answer
    is words, only exact counts: to mathematics they are products of letters.

    Raises:
        TimeoutError: the process answers nothing, although it computes little: the machine is at
            fault, not the answer.

    Example:
        >>> is_right("42.0", "42"), is_right("9**9**9**9", "42"), is_right("1/2", "0.5")
        (True, False, True)
    """
    if len(answer) > MAX_ANSWER_CHARS:
        return False
    # The reply may be a sentence; the gold answer was taken from its mark when the data was read.
    if normal_form(answer) == normal_form(gold) or normal_form(final_answer(answer)) == normal_form(
        gold
    ):
        return True
    words = _WORD.search(gold) is not None and not re.search(r"\d", gold)
    if compare != "math" or words or too_large(final_answer(answer)):
        return False
    return _math_equal(final_answer(answer), gold, timeout)


def too_large(text: str) -> bool:
    """Whether some power of plain numbers in a text has too many digits to be an answer.

    Example:
        >>> too_large("9**9**9**9"), too_large("9^{9^{9}}"), too_large("2^{10} + x^{2}")
        (True, True, False)
    """
    text = re.sub(r"[(){}\s]+(?=\^)|(?<=\^)[(){}\s]+", "", text.replace("**", "^"))
    for chain in re.findall(r"\d+(?:\^-?\d+)+", text):
        *bases, last = chain.split("^")
        exponent = abs(int(last))
        for base in reversed(bases):
            if exponent * len(base) > MAX_POWER_DIGITS:
                return True
            exponent = abs(int(base)) ** exponent
    return False


_lock = threading.Lock()
_worker: Worker | None = None


def require_math_verify() -> None:
    """Raises where math-verify is not installed; the message names the extra."""
    from importlib.util import find_spec

    if find_spec("math_verify") is None:
        raise ImportError(
            "compare: math needs math-verify, not installed; run: pip install 'turnwise[math]'"
        )


def _math_equal(answer: str, gold: str, timeout: float) -> bool:
    global _worker
    require_math_verify()
    with _lock:
        if _worker is None:
            _worker = Worker("turnwise.envs.games.math_answers:verify_within", memory_mb=4096)
    try:
        return bool(_worker.call(answer, gold, timeout, timeout=timeout + STALLED_SECONDS))
    except WorkerError as error:
        if "died" in str(error) or "MemoryError" in str(error):
            # The expression was too much for the limits, which is an answer that is not right.
            return False
        raise


def verify_within(answer: str, gold: str, seconds: float) -> bool:
    """`verify_here`, or the end of this process after so many seconds of computing."""
    importlib.import_module("math_verify")  # before the seconds count
    with computing_limit(seconds):
        return verify_here(answer, gold)


def verify_here(answer: str, gold: str) -> bool:
    """math-verify's verdict, computed in this process without its own timeouts."""
    import math_verify

    # Its annotations leave out None, which its documentation gives for "no timeout".
    library: Any = math_verify
    latex = [library.LatexExtractionConfig()]
    # Without a fallback: it would take any number out of a text that is no mathematics.
    wanted, given = (
        library.parse(
            _as_math(text),
            extraction_config=latex,
            fallback_mode="no_fallback",
            parsing_timeout=None,
        )
        for text in (gold, answer)
    )
    return (
        bool(wanted) and bool(given) and bool(library.verify(wanted, given, timeout_seconds=None))
    )


def _as_math(text: str) -> str:
    """LaTeX is found between dollar signs; a bare expression is put there, in LaTeX's spelling."""
    text = _MIXED_WITHIN.sub(r"\1\\frac{\2}{\3}", text.replace("**", "^"))
    return text if "$" in text or "\\boxed" in text else f"${text}$"
