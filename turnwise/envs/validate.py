"""What an environment returned, checked. Everything that breaks the contract is an EnvError that says how."""

import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, cast

from turnwise.envs.base import EnvError
from turnwise.types import Json

MAX_DEPTH = 12


@dataclass(kw_only=True, slots=True)
class RawStep:
    """One step of an environment in the style of `reset` and `step`, whichever tuple it returned.

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
    """(text, info) of what `reset` returned: an observation, or (observation, info).

    Example:
        >>> read_reset("start", name="coin"), read_reset(("start", {"size": 4}), name="coin")
        (('start', {}), ('start', {'size': 4}))
    """
    if isinstance(value, tuple):
        items = cast(tuple[Any, ...], value)
        if len(items) != 2:
            raise EnvError(f"{name}: reset returns an observation or (observation, info), got {len(items)} values")
        return read_text(items[0], name=name, where="reset"), read_info(items[1], name=name)
    return read_text(value, name=name, where="reset"), {}


def read_step(value: Any, *, name: str) -> RawStep:
    """What `step` returned, from four values (done) or Gymnasium's five (terminated, truncated).

    With four, a true "truncated" or "TimeLimit.truncated" in info says that the end was a limit.

    Example:
        >>> read_step(("here", 0.5, False, True, {}), name="coin").truncated
        True
    """
    if not isinstance(value, tuple) or len(cast(tuple[Any, ...], value)) not in (4, 5):
        size = f" of {len(cast(tuple[Any, ...], value))}" if isinstance(value, tuple) else ""
        raise EnvError(
            f"{name}: step returns (observation, reward, done, info) or (observation, reward, terminated, truncated, "
            f"info), got {type(value).__name__}{size}"
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
        text=read_text(items[0], name=name, where="step"),
        reward=read_reward(items[1], name=name),
        terminated=terminated,
        truncated=truncated,
        info=info,
    )


def read_text(value: Any, *, name: str, where: str) -> str:
    """The observation, which must be text."""
    if not isinstance(value, str):
        raise EnvError(
            f"{name}: {where} must return its observation as text, got {type(value).__name__}: {_brief(value)}"
        )
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise EnvError(
            f"{name}: {where} returned text that is no valid Unicode ({error.reason}): {value!a:.200}"
        ) from error
    return value


def read_reward(value: Any, *, name: str, what: str = "a reward") -> float:
    """A finite float.

    Example:
        >>> read_reward(float("nan"), name="coin")
        Traceback (most recent call last):
        turnwise.envs.base.EnvError: coin: a reward must be a finite number, got nan
    """
    if isinstance(value, str | bytes) or value is None:
        raise EnvError(f"{name}: {what} must be a finite number, got {_brief(value)}")
    try:
        reward = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise EnvError(f"{name}: {what} must be a finite number, got {_brief(value)}") from error
    if not math.isfinite(reward):
        raise EnvError(f"{name}: {what} must be a finite number, got {reward}")
    return reward


def read_flag(value: Any, *, name: str) -> bool:
    """True or False, from a bool or numpy's."""
    if isinstance(value, bool):
        return value
    if type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_"):
        return bool(value)
    raise EnvError(f"{name}: done, terminated and truncated must be True or False, got {_brief(value)}")


def read_info(value: Any, *, name: str) -> dict[str, Json]:
    """The info dict, made safe to store as JSON."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise EnvError(f"{name}: info must be a dict, got {type(value).__name__}: {_brief(value)}")
    return cast(dict[str, Json], json_safe(cast(Mapping[Any, Any], value)))


def json_safe(value: Any, *, depth: int = 0) -> Json:
    """The value as JSON holds it: numbers that are not finite become None, unknown objects their text.

    Example:
        >>> json_safe({1: (float("inf"), {2}), "f": abs})
        {'1': [None, [2]], 'f': '<built-in function abs>'}
    """
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if depth >= MAX_DEPTH:
        return _brief(value)
    if isinstance(value, Mapping):
        pairs = cast(Mapping[Any, Any], value).items()
        return {key if isinstance(key, str) else str(key): json_safe(item, depth=depth + 1) for key, item in pairs}
    if isinstance(value, AbstractSet):
        return sorted((json_safe(item, depth=depth + 1) for item in cast(AbstractSet[Any], value)), key=repr)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return [json_safe(item, depth=depth + 1) for item in cast(Sequence[Any], value)]
    if type(value).__module__ == "numpy":
        return json_safe(cast(Any, value).tolist(), depth=depth + 1)
    return _brief(value)


def _brief(value: Any) -> str:
    """The value's repr, cut; foreign objects may even fail at that."""
    try:
        text = repr(value)
    except Exception as error:
        text = f"<{type(value).__name__} whose repr raised {type(error).__name__}>"
    return text if len(text) <= 200 else text[:197] + "..."


def refuse_keywords(kwargs: Mapping[str, Any], *, name: str) -> None:
    """Raises where reset was given a keyword that the environment does not know, instead of ignoring it.

    Example:
        >>> refuse_keywords({"sed": 3}, name="bandit")
        Traceback (most recent call last):
        TypeError: reset of bandit has no option 'sed'
    """
    for key in kwargs:
        raise TypeError(f"reset of {name} has no option {key!r}")
