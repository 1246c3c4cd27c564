"""Runs a coroutine from synchronous code, even if an event loop is already running in this
thread."""

import asyncio
import inspect
import logging
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar, cast

logger = logging.getLogger(__name__)
T = TypeVar("T")
_lock = threading.Lock()
_loops: dict[
    int, tuple[asyncio.AbstractEventLoop, threading.Thread]
] = {}  # by process id: a fork needs its own


def run_sync(coroutine: Coroutine[Any, Any, T], *, timeout: float | None = None) -> T:
    """The coroutine's result, computed on a background loop that all callers share.

    All callers share one loop, because clients and locks of async code are bound to the loop in
    which they were created.

    Example:
        >>> async def double(x): return 2 * x
        >>> run_sync(double(21))
        42
    """
    loop, thread = _background_loop()
    if threading.current_thread() is thread:
        coroutine.close()
        raise RuntimeError(
            "run_sync was called from async code that run_sync runs itself; await the coroutine "
            "instead"
        )
    future = asyncio.run_coroutine_threadsafe(_outcome(coroutine), loop)
    try:
        result, error = future.result(timeout)
    finally:
        future.cancel()
    if error is not None:
        raise error
    return cast(T, result)


async def _outcome(coroutine: Coroutine[Any, Any, T]) -> tuple[T | None, BaseException | None]:
    """(result, exception). A SystemExit raised in a task would end the shared loop."""
    try:
        return await coroutine, None
    except BaseException as error:
        return None, error


def resolve(value: Any) -> Any:
    """The value itself, or its result if it is awaitable."""
    if not inspect.isawaitable(value):
        return value

    async def wait() -> Any:
        return await cast(Coroutine[Any, Any, Any], value)

    return run_sync(wait())


def _background_loop() -> tuple[asyncio.AbstractEventLoop, threading.Thread]:
    with _lock:
        pair = _loops.get(os.getpid())
        if pair is None:
            loop = asyncio.new_event_loop()
            thread = threading.Thread(
                target=_run_for_ever, args=(loop,), name="turnwise-async", daemon=True
            )
            thread.start()
            pair = _loops[os.getpid()] = (loop, thread)
        return pair


def _run_for_ever(loop: asyncio.AbstractEventLoop) -> None:
    """Runs the loop. Restarts it if a task of user code raises an exception that ends
    `run_forever`."""
    while True:
        try:
            loop.run_forever()
        except BaseException as error:
            logger.warning("a task on the shared loop raised %s", type(error).__name__)
