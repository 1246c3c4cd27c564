"""Renderings learned from a chat template: constant texts around the contents of messages, by their roles."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from turnwise.chat.template import ContentRules
from turnwise.types import Json, Message

CHECK_EVERY = 64
"""Of so many uses of a shape, one is compared with the template's own rendering, beginning with the first."""
_MAX_SHAPES = 4096
Roles = tuple[str, ...]
Render = Callable[[Sequence[Message], Sequence[Mapping[str, Json]]], str]


@dataclass(slots=True)
class Shape:
    """Constant texts, and the messages whose contents stand between them: pieces[0] content pieces[1] content ...

    Example:
        >>> shape = Shape(pieces=("<user>", "</user><model>"), order=(0,))
        >>> shape.fill(["hi"])
        '<user>hi</user><model>'
    """

    pieces: tuple[str, ...]
    order: tuple[int, ...]
    """Indices of the messages, one fewer than pieces."""
    uses: int = 0

    def fill(self, contents: Sequence[str]) -> str:
        """The rendering of messages with these contents."""
        parts = [self.pieces[0]]
        for index, piece in zip(self.order, self.pieces[1:], strict=True):
            parts += (contents[index], piece)
        return "".join(parts)


@dataclass(slots=True)
class Tail:
    """What a longer conversation adds behind a reply. `whole` continues the rendering; `sent` continues the ids, which
    may hold the end of the turn already."""

    roles: Roles
    whole: Shape
    sent: Shape
    uses: int = 0


@dataclass(slots=True)
class Shapes:
    """The shapes of one template, learned as they are asked for.

    `render` is the template itself, which draws a shape from marks in the place of contents.
    """

    rules: ContentRules
    render: Render
    specials: Sequence[str] = ()
    """Texts that are broken up before they are rendered; a message that holds one is not plain."""
    epoch: int = 0
    """Grows whenever everything is forgotten: a rendering of an earlier epoch has no tail."""
    _now: tuple[str, ...] = ()
    _shapes: dict[tuple[Roles, str], Shape | None] = field(default_factory=dict[tuple[Roles, str], Shape | None])
    _tails: dict[tuple[Roles, Roles, str, str], Tail | None] = field(
        default_factory=dict[tuple[Roles, Roles, str, str], Tail | None]
    )
    _wanted: re.Pattern[str] = field(init=False)

    def __post_init__(self) -> None:
        looked_for = sorted({*self.rules.literals, *self.specials}, key=len, reverse=True)
        self._wanted = re.compile("|".join(map(re.escape, looked_for)) or r"(?!)")

    def plain(self, message: Message) -> bool:
        """True where the message's content passes through the template unchanged, and nothing else is in it."""
        text = message.content
        if not text or message.tool_calls or message.tool_call_id is not None or message.name is not None:
            return False
        first, last = text[0], text[-1]
        if (first.isspace() or last.isspace()) and (self.rules.trims or text.isspace()):
            return False
        if first in self.rules.edges or last in self.rules.edges:
            return False
        return self._wanted.search(text) is None

    def refresh(self) -> None:
        """Forgets everything where the template writes the time and it is another one."""
        if self.rules.clocks:
            moment = datetime.now()
            now = tuple(moment.strftime(clock) for clock in self.rules.clocks)
            if now != self._now:
                self._now = now
                self.forget()

    def forget(self) -> None:
        self.epoch += 1
        self._shapes.clear()
        self._tails.clear()

    def shape(self, roles: Roles, tools: Sequence[Mapping[str, Json]], tools_key: str) -> Shape | None:
        """The shape of a conversation, None where the template has none for these roles."""
        key = (roles, tools_key)
        if key not in self._shapes:
            if len(self._shapes) >= _MAX_SHAPES:
                self._shapes.clear()
            self._shapes[key] = self._learn(roles, tools)
        return self._shapes[key]

    def tail(
        self, before: Roles, added: Roles, tools: Sequence[Mapping[str, Json]], tools_key: str, *, end: str
    ) -> Tail | None:
        """What follows the first of the added messages, which the model said. None where it does not follow simply.

        Args:
            end: text of the end-of-turn token, if the model sampled it.
        """
        key = (before, added, tools_key, end)
        if key not in self._tails:
            if len(self._tails) >= _MAX_SHAPES:
                self._tails.clear()
            short = self.shape(before, tools, tools_key)
            long = self.shape(before + added, tools, tools_key)
            self._tails[key] = None if short is None or long is None else _tail(short, long, before, added, end)
        return self._tails[key]

    def _learn(self, roles: Roles, tools: Sequence[Mapping[str, Json]]) -> Shape | None:
        marks = [f"q{index}kx{index * 7919 + 104729}zj" for index in range(len(roles))]
        messages = [Message(role=role, content=mark) for role, mark in zip(roles, marks, strict=True)]  # pyright: ignore[reportArgumentType]
        if not all(self.plain(message) for message in messages):
            return None
        try:
            text = self.render(messages, tools)
        except ValueError:  # the template refuses these roles; its own words come where it is used
            return None
        parts = re.split("(" + "|".join(marks) + ")", text)
        order = tuple(marks.index(mark) for mark in parts[1::2])
        return Shape(pieces=tuple(parts[0::2]), order=order)


def _tail(short: Shape, long: Shape, before: Roles, added: Roles, end: str) -> Tail | None:
    """The part of `long` behind the reply, None where `long` does not go on where `short` ends, with the reply."""
    size, reply = len(short.order), len(before)
    if long.order[: size + 1] != (*short.order, reply) or long.pieces[: size + 1] != short.pieces:
        return None
    order = tuple(index - reply - 1 for index in long.order[size + 1 :])
    if any(index < 0 for index in order):
        return None
    pieces = long.pieces[size + 1 :]
    rest = pieces[0].lstrip()
    sent = pieces
    if end:
        if rest.startswith(end):
            sent = (rest[len(end) :], *pieces[1:])
        elif len(rest) < len(end):
            return None  # whether the end follows is up to the content behind
    whole = Shape(pieces=pieces, order=order)
    return Tail(roles=before + added, whole=whole, sent=whole if sent is pieces else Shape(pieces=sent, order=order))
