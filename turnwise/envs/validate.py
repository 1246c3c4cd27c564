"""Parses the tuples that `reset` and `step` of a text environment return. Each value passes the
gate (gate.py)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from turnwise.envs.base import EnvError
from turnwise.envs.gate import read_flag, read_info, read_reward, read_text
from turnwise.types import Json


@dataclass(kw_only=True, slots=True)
class RawStep:
    """The result of a step, from either form of tuple.

    Example:
        >>> read_step(("here", 1, True, {}), name="coin").terminated
        True
    """

    text: str
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Json]


def read_reset(value: Any, *, name: str) -> tuple[str, dict[str, Json]]:
    """(text, info) from the result of `reset`: an observation, or (observation, info).

    Example:
        >>> read_reset("start", name="coin"), read_reset(("start", {"size": 4}), name="coin")
        (('start', {}), ('start', {'size': 4}))
    """
    if isinstance(value, tuple):
        items = cast(tuple[Any, ...], value)
        if len(items) != 2:
            raise EnvError(
                f"{name}: reset returns an observation or (observation, info), got {len(items)} "
                "values"
            )
        return _observation(items[0], name=name, where="reset"), read_info(items[1], name=name)
    return _observation(value, name=name, where="reset"), {}


def check_playing(phase: str, *, name: str) -> None:
    """Refuses a step outside of an episode.

    Example:
        >>> check_playing("over", name="coin")
        Traceback (most recent call last):
        turnwise.envs.base.EnvError: coin: step needs a running episode, this one is over; call reset first
    """  # noqa: E501
    if phase != "playing":
        raise EnvError(
            f"{name}: step needs a running episode, this one is {phase}; call reset first"
        )


def read_step(value: Any, *, name: str) -> RawStep:
    """The result of `step`, from four values (done) or Gymnasium's five (terminated, truncated).

    With four, a true "truncated" or "TimeLimit.truncated" in info marks a truncation.

    Example:
        >>> read_step(("here", 0.5, False, True, {}), name="coin").truncated
        True
    """
    if not isinstance(value, tuple) or len(cast(tuple[Any, ...], value)) not in (4, 5):
        size = f" of {len(cast(tuple[Any, ...], value))}" if isinstance(value, tuple) else ""
        raise EnvError(
            f"{name}: step returns (observation, reward, done, info) or (observation, reward, "
            "terminated, truncated, "
            f"info), got {type(cast(Any, value)).__name__}{size}"
        )
    items = cast(tuple[Any, ...], value)
    info = read_info(items[-1], name=name)
    terminated = read_flag(items[2], name=name)
    if len(items) == 5:
        truncated = read_flag(items[3], name=name)
    else:
        truncated = terminated and bool(info.get("truncated") or info.get("TimeLimit.truncated"))
        terminated = terminated and not truncated
    return RawStep(
        text=_observation(items[0], name=name, where="step"),
        reward=read_reward(items[1], name=name),
        terminated=terminated,
        truncated=truncated,
        info=info,
    )


def _observation(value: Any, *, name: str, where: str) -> str:
    return read_text(value, what=f"{name}: the observation of {where}")


def refuse_keywords(kwargs: Mapping[str, Any], *, name: str) -> None:
    """Raises if reset got a keyword that the environment does not know.

    Example:
        >>> refuse_keywords({"sed": 3}, name="bandit")
        Traceback (most recent call last):
        TypeError: reset of bandit has no option 'sed'
    """
    for key in kwargs:
        raise TypeError(f"reset of {name} has no option {key!r}")
