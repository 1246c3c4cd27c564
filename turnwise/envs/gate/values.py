# pyright: reportUnknownArgumentType=false
"""Text, numbers, flags and JSON that foreign code returned, checked."""

import math
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeVar, cast

from turnwise.envs.base import EnvError
from turnwise.envs.gate.texts import brief, clean_text, words
from turnwise.types import Json

T = TypeVar("T")
MAX_REWARD = 1e12
"""Largest absolute reward. The sum over 10 000 turns, squared over a million tokens, is finite in
float32, whose largest number is 3.4e38."""
MAX_TEXT = 1 << 24
"""Maximum characters of an environment's answer (all messages together) and of a task."""
MAX_INFO = 100_000
"""Maximum characters of an info, as JSON."""
MAX_ITEMS = 10_000
"""Maximum items of a list in an answer: messages, tool calls, parts of a reward."""
MAX_DEPTH = 12
MAX_INT_BITS = 256
CUT = "turnwise_cut"
"""The key that marks a truncated info."""


def read_text(value: Any, *, what: str) -> str:
    """The value, which must be text.

    Example:
        >>> read_text(7, what="coin: the content of a message")
        Traceback (most recent call last):
        turnwise.envs.base.EnvError: coin: the content of a message must be text, got int: 7
    """
    if type(value) is str and value.isascii() and len(value) <= MAX_TEXT:
        return value
    if not isinstance(value, str):
        raise EnvError(f"{what} must be text, got {type(value).__name__}: {brief(value)}")
    text = clean_text(value)  # a subclass may lie about its length
    if len(text) > MAX_TEXT:
        raise EnvError(f"{what} has {len(text)} characters; the limit is {MAX_TEXT}")
    return text


