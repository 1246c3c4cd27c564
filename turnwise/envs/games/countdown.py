"""Countdown: reach a target with arithmetic that uses every given number exactly once. Instances
are generated."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations
from random import Random
from typing import Any

from turnwise.envs.base import BaseEnv, EnvError
from turnwise.envs.games.countdown_math import ArithmeticSyntaxError, evaluate
from turnwise.envs.validate import refuse_keywords
from turnwise.seeding import derive_seed


@dataclass(frozen=True, kw_only=True, slots=True)
class Puzzle:
    """One instance, solvable by construction.

    Example:
        >>> Puzzle(numbers=(3, 5, 2), target=16, solution="(3 + 5) * 2").target
        16
    """

    numbers: tuple[int, ...]
    target: int
    solution: str


class Countdown(BaseEnv):
    """One expression per try: `right` if it hits the target, `almost` if it only uses the numbers,
    0 otherwise.

    Example:
        >>> env = Countdown()
        >>> print(env.reset(seed=0))
        Numbers: 6, 4, 4. Target: 28.
        >>> env.step("4 + 6 * 4")[1], Countdown.judge("9**9**9", (9, 9, 9), 81)
        (1.0, 'unreadable')
    """

    def __init__(
        self,
        *,
        min_numbers: int = 3,
        max_numbers: int = 4,
        max_number: int = 20,
        max_target: int = 100,
        operators: str = "+-*/",
        right: float = 1.0,
        almost: float = 0.1,
        tries: int = 1,
    ) -> None:
        """`operators` are those that the instances are built from; an answer may use all four. With
        `tries` > 1 a wrong expression is answered with its value and may be followed by another."""
        if not 2 <= min_numbers <= max_numbers <= 8:
            raise ValueError(
                f"2 <= min_numbers <= max_numbers <= 8, got {min_numbers} and {max_numbers}"
            )
        if not operators or set(operators) - set("+-*/"):
            raise ValueError(f"operators are some of + - * /, got {operators!r}")
        if max_number < 2 or max_target < 2 or tries < 1:
            raise ValueError(
                f"max_number and max_target are at least 2 and tries 1, got {max_number}, "
                f"{max_target}, {tries}"
            )
        self.min_numbers, self.max_numbers = min_numbers, max_numbers
        self.max_number, self.max_target = max_number, max_target
        self.operators, self.right, self.almost, self.tries = operators, right, almost, tries
        self.max_turns = tries
        self.instruction = (
            "Write an arithmetic expression that equals the target. Use every given number exactly "
            "once, "
            "with + - * / and brackets, for example (1 + 2) * 3."
        )
        self.puzzle = Puzzle(numbers=(), target=0, solution="")
        self._tries_left = 0

    def reset(self, seed: int | None = None, *, split: str = "train", **kwargs: Any) -> str:
        refuse_keywords(kwargs, name="countdown")
        self.puzzle = self._draw(seed or 0, split)
        self._tries_left = self.tries
        return self._state_text()

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        verdict = self.judge(action, self.puzzle.numbers, self.puzzle.target)
        self._tries_left -= 1
        reward = {"right": self.right, "wrong value": self.almost}.get(verdict, 0.0)
        done = verdict == "right" or self._tries_left == 0
        text = f"Verdict: {verdict}." if done else f"Verdict: {verdict}. {self._state_text()}"
        return text, reward, done, {"success": verdict == "right", "verdict": verdict}

    @staticmethod
    def judge(text: str, numbers: tuple[int, ...], target: int) -> str:
        """ "right", "wrong value", "wrong numbers" or "unreadable". The expression stands before
        the first equals sign; what follows one must have its value, if anything follows."""
        if len(text) > 1000:
            return "unreadable"
        first, *claims = text.split("=")
        try:
            value = evaluate(first)
            claims = [claim.strip(" .\n") for claim in claims]
            claimed = [evaluate(claim).result for claim in claims if claim]
        except ArithmeticSyntaxError:
            return "unreadable"
        if sorted(value.numbers) != sorted(numbers):
            return "wrong numbers"
        return "right" if {value.result, *claimed} == {target} else "wrong value"

    def random_action(self, rng: Random) -> str:
        """An expression that uses every number once, most likely of another value."""
        return _random_expression(list(self.puzzle.numbers), rng, "+-*")[0]

    def expert_action(self) -> str | None:
        """The first sum or difference of the numbers that hits the target, else the expression that
        the puzzle was made from."""
        if not self.puzzle.numbers:
            return None
        return next(
            (text for text, value in signings(self.puzzle.numbers) if value == self.puzzle.target),
            self.puzzle.solution,
        )

    def expert_thought(self) -> str | None:
        """The search for it, try by try; None where + and - do not suffice: what would be written
        there is not how the expression was found."""
        tries: list[str] = []
        for text, value in signings(self.puzzle.numbers):
            tries.append(f"{text}={value}")
            if value == self.puzzle.target:
                return ", ".join(tries)
        return None

    def _state_text(self) -> str:
        return f"Numbers: {', '.join(map(str, self.puzzle.numbers))}. Target: {self.puzzle.target}."

    def _draw(self, seed: int, split: str) -> Puzzle:
        """The first puzzle of this seed whose numbers and target belong to the split."""
        rng = Random(derive_seed(seed, "countdown"))
        for _ in range(100_000):
            count = rng.randint(self.min_numbers, self.max_numbers)
            numbers = [rng.randint(1, self.max_number) for _ in range(count)]
            solution, value = _random_expression(numbers, rng, self.operators)
            if value is None or value.denominator != 1 or not 1 <= value <= self.max_target:
                continue
            rng.shuffle(numbers)
            if _is_val(tuple(numbers), int(value)) == (split != "train"):
                return Puzzle(numbers=tuple(numbers), target=int(value), solution=solution)
        raise EnvError(
            f"countdown: no puzzle for split {split!r} with numbers up to {self.max_number} and "
            "targets up to "
            f"{self.max_target}; allow larger ones"
        )


def signings(numbers: Sequence[int]) -> Iterator[tuple[str, int]]:
    """(expression, value) of every way to add some of the numbers and subtract the others, with
    few minuses first, and each once. What is added comes first, so that no minus leads.

    Example:
        >>> list(signings((6, 4, 1)))[:4]
        [('6+4+1', 11), ('4+1-6', -1), ('6+1-4', 3), ('6+4-1', 9)]
    """
    places = range(len(numbers))
    seen: set[str] = set()
    for count in places:
        for minus in combinations(places, count):
            added = [numbers[place] for place in places if place not in minus]
            taken = [numbers[place] for place in minus]
            text = "".join(["+".join(map(str, added)), *(f"-{number}" for number in taken)])
            if text not in seen:
                seen.add(text)
                yield text, sum(added) - sum(taken)


def _random_expression(
    numbers: list[int], rng: Random, operators: str
) -> tuple[str, Fraction | None]:
    """(expression, value): the numbers joined two at a time in random order. None: a division by
    zero."""
    terms: list[tuple[str, Fraction | None]] = [
        (str(number), Fraction(number)) for number in numbers
    ]
    while len(terms) > 1:
        left_text, left = terms.pop(rng.randrange(len(terms)))
        right_text, right = terms.pop(rng.randrange(len(terms)))
        operator = rng.choice(operators)
        value: Fraction | None = None
        if left is not None and right is not None:
            if operator == "/":
                value = left / right if right else None
            else:
                value = (
                    left + right
                    if operator == "+"
                    else left - right
                    if operator == "-"
                    else left * right
                )
        terms.append((f"({left_text} {operator} {right_text})", value))
    text, value = terms[0]
    return (text[1:-1] if len(numbers) > 1 else text), value


def _is_val(numbers: tuple[int, ...], target: int) -> bool:
    """True for a fifth of all puzzles, decided by what the puzzle is, whatever its order or
    seed."""
    key = f"{sorted(numbers)} {target}".encode()
    return hashlib.blake2b(key, digest_size=4).digest()[0] % 5 == 0
