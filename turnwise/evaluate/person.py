"""Converts the input of a person to the format that a model must write."""

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from turnwise.config.schema import FormatConfig
from turnwise.envs.actions import write_reply


def write_actions(text: str, form: FormatConfig) -> str:
    """The reply with these actions, of which several are separated as a model's are.

    Example:
        >>> write_actions("up||left", FormatConfig(think=False))
        '<answer>up || left</answer>'
    """
    return write_reply([piece.strip() for piece in text.split(form.action_sep)], form)


def written_call(text: str, tools: Sequence[Mapping[str, Any]]) -> str:
    """The call in a model's format if the text is a tool's name with arguments; else the text.

    Example:
        >>> stock = {"function": {"name": "stock", "parameters": {}}}
        >>> written_call("stock item=apples", [stock])
        '<tool_call>{"name": "stock", "arguments": {"item": "apples"}}</tool_call>'
        >>> written_call("three apples", [stock])
        'three apples'
    """
    name, _, rest = text.partition(" ")
    if name not in [tool["function"]["name"] for tool in tools]:
        return text
    arguments: dict[str, Any] = {}
    if rest.strip().startswith("{"):
        try:
            arguments = json.loads(rest)
        except ValueError:
            return text
    else:
        try:
            words = shlex.split(rest)
        except ValueError:  # an open quote
            return text
        for word in words:
            key, equals, value = word.partition("=")
            if not equals:
                return text
            try:
                arguments[key] = json.loads(value)
            except ValueError:
                arguments[key] = value
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