def read_reward(value: Any, *, name: str, what: str = "a reward") -> float:
    """A finite float, small enough for float32 and its squares.

    Example:
        >>> read_reward(float("nan"), name="coin")
        Traceback (most recent call last):
        turnwise.envs.base.EnvError: coin: a reward must be a finite number, got nan
    """
    if type(value) is not float:
        if isinstance(value, str | bytes | bytearray) or value is None:
            raise EnvError(f"{name}: {what} must be a finite number, got {brief(value)}")
        try:
            value = float(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise EnvError(f"{name}: {what} must be a finite number, got {brief(value)}") from error
    if not math.isfinite(value):
        raise EnvError(f"{name}: {what} must be a finite number, got {value}")
    if abs(value) > MAX_REWARD:
        raise EnvError(
            f"{name}: {what} must be within +-{MAX_REWARD:g}, got {value:g}; float32 cannot hold "
            "the squares of larger ones, so scale the rewards down"
        )
    return value


def read_flag(value: Any, *, name: str) -> bool:
    """True or False, from a bool or numpy's."""
    if value is True or value is False:
        return value
    if type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_"):
        return bool(value)
    raise EnvError(
        f"{name}: done, terminated and truncated must be True or False, got {brief(value)}"
    )


def read_count(value: Any, *, what: str, least: int = 0) -> int:
    """A whole number that is at least `least`, checked."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise EnvError(f"{what} must be an integer, got {brief(value)}")
    number = int.__int__(value)
    if not least <= number < 2**63:
        raise EnvError(f"{what} must be {least} or more, got {brief(number)}")
    return number


def read_info(value: Any, *, name: str) -> dict[str, Json]:
    """The info dict as JSON of at most MAX_INFO characters. Items that do not fit are dropped, long
    ones first, and the key `turnwise_cut` is set.

    Example:
        >>> read_info({"log": "x" * 200_000, "success": True}, name="coin")["success"]
        True
    """
    if value is None:
        return {}
    if type(value) is dict:
        value = dict(cast(dict[Any, Any], value))  # the environment may change its own meanwhile
        if _is_simple(value):
            return value
    if not isinstance(value, Mapping):
        raise EnvError(f"{name}: info must be a dict, got {type(value).__name__}: {brief(value)}")
    items = cast(Mapping[Any, Any], value)
    room = _Room(MAX_INFO)
    info = cast(dict[str, Json], _plain(items, room, 0))
    if room.cut:
        known = dict(islice(items.items(), MAX_INFO))  # more keys would not fit; it may be endless
        few = {key: item for key, item in known.items() if _is_short(item)}
        rest = {key: item for key, item in known.items() if key not in few}
        info = cast(dict[str, Json], _plain({**few, **rest}, _Room(MAX_INFO), 0))
        info[CUT] = f"this info was longer than {MAX_INFO} characters"
    return info


def _is_simple(items: dict[Any, Any]) -> bool:
    """True for an info of a few short values and of short lists of texts, which needs no repair.
    Nearly every info is. The lists are replaced by copies."""
    if len(items) > 32:
        return False
    listed = 0
    for key, item in items.items():
        if type(key) is not str or len(key) > 100 or not key.isascii():
            return False
        kind = cast(object, type(item))
        if kind is str:
            sound = len(item) <= 200 and item.isascii()
        elif kind is int:
            sound = -(2**63) <= item < 2**63
        elif kind is float:
            sound = math.isfinite(item)
        elif kind is list:
            some = item[:101]  # a copy; the environment may have a million
            if len(some) > 100 or not {*map(type, some)} <= {str}:
                return False
            text = "".join(some)
            listed += len(text)
            sound = text.isascii() and listed <= 10_000
            items[key] = some
        else:
            sound = item is None or kind is bool
        if not sound:
            return False
    return True


def read_json(value: Any, *, what: str) -> Json:
    """The value as JSON. More than MAX_TEXT characters are an error.

    Example:
        >>> read_json({"size": (4, 4)}, what="coin: the row")
        {'size': [4, 4]}
    """
    room = _Room(MAX_TEXT)
    plain = _plain(value, room, 0)
    if room.cut:
        raise EnvError(f"{what} is longer than {MAX_TEXT} characters as JSON")
    return plain


def json_safe(value: Any) -> Json:
    """The value as JSON: non-finite numbers become None, unknown objects and huge integers their
    text. Truncated to MAX_TEXT characters.

    Example:
        >>> json_safe({1: (float("inf"), {2}), "f": abs})
        {'1': [None, [2]], 'f': '<built-in function abs>'}
    """
    return _plain(value, _Room(MAX_TEXT), 0)


@dataclass(slots=True)
class _Room:
    """The remaining number of characters for a value's JSON."""

    left: int
    cut: bool = False
    around: set[int] = field(default_factory=set[int])
    """Ids of the enclosing containers, to detect cycles."""

    def take(self, text: str) -> str:
        """The part of the text that fits."""
        size, left = len(text) + 4, self.left
        self.left -= size
        if size > left:
            self.cut = True
            return text[: max(left, 0)]
        return text


def _plain(value: Any, room: _Room, depth: int) -> Json:
    if value is None or value is True or value is False:
        room.left -= 6
        return value
    if isinstance(value, str):
        return room.take(clean_text(value))
    if isinstance(value, int):
        room.left -= 8
        if int.bit_length(value) > MAX_INT_BITS:
            return room.take(f"<an integer of {int.bit_length(value)} bits>")
        return int.__int__(value)  # a subclass may override it
    if isinstance(value, float):
        room.left -= 8
        value = float.__float__(value)
        return value if math.isfinite(value) else None
    if id(value) in room.around:
        return room.take("<itself>")
    if depth < MAX_DEPTH:
        room.left -= 8
        room.around.add(id(value))
        try:
            return _plain_container(value, room, depth)
        finally:
            room.around.discard(id(value))
    return room.take(brief(value))


def _plain_container(value: Any, room: _Room, depth: int) -> Json:
    if isinstance(value, Mapping):
        return _plain_mapping(cast(Mapping[Any, Any], value), room, depth)
    if isinstance(value, AbstractSet):
        return sorted(_plain_items(cast(AbstractSet[Any], value), room, depth), key=repr)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return _plain_items(cast(Sequence[Any], value), room, depth)
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        array = cast(Any, value)
        size = math.prod(max(1, length) for length in array.shape)  # 0 is many empty lists too
        if size <= room.left:
            return _plain(array.tolist(), room, depth + 1)
    return room.take(brief(value))


def _plain_mapping(value: Mapping[Any, Any], room: _Room, depth: int) -> dict[str, Json]:
    found: dict[str, Json] = {}
    for key, item in value.items():
        if room.left <= 0:
            room.cut = True
            break
        name = room.take(clean_text(key) if isinstance(key, str) else words(key))
        found[name] = _plain(item, room, depth + 1)
    return found


def _plain_items(value: "Sequence[Any] | AbstractSet[Any]", room: _Room, depth: int) -> list[Json]:
    found: list[Json] = []
    for item in value:
        if room.left <= 0:
            room.cut = True
            break
        found.append(_plain(item, room, depth + 1))
    return found


def _is_short(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float)


def read_items(value: Iterable[T], *, what: str) -> Sequence[T]:
    """The items, read once: a foreign list may be endless, or change while it is read."""
    if type(value) is tuple and len(cast(tuple[T, ...], value)) <= MAX_ITEMS:
        return cast(tuple[T, ...], value)
    found = tuple(islice(value, MAX_ITEMS + 1))
    if len(found) > MAX_ITEMS:
        raise EnvError(f"{what} has more than {MAX_ITEMS} items")
    return found
