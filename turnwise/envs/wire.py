"""Plain JSON for what crosses a process or machine boundary between a rollout and an environment. No pickle."""

import json
from collections.abc import Mapping

from turnwise.types import Json, Message, Observation, StepResult


def encode(value: Mapping[str, Json]) -> bytes:
    """The value as JSON.

    Example:
        >>> decode(encode({"text": "half a sign: \\ud83c"})) == {"text": "half a sign: \\ud83c"}
        True
    """
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which UTF-8 cannot hold and JSON's escapes can
        return json.dumps(value, allow_nan=False).encode()


def decode(data: bytes) -> dict[str, Json]:
    return json.loads(data)


def observation_to_json(observation: Observation) -> dict[str, Json]:
    return {
        "messages": [message.to_json() for message in observation.messages],
        "tools": [dict(tool) for tool in observation.tools],
        "state_key": observation.state_key,
        "info": dict(observation.info),
    }


def observation_from_json(data: Mapping[str, Json]) -> Observation:
    return Observation(
        messages=tuple(Message.from_json(message) for message in data["messages"]),
        tools=tuple(data["tools"]),
        state_key=data["state_key"],
        info=data["info"],
    )


def result_to_json(result: StepResult) -> dict[str, Json]:
    return {
        "messages": [message.to_json() for message in result.messages],
        "reward": result.reward,
        "terminated": result.terminated,
        "truncated": result.truncated,
        "action": result.action,
        "reward_parts": dict(result.reward_parts),
        "state_key": result.state_key,
        "info": dict(result.info),
    }


def result_from_json(data: Mapping[str, Json]) -> StepResult:
    return StepResult(
        messages=tuple(Message.from_json(message) for message in data["messages"]),
        reward=data["reward"],
        terminated=data["terminated"],
        truncated=data["truncated"],
        action=data["action"],
        reward_parts=data["reward_parts"],
        state_key=data["state_key"],
        info=data["info"],
    )
