# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false
"""Messages, observations, results, tasks and completions that foreign code returned, checked."""

import json
import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from operator import index
from typing import Any, cast, get_args

from turnwise.envs.base import EnvError, Hint
from turnwise.envs.gate.texts import brief, clean_text
from turnwise.envs.gate.values import (
    MAX_INT_BITS,
    MAX_REWARD,
    MAX_TEXT,
    read_count,
    read_flag,
    read_info,
    read_items,
    read_json,
    read_reward,
    read_text,
)
from turnwise.types import (
    Call,
    Completion,
    FinishReason,
    Json,
    Message,
    Observation,
    Role,
    StepResult,
    Task,
    ToolCall,
)

ROLES = frozenset[str](get_args(Role))
EARLIER = "the index of an earlier turn"


def read_message(item: Any, *, where: str) -> Message:
    """A message from a Message, a dict in OpenAI's format, or plain text (role user).

    Example:
        >>> read_message({"role": "user", "content": "Up or down?"}, where="coin: reset").content
        'Up or down?'
        >>> read_message({"role": "user", "content": 7}, where="coin: reset")
        Traceback (most recent call last):
        turnwise.envs.base.EnvError: coin: reset: the content of a message must be text, got int: 7
    """
    if type(item) is Message and (plain := _plain_message(item)) is not None:
        return plain
    if isinstance(item, Message):
        return _read_fields(
            item.role, item.content, item.tool_calls, item.tool_call_id, item.name, where=where
        )
    if isinstance(item, str):
        return Message(role="user", content=read_text(item, what=where))
    if not isinstance(item, Mapping):
        raise EnvError(f"{where} has a {type(item).__name__} instead of a message dict")
    data = cast(Mapping[str, Any], item)
    content = data.get("content")
    return _read_fields(
        data.get("role"),
        "" if content is None else content,
        data.get("tool_calls") or (),
        data.get("tool_call_id"),
        data.get("name"),
        where=where,
    )


def _plain_message(message: Message) -> Message | None:
    """A copy of a message that needs no repair; None of another. Nearly all need none, and every
    turn has some. The environment keeps its own, which it may change."""
    role, content = cast(object, message.role), cast(object, message.content)
    calls = cast(object, message.tool_calls)
    if (
        type(content) is str
        and len(content) <= MAX_TEXT
        and content.isascii()
        and type(calls) is tuple
        and not calls
        and message.tool_call_id is None
        and message.name is None
        and type(role) is str
        and role in ROLES
    ):
        return Message(role=cast(Role, role), content=content)
    return None


def _read_fields(
    role: Any, content: Any, calls: Any, call_id: Any, name: Any, *, where: str
) -> Message:
    role = clean_text(role) if isinstance(role, str) else role
    if type(role) is not str or role not in ROLES:
        raise EnvError(
            f"{where}: a message's role is one of {', '.join(get_args(Role))}, got {brief(role)}"
        )
    if not isinstance(calls, Sequence) or isinstance(calls, str | bytes):
        raise EnvError(f"{where} holds malformed tool calls: {brief(calls)}")
    return Message(
        role=cast(Role, role),
        content=read_text(content, what=f"{where}: the content of a message"),
        tool_calls=tuple(
            _read_call(call, where=where)
            for call in read_items(cast(Sequence[Any], calls), what=f"{where}: the tool calls")
        ),
        tool_call_id=_optional(call_id, what=f"{where}: the tool_call_id of a message"),
        name=_optional(name, what=f"{where}: the name of a message"),
    )


def _read_call(call: Any, *, where: str) -> ToolCall:
    if isinstance(call, ToolCall):
        call_id, name, arguments = call.id, call.name, call.arguments
    else:
        try:
            function = call["function"]
            call_id, name, arguments = call["id"], function["name"], function["arguments"]
        except (KeyError, TypeError, IndexError) as error:
            raise EnvError(f"{where} holds malformed tool calls: {brief(call)}") from error
    if isinstance(arguments, Mapping):
        arguments = json.dumps(read_json(arguments, what=f"{where}: the arguments of a call"))
    return ToolCall(
        id=read_text(call_id, what=f"{where}: the id of a tool call"),
        name=read_text(name, what=f"{where}: the name in a tool call"),
        arguments=read_text(arguments, what=f"{where}: the arguments of a tool call"),
    )


