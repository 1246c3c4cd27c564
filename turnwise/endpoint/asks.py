# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false
# pyright: reportUnknownMemberType=false
"""Requests for a reply, read from the JSON of the chat completions API and the responses API."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from turnwise.envs.base import EnvError
from turnwise.envs.gate import brief, read_json, read_text
from turnwise.types import Json, Message, ToolCall

MAX_N = 16
MAX_TOOLS = 512
MAX_MESSAGES = 20_000
Api = Literal["chat", "responses"]

_IGNORED = frozenset(
    (
        *("user", "metadata", "store", "service_tier", "stream_options", "safety_identifier"),
        *("prompt_cache_key", "prompt_cache_retention", "verbosity", "reasoning_effort"),
        *("reasoning", "truncation", "include", "max_tool_calls"),
    )
)
"""Settings that do not change what is sampled. They are accepted and have no effect."""
_KEPT = ("previous_response_id", "conversation", "prompt")
"""Settings that name something on OpenAI's servers."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (None, 1, 1.0),
    "top_k": (None, 0, -1),
    "min_p": (None, 0, 0.0),
    "presence_penalty": (None, 0, 0.0),
    "frequency_penalty": (None, 0, 0.0),
    "repetition_penalty": (None, 1, 1.0),
    "logit_bias": (None, {}),
    "top_logprobs": (None, 0),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "functions": (None, []),
    "function_call": (None,),
    "audio": (None,),
    "prediction": (None,),
    "web_search_options": (None,),
    **dict.fromkeys(_KEPT, (None,)),
    "background": (None, False),
}
"""Settings that change what is sampled, or ask for something that a policy cannot give, with the
values that have no effect."""
_USED = frozenset(
    (
        *("model", "messages", "tools", "tool_choice", "n", "max_tokens", "max_completion_tokens"),
        *("stop", "stream", "temperature", "logprobs", "input", "instructions"),
        *("max_output_tokens", "seed", "parallel_tool_calls", "text"),
    )
)
_FLAGS = ("stream", "logprobs", "parallel_tool_calls")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """Which settings of a request are honoured. The defaults are those of a policy in training,
    which honours none that change what it samples."""

    ignore: frozenset[str] = frozenset()
    """Names of settings that are not honoured and yet accepted."""
    honoured: frozenset[str] = frozenset()
    """Names of settings of sampling that are honoured."""
    training: bool = True

    @property
    def remedy(self) -> str:
        return "leave it out" + (
            ", or name it in env.options.ignore to accept it without effect" * self.training
        )


TRAINING = Rules()


