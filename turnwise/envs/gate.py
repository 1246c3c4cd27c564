# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false
"""The gate: validates everything that environments, tools, servers and models return.

It guarantees four things. Text is valid Unicode. Numbers are finite and can be squared in float32.
JSON is plain JSON of bounded size. Any exception of foreign code is an EnvError, except the user's
Ctrl-C. The gate repairs values if that keeps their meaning (half a surrogate pair becomes U+FFFD);
other violations of the contract raise an EnvError that names the rule.
"""

import json
import logging
import math
import os
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, TypeVar, cast, get_args

from turnwise.envs.base import BadActionError, Env, EnvBusyError, EnvError, EnvTimeoutError, Hint
from turnwise.procs.forks import end_fork
from turnwise.procs.interrupts import from_the_user, interrupts
from turnwise.procs.threads import SideThread
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
from turnwise.user_code import line_of

logger = logging.getLogger(__name__)
T = TypeVar("T")
ROLES = frozenset[str](get_args(Role))
MAX_REWARD = 1e12
"""Largest absolute reward. The sum over 10 000 turns, squared over a million tokens, is finite in
float32, whose largest number is 3.4e38."""
MAX_TEXT = 1 << 24
"""Maximum characters of an environment's answer (all messages together) and of a task."""
MAX_INFO = 100_000
"""Maximum characters of an info, as JSON."""
MAX_ERROR = 2_000
"""Maximum characters of an error's message."""
MAX_ITEMS = 10_000
"""Maximum items of a list in an answer: messages, tool calls, parts of a reward."""
MAX_DEPTH = 12
MAX_INT_BITS = 256
CUT = "turnwise_cut"
"""The key that marks a truncated info."""

EARLIER = "the index of an earlier turn"
OWN_ERRORS = (EnvError, EnvTimeoutError, EnvBusyError, BadActionError)

_short = reprlib.Repr()
_short.maxlevel, _short.maxstring, _short.maxother = 3, 200, 200
_short.maxlist = _short.maxtuple = _short.maxdict = _short.maxset = _short.maxfrozenset = 12


def ask(what: str, function: Callable[[], T]) -> T:
    """The result of foreign code. Any exception becomes an EnvError that begins with `what`.

    That includes SystemExit, GeneratorExit and CancelledError. The user's Ctrl-C is raised even if
    the foreign code swallowed it. A child that the foreign code forked does not come back.

    Example:
        >>> ask("coin: step", lambda: exit(3))
        Traceback (most recent call last):
        turnwise.envs.base.EnvError: coin: step raised SystemExit: 3
    """
    before, pid = interrupts(), os.getpid()
    try:
        try:
            value = function()
        finally:
            end_fork(pid, what)
    except BaseException as error:
        if from_the_user(error, before=before):
            raise KeyboardInterrupt from error
        if not _is_env_error(error):
            raise EnvError(f"{what} raised {raised_at(error)}") from error
        if type(error) in OWN_ERRORS and all(type(part) is str for part in error.args):
            raise
        raise _own_error(cast(EnvError, error)) from error
    if interrupts() != before and from_the_user(None, before=before):
        raise KeyboardInterrupt
    return value


def ask_within(what: str, function: Callable[[], T], *, thread: SideThread, limit: float) -> T:
    """`ask(what, function)` in a thread. A call that takes longer than `limit` seconds is an
    EnvTimeoutError, and leaves its thread behind."""
    try:
        return thread.call(lambda: ask(what, function), limit)
    except TimeoutError:
        raise EnvTimeoutError(f"{what} took longer than {limit:g} s") from None


def _is_env_error(error: BaseException) -> bool:
    """True for an EnvError that says that it is one. `isinstance` would ask the error's own
    `__class__`, which may be anything."""
    try:
        return issubclass(type(error), EnvError) and error.__class__ is type(error)
    except BaseException:
        return False


def _own_error(error: EnvError) -> EnvError:
    """The error as one of OWN_ERRORS, with plain text. A subclass and its arguments are foreign
    code, and an error's text is read later, where no limit holds."""
    text = words(error)
    for kind in (EnvTimeoutError, EnvBusyError):
        if issubclass(type(error), kind):
            return kind(text)
    if issubclass(type(error), BadActionError):
        bad = cast(BadActionError, error)
        with suppress(BaseException):
            return BadActionError(text, over=bad.over, info=bad.info)
    return EnvError(text)


def close_quietly(env: Env, *, thread: SideThread | None = None, limit: float = 0.0) -> None:
    """Closes an environment whose work is done, in `thread` within `limit` seconds where one is
    given. A failure is logged."""
    try:
        if thread is None:
            ask("close", env.close)
        else:
            ask_within("close", env.close, thread=thread, limit=limit)
    except EnvError as error:
        logger.warning("closing an environment failed: %s", error)


def describe(error: BaseException) -> str:
    """The error's type and message, as valid and bounded text.

    Example:
        >>> describe(ValueError("half a sign: \\ud83c"))
        'ValueError: half a sign: \\ufffd'
    """
    return f"{_name(error)}: {words(error)}".removesuffix(": ")


