"""Calls of tools in a conversation's history, in the form that a chat template can write."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, cast

from turnwise.types import Json

Form = Literal["text", "object", "content"]
"""How a template takes the calls of an earlier reply: with arguments as JSON text, with arguments
as an object, or not at all. Then they are written into the content, as the model writes them."""
_NAME, _KEY, _VALUE = "zqtool", "zqkey", "zqvalue"
_TEXT = json.dumps({_KEY: _VALUE})
Data = dict[str, Json]


def form_of_calls(render: Callable[[Sequence[Data], Sequence[Data]], str]) -> Form:
    """How the template that `render` (messages, tools) renders takes calls, found by trying it.

    Example:
        >>> form_of_calls(lambda messages, tools: str(messages[1]["content"]))
        'content'
        >>> form_of_calls(lambda messages, tools: json.dumps(messages[1]["tool_calls"]))
        'object'
    """
    as_text = _attempt(render, _TEXT)
    if _NAME in as_text and _TEXT in as_text:
        return "text"
    as_object = _attempt(render, {_KEY: _VALUE})
    if all(part in as_object for part in (_NAME, _KEY, _VALUE)):
        return "object"
    return "text" if _NAME in as_text and _VALUE in as_text else "content"


def in_form(message: Data, form: Form, *, clean: Callable[[Json], Json]) -> Data:
    """The message with its calls as the template takes them. `clean` cleans arguments that are
    read from their text.

    Example:
        >>> call = {"id": "a", "function": {"name": "add", "arguments": '{"b": 1}'}}
        >>> message = {"role": "assistant", "content": "So:", "tool_calls": [call]}
        >>> in_form(message, "content", clean=lambda value: value)["content"]
        'So:\\n<tool_call>{"name": "add", "arguments": {"b": 1}}</tool_call>'
    """
    calls = cast(Sequence[Mapping[str, Json]], message.get("tool_calls") or ())
    if not calls or form == "text":
        return message
    functions: list[Mapping[str, Json]] = [call["function"] for call in calls]
    read = [_read(function["arguments"]) for function in functions]
    if form == "object":  # malformed arguments stay text
        taken = [
            clean(arguments) if isinstance(arguments, dict) else function["arguments"]
            for function, arguments in zip(functions, read, strict=True)
        ]
        return {
            **message,
            "tool_calls": [
                {**call, "function": {**function, "arguments": arguments}}
                for call, function, arguments in zip(calls, functions, taken, strict=True)
            ],
        }
    said = [
        _write(function["name"], function["arguments"], valid=arguments is not None)
        for function, arguments in zip(functions, read, strict=True)
    ]
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join([*filter(None, [message["content"]]), *said])}


def _write(name: Json, arguments: Json, *, valid: bool) -> str:
    written = arguments if valid else json.dumps(arguments, ensure_ascii=False)
    name = json.dumps(name, ensure_ascii=False)
    return f'<tool_call>{{"name": {name}, "arguments": {written}}}</tool_call>'


def _read(arguments: Json) -> Json:
    """The arguments, None where they are no JSON."""
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return None


def _attempt(render: Callable[[Sequence[Data], Sequence[Data]], str], arguments: Json) -> str:
    # Some templates insist on ids of nine letters.
    name = "zqcall000"
    function: Data = {"name": _NAME, "arguments": arguments}
    messages: list[Data] = [
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": name, "type": "function", "function": function}],
        },
        {"role": "tool", "content": "b", "tool_call_id": name, "name": "zqother"},
    ]
    parameters: Data = {"type": "object", "properties": {"a": {"type": "string"}}, "required": []}
    schema: Data = {"name": "zqother", "description": "b", "parameters": parameters}
    try:
        return render(messages, [{"type": "function", "function": schema}])
    except Exception:  # whatever a template raises on what it does not take
        return ""