def _optional(value: Any, *, what: str) -> str | None:
    return None if value is None else read_text(value, what=what)


def read_messages(value: Any, *, where: str) -> tuple[Message, ...]:
    """A sequence of messages, or a single one."""
    if isinstance(value, str | Mapping | Message):
        return (read_message(value, where=where),)
    if not isinstance(value, Sequence):
        raise EnvError(f"{where} must be a list of messages, got {type(value).__name__}")
    found = read_items(cast(Sequence[Any], value), what=where)
    messages = tuple(read_message(item, where=where) for item in found)
    size = sum(len(message.content) for message in messages)
    size += sum(len(call.arguments) for message in messages for call in message.tool_calls)
    if size > MAX_TEXT:
        raise EnvError(f"{where} holds {size} characters; the limit is {MAX_TEXT}")
    return messages


def admit_observation(value: Any, *, name: str) -> Observation:
    """The result of a reset, checked.

    Example:
        >>> admit_observation("no observation", name="coin")
        Traceback (most recent call last):
        turnwise.envs.base.EnvError: coin: reset must return an Observation, got str
    """
    if not isinstance(value, Observation):
        raise EnvError(f"{name}: reset must return an Observation, got {type(value).__name__}")
    messages = read_messages(value.messages, where=f"{name}: the opening")
    if not messages or messages[-1].role == "assistant":
        raise EnvError(f"{name}: the opening must end with a message that the model can answer")
    tools = read_json(value.tools, what=f"{name}: the tools")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise EnvError(f"{name}: tools is a list of dicts, got {brief(value.tools)}")
    return Observation(
        messages=messages,
        tools=tuple(tools),
        state_key=_optional(value.state_key, what=f"{name}: the state key"),
        info=read_info(value.info, name=name),
        call=_read_next(value.call, name=name),
    )


def admit_result(value: Any, *, name: str) -> StepResult:
    """The result of a step or `finish`, checked. An environment may not write assistant messages;
    only one that says how the next turn is played may quote them."""
    if not isinstance(value, StepResult):
        raise EnvError(f"{name}: step must return a StepResult, got {type(value).__name__}")
    messages = read_messages(value.messages, where=f"{name}: the answer")
    call = _read_next(value.call, name=name)
    quoted = messages if call is None else messages[-1:]
    if any(message.role == "assistant" for message in quoted):
        raise EnvError(f"{name}: the environment's answer has a message of the assistant")
    rewritten = value.rewritten
    if rewritten is not None:
        rewritten = admit_observation(rewritten, name=f"{name}: the rewritten conversation")
    info = read_info(value.info, name=name)
    if isinstance(info.get("success"), str):  # "false" would count as a success
        raise EnvError(f"{name}: success in info is True or False, got {brief(info['success'])}")
    parts = cast(object, value.reward_parts)
    if type(parts) is not dict and not isinstance(parts, Mapping):
        raise EnvError(f"{name}: reward_parts is a dict, got {brief(parts)}")
    return StepResult(
        messages=messages,
        reward=read_reward(value.reward, name=name),
        terminated=read_flag(value.terminated, name=name),
        truncated=read_flag(value.truncated, name=name),
        action=_optional(value.action, what=f"{name}: the action"),
        reward_parts={
            read_text(part, what=f"{name}: the name of a reward's part"): read_reward(
                number, name=name, what="a part of the reward"
            )
            for part, number in read_items(
                cast(Mapping[Any, Any], parts).items(), what=f"{name}: reward_parts"
            )
        },
        state_key=_optional(value.state_key, what=f"{name}: the state key"),
        info=info,
        rewritten=rewritten,
        call=call,
        earlier=_read_earlier(value.earlier, name=name),
        repeated=_read_earlier(value.repeated, name=name),
        trained=read_flag(value.trained, name=name),
        untrained=tuple(
            read_count(turn, what=f"{name}: {EARLIER}")
            for turn in read_items(value.untrained, what=f"{name}: untrained")
        ),
    )


def _read_earlier(value: Mapping[Any, Any], *, name: str) -> dict[int, float]:
    return {
        read_count(turn, what=f"{name}: {EARLIER}"): read_reward(
            number, name=name, what="a reward of an earlier turn"
        )
        for turn, number in read_items(value.items(), what=f"{name}: the rewards of earlier turns")
    }


