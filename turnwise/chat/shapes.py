"""Shapes learned from a chat template: the constant texts around message contents, by roles."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import cast

from turnwise.chat.controls import Controls
from turnwise.chat.template import ContentRules
from turnwise.types import Json, Message, Role

CHECK_EVERY = 64
"""One in this many uses of a shape, starting with the first, is compared with the template's
rendering."""
_MAX_SHAPES = 4096
Roles = tuple[str, ...]
Render = Callable[[Sequence[Message], Sequence[Mapping[str, Json]]], str]


@dataclass(slots=True)
class Shape:
    """Constant texts, and the messages whose contents go between them: pieces[0] content pieces[1]
    content ...

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
    """The text that a longer conversation adds after a reply. `whole` continues the rendering;
    `sent` continues the ids, which may already contain the end-of-turn token."""

    roles: Roles
    whole: Shape
    sent: Shape
    uses: int = 0


@dataclass(slots=True)
class Shapes:
    """The shapes of one template, learned on first use. `render` is the template itself, which
    draws a shape from marks in the place of contents.
    """

    rules: ContentRules
    render: Render
    controls: Controls
    """A message that the controls change is not plain."""
    epoch: int = 0
    """Grows when all shapes are discarded. A rendering of an earlier epoch has no tail."""
    _now: tuple[str, ...] = ()
    _shapes: dict[tuple[Roles, str], Shape | None] = field(
        default_factory=dict[tuple[Roles, str], Shape | None]
    )
    _tails: dict[tuple[Roles, Roles, str, str], Tail | None] = field(
        default_factory=dict[tuple[Roles, Roles, str, str], Tail | None]
    )
    _wanted: re.Pattern[str] = field(init=False)

    def __post_init__(self) -> None:
        looked_for = sorted(self.rules.literals, key=len, reverse=True)
        self._wanted = re.compile("|".join(map(re.escape, looked_for)) or r"(?!)")

    def plain(self, message: Message) -> bool:
        """True if the message has only a role and a content, and the content passes through the
        template unchanged."""
        text = message.content
        if (
            not text
            or message.tool_calls
            or message.tool_call_id is not None
            or message.name is not None
        ):
            return False
        first, last = text[0], text[-1]
        if (first.isspace() or last.isspace()) and (self.rules.trims or text.isspace()):
            return False
        if first in self.rules.edges or last in self.rules.edges:
            return False
        if self._wanted.search(text) is not None:
            return False
        return self.controls.text(text, role=message.role) == text

    def refresh(self) -> None:
        """Discards all shapes if the template writes the time and the time has changed."""
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

    def shape(
        self, roles: Roles, tools: Sequence[Mapping[str, Json]], tools_key: str
    ) -> Shape | None:
        """The shape of a conversation; None if the template has no shape for these roles."""
        key = (roles, tools_key)
        if key not in self._shapes:
            if len(self._shapes) >= _MAX_SHAPES:
                self._shapes.clear()
            self._shapes[key] = self._learn(roles, tools)
        return self._shapes[key]

    def tail(
        self,
        before: Roles,
        added: Roles,
        tools: Sequence[Mapping[str, Json]],
        tools_key: str,
        *,
        end: str,
    ) -> Tail | None:
        """The text after the first of the added messages, the model's reply. None if it is not a
        fixed shape.

        Args:
            end: text of the end-of-turn token, if the model sampled it.
        """
        key = (before, added, tools_key, end)
        if key not in self._tails:
            if len(self._tails) >= _MAX_SHAPES:
                self._tails.clear()
            short = self.shape(before, tools, tools_key)
            long = self.shape(before + added, tools, tools_key)
            self._tails[key] = (
                None if short is None or long is None else _tail(short, long, before, added, end)
            )
        return self._tails[key]

    def _learn(self, roles: Roles, tools: Sequence[Mapping[str, Json]]) -> Shape | None:
        marks = [f"q{index}kx{index * 7919 + 104729}zj" for index in range(len(roles))]
        messages = [
            Message(role=cast(Role, role), content=mark)
            for role, mark in zip(roles, marks, strict=True)
        ]
        if not all(self.plain(message) for message in messages):
            return None
        try:
            text = self.render(messages, tools)
        except (
            ValueError
        ):  # the template refuses these roles; the error is raised when it renders them
            return None
        parts = re.split("(" + "|".join(marks) + ")", text)
        order = tuple(marks.index(mark) for mark in parts[1::2])
        pieces = tuple(parts[0::2])
        return Shape(pieces=pieces, order=order) if self.controls.solid(pieces) else None


def _tail(short: Shape, long: Shape, before: Roles, added: Roles, end: str) -> Tail | None:
    """The part of `long` after the reply; None if `long` does not continue `short` with the
    reply."""
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
            return None  # the next content decides whether the end token follows
    whole = Shape(pieces=pieces, order=order)
    return Tail(
        roles=before + added,
        whole=whole,
        sent=whole if sent is pieces else Shape(pieces=sent, order=order),
    )
