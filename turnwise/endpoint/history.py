"""Which earlier turn a request continues. Requests carry whole conversations; turns are known by
their messages, not by the form in which a program sends them back."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from turnwise.chat.render import tools_key
from turnwise.endpoint.asks import Ask
from turnwise.types import Message, ToolCall

Cause = Literal[
    "first", "continued", "branched", "new", "again", "edited", "tools", "role", "template"
]
"""Why a turn is played in the context that it is played in: the first of the episode; a turn that
continues the newest; one that continues an older turn; a conversation without earlier replies, such
as that of a sub-agent; the same request once more; a conversation whose earlier replies differ from
what was said; one that had other tools; the first of another role; a chat template that wrote the
conversation anew."""
Key = tuple[str, ...]


@dataclass(slots=True)
class _Node:
    """One message of a conversation, after those before it."""

    turn: int | None = None
    """The turn that said it, None for messages of the program."""
    call_ids: tuple[str, ...] = ()
    children: dict[Key, list["_Node"]] = field(default_factory=dict[Key, list["_Node"]])


@dataclass(slots=True)
class Place:
    """Where a request goes on."""

    parent: int | None
    """The turn that it continues, None for a new conversation."""
    tail: tuple[Message, ...]
    """The messages after that turn; all of them in a new conversation."""
    node: _Node
    """The last message, for the reply that will follow it."""
    state: str
    """Names the conversation and its tools. Equal ones are one state for algorithms that compare
    turns (GiGPO). A digest: a conversation is long, and every turn of it has one."""


class History:
    """The messages of an episode as a tree.

    Texts are compared without their edges, tool calls by name and arguments as JSON. Thoughts, ids
    of calls and the difference between no content and an empty one do not count.
    """

    def __init__(self) -> None:
        self._roots: dict[tuple[str, str], _Node] = {}
        self._newest: int | None = None
        self._spoke: set[str] = set()
        """Roles that have replied."""

    def find(self, ask: Ask) -> Place:
        """The deepest reply that the request repeats, with everything before it."""
        tools = tools_key(ask.tools)
        root = self._roots.setdefault((ask.role, tools), _Node())
        state = hashlib.blake2b(tools.encode("utf-8", "surrogatepass"), digest_size=16)
        node, parent, at = root, None, 0
        for place, message in enumerate(ask.messages):
            found = _child(node, message)
            if found is None:
                break
            node = found
            if node.turn is not None:
                parent, at = node, place + 1
        tail = ask.messages[at:]
        node = parent or root
        for message in tail:
            node = _child(node, message, programs=True) or _add(node, message)
        for message in ask.messages:
            state.update(json.dumps(message_key(message)).encode())
        return Place(
            parent=None if parent is None else parent.turn,
            tail=tail,
            node=node,
            state=state.hexdigest(),
        )

    def said(self, ask: Ask, place: Place, reply: Message, turn: int) -> None:
        """Adds the reply of a turn after the request's last message."""
        node = _Node(turn=turn, call_ids=tuple(call.id for call in reply.tool_calls))
        place.node.children.setdefault(message_key(reply), []).append(node)
        self._newest = turn
        self._spoke.add(ask.role)

    def cause(self, ask: Ask, place: Place) -> Cause:
        """Why the request is answered in the context that it is answered in."""
        if place.parent is not None:
            return "continued" if place.parent == self._newest else "branched"
        if self._newest is None:
            return "first"
        replied = [child for found in place.node.children.values() for child in found]
        if any(child.turn is not None for child in replied):
            return "again"
        if ask.role not in self._spoke:
            return "role"
        if not any(message.role == "assistant" for message in ask.messages):
            return "new"
        roots = [node for (role, _), node in self._roots.items() if role == ask.role]
        return "tools" if any(_repeats(node, ask.messages) for node in roots) else "edited"


def _repeats(root: _Node, messages: Sequence[Message]) -> bool:
    """True if the messages repeat a reply of the conversations after the root."""
    node = root
    for message in messages:
        found = _child(node, message)
        if found is None or found.turn is not None:
            return found is not None
        node = found
    return False


def _child(node: _Node, message: Message, *, programs: bool = False) -> _Node | None:
    """The node of the message after `node`. Of several equal replies: the one whose ids of calls
    the message has, else the newest."""
    found = node.children.get(message_key(message))
    if programs and found is not None:
        found = [child for child in found if child.turn is None]
    if not found:
        return None
    ids = tuple(call.id for call in message.tool_calls)
    exact = [child for child in found if ids and child.call_ids == ids]
    return (exact or found)[-1]


def _add(node: _Node, message: Message) -> _Node:
    child = _Node(call_ids=tuple(call.id for call in message.tool_calls))
    node.children.setdefault(message_key(message), []).append(child)
    return child


def message_key(message: Message) -> Key:
    """What a message says, whatever the form in which a program sends it."""
    content = message.content
    if message.role == "assistant":
        content = without_thoughts(content)[1]
    calls = [part for call in message.tool_calls for part in (call.name, _arguments(call))]
    return (message.role, content.strip(), *calls)


def _arguments(call: ToolCall) -> str:
    """The arguments in one form, whatever their spaces and the order of their keys.

    Example:
        >>> _arguments(ToolCall(id="a", name="f", arguments='{"b": 1.0, "a": "\\\\u00e9"}'))
        '{"a":"é","b":1}'
    """
    try:
        value = json.loads(call.arguments)
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    except (ValueError, RecursionError):
        return call.arguments.strip()
    whole = json.loads(text, parse_float=lambda number: _whole(float(number)))
    return json.dumps(whole, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _whole(number: float) -> float | int:
    return int(number) if number.is_integer() and abs(number) < 2**53 else number


def without_thoughts(text: str) -> tuple[str, str]:
    """(the thoughts at the beginning of a reply, the rest of it).

    Example:
        >>> without_thoughts("<think>hm</think> yes"), without_thoughts("no thoughts")
        (('hm', ' yes'), ('', 'no thoughts'))
    """
    head, mark, rest = text.partition("</think>")
    if not mark:
        return "", text
    return head.strip().removeprefix("<think>").strip(), rest