def _read_next(value: Any, *, name: str) -> Call | None:
    if value is None:
        return None
    if not isinstance(value, Call):
        raise EnvError(f"{name}: the next turn is described by a Call, got {brief(value)}")
    stop = cast(object, value.stop)
    if not isinstance(stop, Sequence) or isinstance(stop, str | bytes):
        raise EnvError(f"{name}: the stop strings of a Call are a tuple, got {brief(stop)}")
    what = f"{name}: the Call of the next turn: "
    parent, most = value.parent, value.max_tokens
    return Call(
        parent=None if parent is None else read_count(parent, what=f"{what}parent"),
        role=read_text(value.role, what=f"{what}role"),
        max_tokens=None if most is None else read_count(most, what=f"{what}max_tokens", least=1),
        stop=tuple(
            read_text(text, what=f"{what}a stop string")
            for text in read_items(stop, what=f"{what}stop")
        ),
    )


def admit_task(value: Any, *, name: str) -> Task:
    """The result of `make_task`, checked."""
    if not isinstance(value, Task):
        raise EnvError(f"{name}: make_task must return a Task, got {type(value).__name__}")
    payload = read_json(value.payload, what=f"{name}: the payload of a task")
    seed = cast(object, value.seed)
    if not isinstance(payload, dict):
        raise EnvError(f"{name}: the payload of a task is a dict, got {brief(value.payload)}")
    if not isinstance(seed, int) or isinstance(seed, bool) or int.bit_length(seed) > MAX_INT_BITS:
        raise EnvError(f"{name}: the seed of a task is an integer, got {brief(seed)}")
    return Task(
        id=read_text(value.id, what=f"{name}: the id of a task"),
        seed=int.__int__(seed),
        payload=cast(dict[str, Json], payload),
        split=read_text(value.split, what=f"{name}: the split of a task"),
    )


def own_task(task: Task) -> Task:
    """A copy of the task for an environment in this process, which may change its payload. The
    members of a group share the task, and their episodes store it.

    Example:
        >>> task = Task(id="t", seed=1, payload={"rows": [1, 2]})
        >>> own_task(task).payload["rows"].append(3)
        >>> task.payload
        {'rows': [1, 2]}
    """
    return replace(task, payload=deepcopy(dict(task.payload)))


def read_hint(value: Any, *, what: Hint) -> Json:
    """A hint, checked: a list for `actions`, else text. None if the environment cannot tell.

    Example:
        >>> read_hint(7, what="expert")
        Traceback (most recent call last):
        turnwise.envs.base.EnvError: the hint 'expert' must be text, got int: 7
    """
    if value is None:
        return None
    if what != "actions":
        return read_text(value, what=f"the hint {what!r}")
    actions = read_json(value, what="the hint 'actions'")
    if not isinstance(actions, list):
        raise EnvError(f"the hint 'actions' must be a list, got {brief(actions)}")
    return cast(list[Json], actions)


def admit_completion(value: Completion) -> Completion:
    """The result of a generator, checked, in plain numbers. Numpy's cannot be stored.

    Raises:
        ValueError: the completion cannot be stored or trained on. Log-probs are finite in float32.

    Example:
        >>> admit_completion(Completion(ids=(5,), logprobs=(float("nan"),), finish_reason="stop"))
        Traceback (most recent call last):
        ValueError: the generator returned a log-prob that is not finite in float32: nan
    """
    try:
        ids = tuple(map(int, map(index, value.ids)))
        logprobs = tuple(map(float, value.logprobs))
        version = int(index(value.policy_version))
    except (TypeError, ValueError, OverflowError, AttributeError) as error:
        raise ValueError(f"the generator returned no completion: {brief(value)}") from error
    if not ids or min(ids) < 0:
        raise ValueError(f"the generator returned no ids, or invalid ones: {brief(value.ids)}")
    if not all(map(math.isfinite, logprobs)) or max(map(abs, logprobs)) > MAX_REWARD:
        wrong = next(number for number in logprobs if not abs(number) <= MAX_REWARD)
        raise ValueError(
            f"the generator returned a log-prob that is not finite in float32: {wrong}"
        )
    if value.finish_reason not in get_args(FinishReason):
        raise ValueError(f"the generator returned the finish reason {brief(value.finish_reason)}")
    return Completion(
        ids=ids, logprobs=logprobs, finish_reason=value.finish_reason, policy_version=version
    )