def raised_at(error: BaseException) -> str:
    """`describe(error)`, with the file and line of the user's code.

    Example:
        >>> raised_at(KeyError("side"))
        "KeyError: 'side'"
    """
    try:
        line = clean_text(line_of(error))
    except BaseException:  # foreign code: the error's class may define anything
        line = ""
    return describe(error) + line


def _name(value: object) -> str:
    """The name of the value's class, whatever its metaclass says."""
    return clean_text(type.__dict__["__name__"].__get__(type(value)))


def words(value: object) -> str:
    """`str(value)` as valid and bounded text, whatever the object's own `__str__` does."""
    try:
        text = clean_text(str(value))
    except BaseException as failure:
        text = f"<{_name(value)} whose text raised {_name(failure)}>"
    return text if len(text) <= MAX_ERROR else text[: MAX_ERROR - 6] + " [cut]"


def brief(value: object) -> str:
    """The value's repr, truncated; also for objects whose repr raises."""
    try:
        text = clean_text(_short.repr(value))
    except BaseException as failure:
        text = f"<{_name(value)} whose repr raised {_name(failure)}>"
    return text if len(text) <= 200 else text[:197] + "..."


def clean_text(text: str) -> str:
    """The text as valid Unicode: surrogate pairs are joined, lone surrogates replaced.

    Example:
        >>> clean_text("caf\\u00e9 \\ud83d\\ude00 \\ud83d")
        'caf\u00e9 \U0001f600 \ufffd'
    """
    text = str.__str__(text)  # a subclass may override __str__
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


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
    """True for an info of a few short values, which needs no repair. Nearly every info is."""
    if len(items) > 32:
        return False
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
            for call in _items(cast(Sequence[Any], calls), what=f"{where}: the tool calls")
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
    found = _items(cast(Sequence[Any], value), what=where)
    messages = tuple(read_message(item, where=where) for item in found)
    size = sum(len(message.content) for message in messages)
    size += sum(len(call.arguments) for message in messages for call in message.tool_calls)
    if size > MAX_TEXT:
        raise EnvError(f"{where} holds {size} characters; the limit is {MAX_TEXT}")
    return messages


def _items(value: Iterable[T], *, what: str) -> Sequence[T]:
    """The items, read once: a foreign list may be endless, or change while it is read."""
    if type(value) is tuple and len(cast(tuple[T, ...], value)) <= MAX_ITEMS:
        return cast(tuple[T, ...], value)
    found = tuple(islice(value, MAX_ITEMS + 1))
    if len(found) > MAX_ITEMS:
        raise EnvError(f"{what} has more than {MAX_ITEMS} items")
    return found


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
            for part, number in _items(
                cast(Mapping[Any, Any], parts).items(), what=f"{name}: reward_parts"
            )
        },
        state_key=_optional(value.state_key, what=f"{name}: the state key"),
        info=read_info(value.info, name=name),
        rewritten=rewritten,
        call=call,
        earlier=_read_earlier(value.earlier, name=name),
        repeated=_read_earlier(value.repeated, name=name),
        trained=read_flag(value.trained, name=name),
        untrained=tuple(
            read_count(turn, what=f"{name}: {EARLIER}")
            for turn in _items(value.untrained, what=f"{name}: untrained")
        ),
    )


def _read_earlier(value: Mapping[Any, Any], *, name: str) -> dict[int, float]:
    return {
        read_count(turn, what=f"{name}: {EARLIER}"): read_reward(
            number, name=name, what="a reward of an earlier turn"
        )
        for turn, number in _items(value.items(), what=f"{name}: the rewards of earlier turns")
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
            for text in _items(stop, what=f"{what}stop")
        ),
    )


def read_count(value: Any, *, what: str, least: int = 0) -> int:
    """A whole number that is at least `least`, checked."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise EnvError(f"{what} must be an integer, got {brief(value)}")
    number = int.__int__(value)
    if not least <= number < 2**63:
        raise EnvError(f"{what} must be {least} or more, got {brief(number)}")
    return number


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
    """The result of a generator, checked.

    Raises:
        ValueError: the completion cannot be stored or trained on.

    Example:
        >>> admit_completion(Completion(ids=(5,), logprobs=(float("nan"),), finish_reason="stop"))
        Traceback (most recent call last):
        ValueError: the generator returned a log-prob that is not finite: nan
    """
    ids = cast(tuple[Any, ...], value.ids)
    if not ids or not all(isinstance(token, int) and token >= 0 for token in ids):
        raise ValueError(f"the generator returned no ids, or invalid ones: {brief(value.ids)}")
    if not all(map(math.isfinite, value.logprobs)):
        wrong = next(number for number in value.logprobs if not math.isfinite(number))
        raise ValueError(f"the generator returned a log-prob that is not finite: {wrong}")
    if value.finish_reason not in get_args(FinishReason):
        raise ValueError(f"the generator returned the finish reason {brief(value.finish_reason)}")
    return value
