"""Openings and results of turns as JSON, between the process of the endpoint and the trainer. In
contrast to envs/wire.py they say how the next turn is played, and come from turnwise itself, so
they are not checked."""

from dataclasses import replace

from turnwise.types import Call, Json, Observation, StepResult


def observation_to_json(opening: Observation) -> dict[str, Json]:
    return {**opening.to_json(), "call": _call_to_json(opening.call)}


def observation_from_json(data: Json) -> Observation:
    return replace(Observation.from_json(data), call=_call_from_json(data["call"]))


def result_to_json(result: StepResult) -> dict[str, Json]:
    return {
        **result.to_json(),
        "call": _call_to_json(result.call),
        "earlier": list(result.earlier.items()),  # keys of a JSON object are texts
        "repeated": list(result.repeated.items()),
        "trained": result.trained,
        "untrained": list(result.untrained),
    }


def result_from_json(data: Json) -> StepResult:
    return replace(
        StepResult.from_json(data),
        call=_call_from_json(data["call"]),
        earlier=dict(data["earlier"]),
        repeated=dict(data["repeated"]),
        trained=data["trained"],
        untrained=tuple(data["untrained"]),
    )


def _call_to_json(call: Call | None) -> Json:
    if call is None:
        return None
    return [call.parent, call.role, call.max_tokens, list(call.stop)]


def _call_from_json(data: Json) -> Call | None:
    if data is None:
        return None
    parent, role, max_tokens, stop = data
    return Call(parent=parent, role=role, max_tokens=max_tokens, stop=tuple(stop))
