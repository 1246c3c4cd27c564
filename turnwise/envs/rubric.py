"""Scores a finished conversation: weighted functions, each called with the arguments that it names."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from turnwise.envs.base import EnvError
from turnwise.envs.validate import read_reward
from turnwise.procs.coroutines import resolve

RewardFunction = Callable[..., Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class RubricScore:
    """What a rubric found.

    Example:
        >>> RubricScore(values={"exact": 1.0, "short": 0.5}, weights={"exact": 1.0, "short": 0.2}).reward
        1.1
    """

    values: Mapping[str, float]
    """What each function returned, by its name."""
    weights: Mapping[str, float]

    @property
    def parts(self) -> dict[str, float]:
        """Weighted values; a weight of 0 makes a function a metric and no part of the reward."""
        return {name: self.weights[name] * value for name, value in self.values.items() if self.weights[name] != 0.0}

    @property
    def reward(self) -> float:
        return float(sum(self.parts.values()))


class Rubric:
    """Weighted reward functions, sync or async.

    A function is called with those of these that it names as parameters: `prompt`, `completion` and `messages` (lists
    of dict messages), `text` (the last reply), `answer`, `info`, `state`, `task`, `parser`, and the columns of the
    row. With `**kwargs` it gets all. An error in a function is an error of the episode, never a zero.

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
            raise ValueError(f"a rubric has one weight per function, got {len(weights)} for {len(funcs)} functions")
        self.parser = parser
        self.funcs: dict[str, RewardFunction] = {}
        self.weights: dict[str, float] = {}
        for function, weight in zip(funcs, weights, strict=True):
            self.add_reward_func(function, weight)

    def add_reward_func(self, function: RewardFunction, weight: float = 1.0) -> None:
        """Adds a function; equal names are told apart by a number."""
        base = name = str(getattr(function, "__name__", type(function).__name__))
        count = 2
        while name in self.funcs:
            name, count = f"{base}_{count}", count + 1
        self.funcs[name] = function
        self.weights[name] = read_reward(weight, name="rubric", what=f"the weight of {name}")

    def score(self, context: Mapping[str, Any]) -> RubricScore:
        """The score of one conversation, from what there is to know about it, by name."""
        known = {"parser": self.parser, **context}
        values = {name: self._value(name, function, known) for name, function in self.funcs.items()}
        return RubricScore(values=values, weights=dict(self.weights))

    def _value(self, name: str, function: RewardFunction, known: Mapping[str, Any]) -> float:
        arguments = _arguments(name, function, known)
        try:
            value = resolve(function(**arguments))
        except (Exception, SystemExit) as error:
            raise EnvError(f"rubric function {name} raised {type(error).__name__}: {error}") from error
        return read_reward(value, name=f"rubric function {name}", what="what it returns")


def _arguments(name: str, function: RewardFunction, known: Mapping[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return dict(known)
    arguments: dict[str, Any] = {}
    for parameter in parameters:
        if parameter.name in known:
            arguments[parameter.name] = known[parameter.name]
        elif parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL:
            near = get_close_matches(parameter.name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
            raise EnvError(f"rubric function {name} asks for {parameter.name!r}, which nobody provides; {hint}")
    return arguments
