"""Plain Python functions as tools: schemas from their signatures, calls from the model's text,
errors as text."""

import inspect
import json
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from turnwise.envs.base import EnvError
from turnwise.envs.gate import ask, clean_text, json_safe, words
from turnwise.procs.coroutines import resolve
from turnwise.types import Json, Message, ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MAX_ARGUMENT_CHARS = 100_000
MAX_CALLS = 64
"""Calls that are read in one reply."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tool:
    """A function that the model may call.

    Example:
        >>> def add(a: int, b: int = 0) -> int:
        ...     '''Adds two numbers.'''
        ...     return a + b
        >>> make_tool(add).schema["function"]["parameters"]["required"]
        ['a']
        >>> run_tool(make_tool(add), '{"a": 1, "b": "x"}', timeout=None)
        'error: add: b: Input should be a valid integer, unable to parse string as an integer'
    """

    name: str
    function: Callable[..., Any]
    arguments: type[BaseModel]
    """Checks the arguments and turns them into the annotated types."""
    schema: Mapping[str, Json]
    """In OpenAI's shape."""


def make_tool(function: Callable[..., Any]) -> Tool:
    """The tool that a function is. Its docstring describes it; lines "name: text" under "Args:" its
    parameters."""
    name = str(getattr(function, "__name__", type(function).__name__))
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,63}", name):
        raise ValueError(f"a tool needs a function with a name, got {name!r}; write it with def")
    summary, notes = read_docstring(inspect.getdoc(function) or "")
    fields: dict[str, Any] = {}
    for parameter in inspect.signature(function, eval_str=True).parameters.values():
        if parameter.kind in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
            parameter.POSITIONAL_ONLY,
        ):
            raise ValueError(
                f"tool {name}: parameter {parameter.name!r} cannot be passed by name; give it one"
            )
        annotation = Any if parameter.annotation is parameter.empty else parameter.annotation
        default = ... if parameter.default is parameter.empty else parameter.default
        # An alias, because a field of a pydantic model may not have every name that a parameter
        # may.
        field = Field(default=default, alias=parameter.name, description=notes.get(parameter.name))
        fields[f"arg_{parameter.name}"] = (annotation, field)
    model = create_model(
        name, __config__=ConfigDict(extra="forbid", arbitrary_types_allowed=True), **fields
    )
    parameters = _without_titles(model.model_json_schema())
    parameters.pop("additionalProperties", None)
    parameters.setdefault("properties", {})
    schema = {
        "type": "function",
        "function": {"name": name, "description": summary, "parameters": parameters},
    }
    return Tool(name=name, function=function, arguments=model, schema=schema)


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """(what stands before the first section, the notes on parameters), from Google or reST style.

    Example:
        >>> text = "Finds things.\\n\\nArgs:\\n    query (str): what to find\\n        in words\\n"
        >>> read_docstring(text)
        ('Finds things.', {'query': 'what to find in words'})
    """
    summary: list[str] = []
    notes: dict[str, str] = {}
    section, current = "", None
    for line in text.splitlines():
        stripped = line.strip()
        rest = re.match(r":param (?:\w+ )?(\w+):\s*(.*)", stripped)
        if rest:
            notes[rest[1]] = rest[2]
            section = "param"
        elif re.fullmatch(
            r"(Args|Arguments|Parameters|Returns|Raises|Yields|Example|Examples|Note|Notes):",
            stripped,
        ):
            section, current = stripped[:-1], None
        elif section in ("Args", "Arguments", "Parameters"):
            entry = re.match(r"(\w+)\s*(?:\([^)]*\))?:\s*(.*)", stripped)
            if entry:
                current = entry[1]
                notes[current] = entry[2]
            elif stripped and current is not None:
                notes[current] = f"{notes[current]} {stripped}"
        elif not section:
            summary.append(stripped)
    return " ".join(" ".join(summary).split()), notes


