"""Scores a finished conversation with weighted functions, each called with the arguments that it
names."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turnwise.envs.base import EnvError
from turnwise.envs.gate import ask, read_reward
from turnwise.procs.coroutines import resolve
from turnwise.user_code import wanted_arguments

RewardFunction = Callable[..., Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class RubricScore:
    """The score of a rubric.

    Example:
        >>> RubricScore(values={"exact": 1.0, "short": 0.5},
        ...     weights={"exact": 1.0, "short": 0.2}).reward
        1.1
    """

    values: Mapping[str, float]
    """The result of each function, by name."""
    weights: Mapping[str, float]

    @property
    def parts(self) -> dict[str, float]:
        """Weighted values; a function with weight 0 is a metric and not part of the reward."""
        return {
            name: self.weights[name] * value
            for name, value in self.values.items()
            if self.weights[name] != 0.0
        }

    @property
    def reward(self) -> float:
        return float(sum(self.parts.values()))


class Rubric:
    """Weighted reward functions, sync or async.

    A function is called with the arguments that its signature names, out of: `prompt`, `completion`
    and `messages` (lists of dict messages), `text` (the last reply), `answer`, `info`, `state`,
    `task`, `parser`, and the columns of the row. With `**kwargs` it gets all. An error in a
    function fails the episode; it never counts as zero.

    Example:
        >>> def exact(text, answer): return float(text == answer)
        >>> async def short(text): return 1.0 / len(text)
        >>> Rubric([exact, short], weights=[1.0, 0.5]).score({"text": "42", "answer": "42"}).reward
        1.25
    """

    def __init__(
        self,
        funcs: Sequence[RewardFunction] = (),
        weights: Sequence[float] | None = None,
        *,
        parser: Any = None,
    ) -> None:
        if weights is None:
            weights = [1.0] * len(funcs)
        if len(weights) != len(funcs):
            raise ValueError(
                f"a rubric has one weight per function, got {len(weights)} for {len(funcs)} "
                "functions"
            )
        self.parser = parser
        self.funcs: dict[str, RewardFunction] = {}
        self.weights: dict[str, float] = {}
        for function, weight in zip(funcs, weights, strict=True):
            self.add_reward_func(function, weight)

    def add_reward_func(self, function: RewardFunction, weight: float = 1.0) -> None:
        """Adds a function; equal names get a number."""
        base = name = str(getattr(function, "__name__", type(function).__name__))
        count = 2
        while name in self.funcs:
            name, count = f"{base}_{count}", count + 1
        self.funcs[name] = function
        self.weights[name] = read_reward(weight, name="rubric", what=f"the weight of {name}")

    def score(self, context: Mapping[str, Any]) -> RubricScore:
        """The score of one conversation, from its known values by name."""
        known = {"parser": self.parser, **context}
        values = {name: self._value(name, function, known) for name, function in self.funcs.items()}
        return RubricScore(values=values, weights=dict(self.weights))

    def _value(self, name: str, function: RewardFunction, known: Mapping[str, Any]) -> float:
        try:
            wanted = wanted_arguments(function, known)
        except ValueError as error:
            raise EnvError(f"rubric function {name}: {error}") from error
        arguments = {key: value for key, value in known.items() if key in wanted}
        value = ask(f"rubric function {name}", lambda: resolve(function(**arguments)))
        return read_reward(value, name=f"rubric function {name}", what="its result")
