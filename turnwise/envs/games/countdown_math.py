"""Exact arithmetic on text that a model wrote. Parsed, never evaluated as code; every input is
answered quickly."""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

MAX_CHARS = 200
MAX_DIGITS = 9
MAX_NUMBERS = 16
MAX_DEPTH = 40
_SIGNS = str.maketrans(
    {"\u00d7": "*", "\u00b7": "*", "\u00f7": "/", "\u2212": "-", "[": "(", "]": ")"}
)


class ArithmeticSyntaxError(ValueError):
    """The text is no arithmetic that this parser knows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Value:
    """The value of an expression, and the numbers in it.

    Example:
        >>> evaluate("(3 + 5) / 2").result
        Fraction(4, 1)
    """

    result: Fraction | None
    """None: a division by zero."""
    numbers: tuple[int, ...]


def evaluate(text: str) -> Value:
    """The value of an expression over whole numbers with + - * / and brackets.

    A minus may lead it, or a bracket. Other signs, powers, names and calls are not part of it.
    There are at most 16 numbers of at most 9 digits, and the text has at most 200 characters, so
    that no result is large.

    Example:
        >>> evaluate("-3 + (-5 + 10)").result
        Fraction(2, 1)
        >>> evaluate("9**9**9")
        Traceback (most recent call last):
        turnwise.envs.games.countdown_math.ArithmeticSyntaxError: expected a number or a bracket, got '*'
    """  # noqa: E501
    if len(text) > MAX_CHARS:
        raise ArithmeticSyntaxError(
            f"an expression has at most {MAX_CHARS} characters, got {len(text)}"
        )
    tokens = list(_tokens(text.translate(_SIGNS)))
    numbers = tuple(int(token) for token in tokens if token.isdigit())
    if len(numbers) > MAX_NUMBERS:
        raise ArithmeticSyntaxError(
            f"an expression has at most {MAX_NUMBERS} numbers, got {len(numbers)}"
        )
    parser = _Parser(tokens)
    result = parser.sum(depth=0)
    if parser.peek() != "":
        raise ArithmeticSyntaxError(f"expected an operator or the end, got {parser.peek()!r}")
    return Value(result=result, numbers=numbers)


def _tokens(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        char = text[start]
        end = start + 1
        if char in "0123456789":
            while end < len(text) and text[end] in "0123456789":
                end += 1
            if end - start > MAX_DIGITS:
                raise ArithmeticSyntaxError(
                    f"a number has at most {MAX_DIGITS} digits, got {end - start}"
                )
            yield text[start:end]
        elif char in "+-*/()":
            yield char
        elif not char.isspace():
            raise ArithmeticSyntaxError(f"expected digits, + - * / or brackets, got {char!r}")
        start = end


class _Parser:
    """Recursive descent; None stands for a division by zero, which makes the whole None."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._next = 0

    def peek(self) -> str:
        return self._tokens[self._next] if self._next < len(self._tokens) else ""

    def take(self) -> str:
        token = self.peek()
        self._next += 1
        return token

    def sum(self, *, depth: int) -> Fraction | None:
        negative = self.peek() == "-"
        if negative:
            self.take()
        left = self._product(depth=depth)
        if negative and left is not None:
            left = -left
        while self.peek() in ("+", "-"):
            operator, right = self.take(), self._product(depth=depth)
            if left is not None and right is not None:
                left = left + right if operator == "+" else left - right
            else:
                left = None
        return left

    def _product(self, *, depth: int) -> Fraction | None:
        left = self._atom(depth=depth)
        while self.peek() in ("*", "/"):
            operator, right = self.take(), self._atom(depth=depth)
            if left is None or right is None or (operator == "/" and right == 0):
                left = None
            else:
                left = left * right if operator == "*" else left / right
        return left

    def _atom(self, *, depth: int) -> Fraction | None:
        token = self.take()
        if token.isdigit():
            return Fraction(int(token))
        if token != "(":
            raise ArithmeticSyntaxError(f"expected a number or a bracket, got {token!r}")
        if depth >= MAX_DEPTH:
            raise ArithmeticSyntaxError(f"brackets nest at most {MAX_DEPTH} deep")
        inside = self.sum(depth=depth + 1)
        if self.take() != ")":
            raise ArithmeticSyntaxError("a bracket is not closed")
        return inside
