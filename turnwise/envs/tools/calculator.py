"""A calculator for models: arithmetic is parsed and computed exactly, never evaluated as code."""

import re
from fractions import Fraction

MAX_CHARS = 500
MAX_DEPTH = 50
MAX_BITS = 4096
"""Numerators and denominators stay below this size, so that no expression takes long."""
_TOKEN = re.compile(r"\s*(?:(\d+(?:\.\d+)?|\.\d+)|(\*\*|[-+*/^%()]))")


class CalculatorError(ValueError):
    """An expression that is not arithmetic, or too large."""


def calculator(expression: str) -> str:
    """Computes an arithmetic expression with + - * / ^ and brackets, for example (3 + 4.5) * 2.

    Args:
        expression: the arithmetic
    """
    try:
        return format_number(calculate(expression))
    except CalculatorError as error:
        return f"error: {error}"


def calculate(expression: str) -> Fraction:
    """The exact value of an expression.

    Raises:
        CalculatorError: it is not arithmetic, divides by zero, or would become too large.

    Example:
        >>> calculate("2 ^ 10 / 3 - .5"), calculate("-(2 + 3) ** 2")
        (Fraction(2045, 6), Fraction(-25, 1))
    """
    if len(expression) > MAX_CHARS:
        raise CalculatorError(
            f"an expression has at most {MAX_CHARS} characters, got {len(expression)}"
        )
    tokens: list[str] = []
    place = 0
    text = expression.replace(",", "").replace("\u00d7", "*").replace("\u00f7", "/").rstrip()
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            raise CalculatorError(
                f"expected a number or one of + - * / ^ % ( ), got {text[place : place + 10]!r}"
            )
        tokens.append(match[1] or match[2].replace("**", "^"))
        place = match.end()
    parser = _Parser(tokens)
    value = parser.sum(0)
    if parser.place < len(tokens):
        raise CalculatorError(f"expected the end, got {tokens[parser.place]!r}")
    return value


def format_number(value: Fraction) -> str:
    """The number in decimals; with twelve digits where it has no end.

    Example:
        >>> [format_number(Fraction(*parts)) for parts in ((7, 4), (1, 3), (-8,))]
        ['1.75', '0.333333333333', '-8']
    """
    if value.denominator == 1:
        return str(value.numerator)
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    if rest == 1 and value.denominator <= 10**12:
        digits = next(count for count in range(1, 60) if 10**count % value.denominator == 0)
        scaled = str(abs(value.numerator) * 10**digits // value.denominator).rjust(digits + 1, "0")
        return ("-" if value < 0 else "") + f"{scaled[:-digits]}.{scaled[-digits:]}".rstrip(
            "0"
        ).rstrip(".")
    return (
        f"{float(value):.12g}"
        if abs(value) < 10**300 and abs(value) > Fraction(1, 10**300)
        else str(value)
    )


class _Parser:
    """Recursive descent: sums of products of signed powers."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens
        self.place = 0

    def sum(self, depth: int) -> Fraction:
        value = self._product(depth)
        while self._peek() in ("+", "-"):
            sign = 1 if self._take() == "+" else -1
            value = _bounded(value + sign * self._product(depth))
        return value

    def _product(self, depth: int) -> Fraction:
        value = self._signed(depth)
        while self._peek() in ("*", "/", "%"):
            operator, right = self._take(), self._signed(depth)
            if operator != "*" and right == 0:
                raise CalculatorError("division by zero")
            value = _bounded(
                value * right
                if operator == "*"
                else value / right
                if operator == "/"
                else value % right
            )
        return value

    def _signed(self, depth: int) -> Fraction:
        negative = False
        while self._peek() in ("+", "-"):
            negative ^= self._take() == "-"
        value = self._power(depth)
        return -value if negative else value

    def _power(self, depth: int) -> Fraction:
        base = self._atom(depth)
        if self._peek() != "^":
            return base
        if depth >= MAX_DEPTH:
            raise CalculatorError(f"powers and brackets nest at most {MAX_DEPTH} deep")
        self._take()
        negative = False
        while self._peek() in ("+", "-"):
            negative ^= self._take() == "-"
        exponent = self._power(depth + 1)
        exponent = -exponent if negative else exponent
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if exponent.denominator != 1 or abs(exponent.numerator) * bits > MAX_BITS:
            raise CalculatorError("an exponent is a whole number and the result is not too large")
        if base == 0 and exponent < 0:
            raise CalculatorError("division by zero")
        return base**exponent.numerator

    def _atom(self, depth: int) -> Fraction:
        token = self._take()
        if token == "(":
            if depth >= MAX_DEPTH:
                raise CalculatorError(f"powers and brackets nest at most {MAX_DEPTH} deep")
            value = self.sum(depth + 1)
            if self._take() != ")":
                raise CalculatorError("a bracket is not closed")
            return value
        if not token or not (token[0].isdigit() or token[0] == "."):
            raise CalculatorError(f"expected a number or a bracket, got {token or 'the end'!r}")
        return _bounded(Fraction(token))

    def _peek(self) -> str:
        return self.tokens[self.place] if self.place < len(self.tokens) else ""

    def _take(self) -> str:
        token = self._peek()
        self.place += 1
        return token


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise CalculatorError("the number becomes too large")
    return value
