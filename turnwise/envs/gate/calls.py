"""Calls of foreign code: whatever it raises is an EnvError, except the user's Ctrl-C."""

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar, cast

from turnwise.envs.base import BadActionError, Env, EnvBusyError, EnvError, EnvTimeoutError
from turnwise.envs.gate.texts import raised_at, words
from turnwise.procs.forks import end_fork
from turnwise.procs.interrupts import from_the_user, interrupts
from turnwise.procs.threads import SideThread

logger = logging.getLogger(__name__)
T = TypeVar("T")
OWN_ERRORS = (EnvError, EnvTimeoutError, EnvBusyError, BadActionError)


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