class AskError(ValueError):
    """A request that cannot be answered: a status of HTTP and the fields of OpenAI's errors."""

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400
    ) -> None:
        super().__init__(message)
        self.param, self.code, self.status = param, code, status


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """One request for a reply, whatever API it came by."""

    api: Api
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Json], ...] = ()
    model: str = ""
    role: str = ""
    n: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    usage: bool = False
    """Whether a stream ends with the counts of tokens."""
    logprobs: bool = False
    overridden: tuple[str, ...] = ()
    """Settings that have no effect, though the program set them: the rollout decides the
    temperature and the seed, and nobody enforces a choice of tools."""
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Settings of sampling that are honoured."""
    echo: Mapping[str, Json] = field(default_factory=dict[str, Json])
    """Fields of the request that an answer of the responses API repeats."""


def read_chat(body: Mapping[str, Any], rules: Rules = TRAINING) -> Ask:
    """The request of POST /v1/chat/completions.

    Raises:
        AskError: something in it is malformed, or cannot be honoured.

    Example:
        >>> read_chat({"messages": [{"role": "user", "content": "Hi"}], "top_p": 0.9})
        Traceback (most recent call last):
        turnwise.endpoint.asks.AskError: top_p = 0.9 changes what is sampled, and a policy is trained on what it samples itself; leave it out, or name it in env.options.ignore to accept it without effect
    """  # noqa: E501
    common = _common(body, rules)
    raw = body.get("messages")
    if not isinstance(raw, list) or not raw:
        raise AskError("messages is a list with at least one message", param="messages")
    if len(raw) > MAX_MESSAGES:
        raise AskError(f"messages holds more than {MAX_MESSAGES} messages", param="messages")
    messages = tuple(_message(item, f"messages.{place}") for place, item in enumerate(raw))
    if common.settings.get("top_logprobs") and body.get("logprobs") is not True:
        raise AskError("top_logprobs needs logprobs: true", param="top_logprobs")
    limits = [body.get(key) for key in ("max_completion_tokens", "max_tokens")]
    options = body.get("stream_options")
    return replace(
        common,
        api="chat",
        messages=_sensible(messages, "messages"),
        tools=_tools(body, nested=True),
        max_tokens=_limit(next((limit for limit in limits if limit is not None), None)),
        n=_count(body.get("n")),
        logprobs=body.get("logprobs") is True,
        usage=isinstance(options, Mapping) and options.get("include_usage") is True,
    )


def read_responses(body: Mapping[str, Any], rules: Rules = TRAINING) -> Ask:
    """The request of POST /v1/responses. The whole conversation is in `input`: answers are not
    stored.

    Raises:
        AskError: something in it is malformed, or cannot be honoured.
    """
    common = _common(body, rules)
    messages: list[Message] = []
    if body.get("instructions"):
        messages.append(Message(role="system", content=_text(body["instructions"], "instructions")))
    given = body.get("input")
    if isinstance(given, str):
        messages.append(Message(role="user", content=_text(given, "input")))
    elif isinstance(given, list) and given and len(given) <= MAX_MESSAGES:
        _read_items(given, messages)
    else:
        raise AskError("input is a text or a list of items", param="input")
    return replace(
        common,
        api="responses",
        messages=_sensible(tuple(messages), "input"),
        tools=_tools(body, nested=False),
        max_tokens=_limit(body.get("max_output_tokens")),
        echo={
            "tools": body.get("tools") or [],
            "tool_choice": body.get("tool_choice") or "auto",
            "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
            "instructions": body.get("instructions"),
            "metadata": body.get("metadata") or {},
        },
    )


def _common(body: Mapping[str, Any], rules: Rules) -> Ask:
    overridden: list[str] = []
    settings: dict[str, float] = {}
    for key in _FLAGS:
        if not isinstance(body.get(key), bool | None):
            raise AskError(f"{key} is true or false, got {brief(body[key])}", param=key)
    for key, value in body.items():
        if key in _NUMBERS and value is not None:
            number = _number(key, value)
            if key in rules.honoured:
                settings[key] = number
            elif key in _USED:
                overridden.append(key)
        if key in rules.honoured or key in _IGNORED or key in _USED:
            continue
        if key not in _NEUTRAL and key not in rules.ignore:
            raise AskError(f"unknown field {key!r}; {rules.remedy}", param=key[:80])
        if value in _NEUTRAL.get(key, (value,)):
            continue
        if key not in rules.ignore:
            raise _unfit(key, value, rules)
        overridden.append(key)
    if (kind := _text_format(body)) not in ("text", None):
        if rules.ignore.isdisjoint(("text", "text.format")):
            raise _unfit("text.format", kind, rules)
        overridden.append("text.format")
    if body.get("tool_choice") not in (None, "auto", "none"):
        overridden.append("tool_choice")
    if body.get("parallel_tool_calls") is False:
        overridden.append("parallel_tool_calls")
    model = body.get("model")
    name = model if isinstance(model, str) else ""
    role = name.partition(":")[2] if name.startswith("policy:") else ""
    return Ask(
        api="chat",
        messages=(),
        model=name or "policy",
        role=role,
        stop=_stop(body.get("stop")),
        stream=body.get("stream") is True,
        overridden=tuple(overridden),
        settings=settings,
    )


def _text_format(body: Mapping[str, Any]) -> Any:
    """The kind of format that a request of the responses API wants."""
    form = body.get("text")
    wanted = form.get("format") if isinstance(form, Mapping) else None
    return wanted.get("type") if isinstance(wanted, Mapping) else None


_NUMBERS: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "top_k": (-1, 1 << 20),
    "seed": (-(1 << 63), (1 << 63) - 1),
    "top_logprobs": (0, 20),
}
"""Settings that are numbers, with the least and the largest."""


def _number(key: str, value: Any) -> float:
    low, high = _NUMBERS[key]
    whole = key in ("top_k", "seed", "top_logprobs")
    kind = "a whole number" if whole else "a number"
    right = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if not right or not low <= value <= high:
        raise AskError(f"{key} is {kind} in [{low:g}, {high:g}], got {brief(value)}", param=key)
    return max(value, 0) if key == "top_k" else value if whole else float(value)


def _unfit(key: str, value: Any, rules: Rules) -> AskError:
    if key in _KEPT:
        why = "names something that is not kept here; send the whole conversation"
    elif key == "background":
        why = "cannot be honoured: answers are not kept"
    elif rules.training:
        why = "changes what is sampled, and a policy is trained on what it samples itself"
    else:
        why = "cannot be honoured"
    return AskError(
        f"{key} = {brief(value)} {why}; {rules.remedy}", param=key, code="unsupported_parameter"
    )


def _message(item: Any, where: str) -> Message:
    if not isinstance(item, Mapping):
        raise AskError(f"{where} is an object with a role and a content", param=where)
    role = item.get("role")
    if role not in ("system", "developer", "user", "assistant", "tool"):
        raise AskError(
            f"{where}: a role is system, developer, user, assistant or tool, got {brief(role)}",
            param=where,
        )
    calls = item.get("tool_calls") or ()
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise AskError(f"{where}: tool_calls is a list", param=where)
    call_id, name = item.get("tool_call_id"), item.get("name")
    return Message(
        role="system" if role == "developer" else role,
        content=_content(item.get("content"), f"{where}.content"),
        tool_calls=tuple(_call(call, where) for call in calls),
        tool_call_id=None if call_id is None else _text(call_id, f"{where}.tool_call_id"),
        name=_text(name, f"{where}.name") if role == "tool" and name is not None else None,
    )


def _call(call: Any, where: str) -> ToolCall:
    try:
        function = call["function"]
        return ToolCall(
            id=_text(call["id"], where),
            name=_text(function["name"], where),
            arguments=_text(function["arguments"], where),
        )
    except (TypeError, KeyError, IndexError):
        raise AskError(
            f"{where}: a tool call has id, function.name and function.arguments", param=where
        ) from None


def _content(value: Any, where: str) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return _text(value, where)
    if not isinstance(value, list):
        raise AskError(f"{where} is a text or a list of parts", param=where)
    texts: list[str] = []
    for part in value:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in ("text", "input_text", "output_text", "refusal"):
            raise AskError(
                f"{where}: the policy reads text, and not {brief(kind or part)}", param=where
            )
        texts.append(_text(part.get("refusal" if kind == "refusal" else "text"), where))
    return "\n".join(texts)


def _read_items(items: list[Any], messages: list[Message]) -> None:
    """Adds the items of the responses API to `messages`. Calls follow the message they belong to;
    reasoning is left out, as it is never read again."""
    for place, item in enumerate(items):
        where = f"input.{place}"
        if not isinstance(item, Mapping):
            raise AskError(f"{where} is an object", param=where)
        match item.get("type", "message"):
            case "message":
                messages.append(_message(item, where))
            case "function_call":
                call = ToolCall(
                    id=_text(item.get("call_id"), where),
                    name=_text(item.get("name"), where),
                    arguments=_text(item.get("arguments"), where),
                )
                if not messages or messages[-1].role != "assistant":
                    messages.append(Message(role="assistant", content=""))
                messages[-1] = replace(messages[-1], tool_calls=(*messages[-1].tool_calls, call))
            case "function_call_output":
                output = item.get("output")
                messages.append(
                    Message(
                        role="tool",
                        content=_content(output, f"{where}.output"),
                        tool_call_id=_text(item.get("call_id"), where),
                    )
                )
            case "reasoning":
                continue
            case other:
                raise AskError(f"{where}: items of type {brief(other)} cannot be read", param=where)


def _sensible(messages: tuple[Message, ...], where: str) -> tuple[Message, ...]:
    """The messages, if their roles make sense."""
    called: set[str] = set()
    for place, message in enumerate(messages):
        called.update(call.id for call in message.tool_calls)
        if message.tool_calls and message.role != "assistant":
            raise AskError(f"{where}.{place}: only the assistant calls tools", param=where)
        if message.role == "tool" and message.tool_call_id not in called:
            raise AskError(
                f"{where}.{place}: a tool answers a call of an earlier message, got the "
                f"tool_call_id {brief(message.tool_call_id)}",
                param=where,
            )
    if not messages or messages[-1].role == "assistant":
        raise AskError(
            f"{where} ends with a message of the assistant; the policy begins its replies itself",
            param=where,
        )
    if not any(message.role in ("user", "tool") for message in messages):
        raise AskError(f"{where} holds nothing that a user said", param=where)
    return messages


def _tools(body: Mapping[str, Any], *, nested: bool) -> tuple[Mapping[str, Json], ...]:
    given = body.get("tools") or []
    if not isinstance(given, list) or len(given) > MAX_TOOLS:
        raise AskError(f"tools is a list of at most {MAX_TOOLS} tools", param="tools")
    if body.get("tool_choice") == "none":
        return ()
    found: list[Mapping[str, Json]] = []
    for place, item in enumerate(given):
        where = f"tools.{place}"
        if not isinstance(item, Mapping) or item.get("type") != "function":
            raise AskError(f"{where}: a tool is a function", param=where)
        function = item.get("function") if nested else item
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise AskError(f"{where}: a function has a name", param=where)
        schema = {
            "name": function["name"],
            "description": function.get("description") or "",
            "parameters": function.get("parameters") or {"type": "object", "properties": {}},
        }
        try:
            found.append({"type": "function", "function": read_json(schema, what=where)})
        except EnvError as error:
            raise AskError(str(error), param=where) from error
    return tuple(found)


def _stop(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > 16:
        raise AskError("stop is a text or a list of up to 16 texts", param="stop")
    return tuple(_text(stop, "stop") for stop in stops if stop)


def _limit(value: Any) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise AskError(f"a limit of tokens is 1 or more, got {brief(value)}", param="max_tokens")
    return value


def _count(value: Any) -> int:
    count = 1 if value is None else value
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MAX_N:
        raise AskError(f"n is between 1 and {MAX_N}, got {brief(value)}", param="n")
    return count


def _text(value: Any, where: str) -> str:
    try:
        return read_text(value, what=where)
    except EnvError as error:
        raise AskError(str(error), param=where) from error
