"""JSON for the messages between a rollout and an environment in another process or machine. No
pickle."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from turnwise.envs.base import EnvError
from turnwise.envs.gate import admit_observation, admit_result, admit_task, brief
from turnwise.types import Json, Observation, StepResult, Task


def encode(value: Mapping[str, Json]) -> bytes:
    """The value as JSON.

    Example:
        >>> decode(encode({"text": "half a sign: \\ud83c"})) == {"text": "half a sign: \\ud83c"}
        True
    """
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:  # a lone surrogate: not valid in UTF-8, but in JSON escapes
        return json.dumps(value, allow_nan=False).encode()


def decode(data: bytes) -> dict[str, Json]:
    """The JSON object.

    Raises:
        ValueError: the data is not a JSON object.
    """
    try:
        value = json.loads(data)
    except RecursionError:
        raise ValueError("JSON is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"a JSON object is needed, got {brief(value)}")
    return cast(dict[str, Json], value)


def observation_to_json(observation: Observation) -> dict[str, Json]:
    _refuse_calls(observation)
    return observation.to_json()


def observation_from_json(data: Any, *, name: str = "environment") -> Observation:
    """The observation, checked like a local one."""
    found = _fields(data, ("messages", "tools", "state_key", "info"), name=name)
    return admit_observation(Observation(**found), name=name)


def result_to_json(result: StepResult) -> dict[str, Json]:
    _refuse_calls(result)
    return result.to_json()


def result_from_json(data: Any, *, name: str = "environment") -> StepResult:
    """The result of a step, checked like a local one."""
    keys = ("messages", "reward", "terminated", "truncated", "action", "reward_parts", "state_key")
    found = _fields(data, (*keys, "info"), name=name)
    if "rewritten" in data:
        found["rewritten"] = observation_from_json(data["rewritten"], name=name)
    return admit_result(StepResult(**found), name=name)


def task_from_json(data: Any, *, name: str = "environment") -> Task:
    """The task, checked like a local one."""
    return admit_task(
        Task(**_fields(data, ("id", "seed", "payload", "split"), name=name)), name=name
    )


def _refuse_calls(value: Observation | StepResult) -> None:
    late = isinstance(value, StepResult) and (
        bool(value.earlier) or not value.trained or bool(value.untrained)
    )
    if late or value.call is not None:
        raise EnvError(
            "an environment that decides how its next turn is played runs in the process of the "
            "rollout; set rollout.isolation to auto, thread or inline"
        )


def _fields(data: Any, keys: Sequence[str], *, name: str) -> dict[str, Any]:
    if not isinstance(data, Mapping) or any(key not in data for key in keys):
        shown = brief(cast(Any, data))
        raise EnvError(f"{name}: an answer must have the keys {', '.join(keys)}, got {shown}")
    return {key: data[key] for key in keys}