def parse_tool_calls(text: str) -> tuple[ToolCall, ...]:
    """The calls written as <tool_call>{"name": .., "arguments": {..}}</tool_call>, in order;
    malformed ones too.

    A malformed call keeps what the model wrote as its arguments and has an empty name, so that it
    can be answered. Calls after the first MAX_CALLS are not read. One pass over the text: the time
    grows with its length.

    Example:
        >>> parse_tool_calls('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
        (ToolCall(id='call_0', name='add', arguments='{"a": 1}'),)
        >>> parse_tool_calls("<tool_call>add(1)</tool_call>")[0].name
        ''
    """
    calls: list[ToolCall] = []
    start = text.find(OPEN)
    while start >= 0 and len(calls) < MAX_CALLS:
        end = text.find(CLOSE, start)
        if end < 0:
            break
        calls.append(_read_call(text[start + len(OPEN) : end].strip(), f"call_{len(calls)}"))
        start = text.find(OPEN, end)
    return tuple(calls)


def tool_calls(message: Message) -> tuple[ToolCall, ...]:
    """The calls of a message: those that came parsed, else those in its text."""
    return message.tool_calls or parse_tool_calls(message.content)


def run_tool(tool: Tool, arguments: str, *, timeout: float | None) -> str:
    """The tool's answer, as text. Errors are text too, so that the model can correct its call.

    `timeout` is in seconds; a call that takes longer is answered with an error and left to itself.
    """
    try:
        given = json.loads(arguments or "{}") if len(arguments) <= MAX_ARGUMENT_CHARS else None
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        return f"error: {tool.name}: the arguments must be a JSON object"
    try:
        checked = tool.arguments.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        return f"error: {tool.name}: {'.'.join(map(str, first['loc']))}: {first['msg']}"
    values = {
        name.removeprefix("arg_"): getattr(checked, name) for name in tool.arguments.model_fields
    }
    return _within(lambda: _to_text(resolve(tool.function(**values))), tool.name, timeout)


def _within(function: Callable[[], str], name: str, timeout: float | None) -> str:
    result: list[str] = []

    def work() -> None:
        try:
            result.append(ask(name, function))
        except EnvError as error:
            result.append(f"error: {words(error)}")

    if timeout is None:
        work()
    else:
        thread = threading.Thread(target=work, name=f"tool-{name}", daemon=True)
        thread.start()
        thread.join(timeout)
    return result[0] if result else f"error: {name} took longer than {timeout:g} seconds"


def _to_text(value: Any) -> str:
    return clean_text(value) if isinstance(value, str) else json.dumps(json_safe(value))


def _read_call(body: str, call_id: str) -> ToolCall:
    try:
        readable = body.startswith("{") and len(body) <= MAX_ARGUMENT_CHARS
        data = json.loads(body) if readable else None
    except (ValueError, RecursionError):
        data = None
    call = cast(dict[str, Any], data) if isinstance(data, dict) else {}
    name, arguments = call.get("name"), call.get("arguments", {})
    if not isinstance(name, str):
        return ToolCall(id=call_id, name="", arguments=clean_text(body[:MAX_ARGUMENT_CHARS]))
    return ToolCall(
        id=call_id,
        name=clean_text(name),
        arguments=clean_text(arguments) if isinstance(arguments, str) else json.dumps(arguments),
    )


def _without_titles(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema less pydantic's titles; a property that is called title stays."""
    cleaned: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "title" and isinstance(value, str):
            continue
        if key in ("properties", "$defs") and isinstance(value, dict):
            entries = cast(dict[str, dict[str, Any]], value)
            cleaned[key] = {name: _without_titles(entry) for name, entry in entries.items()}
        elif isinstance(value, dict):
            cleaned[key] = _without_titles(cast(dict[str, Any], value))
        elif isinstance(value, list):
            items = cast(list[Any], value)
            cleaned[key] = [
                _without_titles(cast(dict[str, Any], i)) if isinstance(i, dict) else i
                for i in items
            ]
        else:
            cleaned[key] = value
    return cleaned
