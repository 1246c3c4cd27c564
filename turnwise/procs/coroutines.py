"""Runs a coroutine from ordinary code, also where an event loop is already running in this thread."""

import asyncio
import inspect
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar, cast

T = TypeVar("T")
_lock = threading.Lock()
_loops: dict[int, tuple[asyncio.AbstractEventLoop, threading.Thread]] = {}  # by process: a fork has none of its own


def run_sync(coroutine: Coroutine[Any, Any, T], *, timeout: float | None = None) -> T:
    """The coroutine's result, computed on a background loop that all callers share.

    One loop for all, because clients and locks that async code keeps are bound to the loop they were made in.

    Example:
        >>> async def double(x): return 2 * x
        >>> run_sync(double(21))
        42
    """
    loop, thread = _background_loop()
    if threading.current_thread() is thread:
        coroutine.close()
        raise RuntimeError("run_sync was called from async code that run_sync runs itself; await the coroutine instead")
    future = asyncio.run_coroutine_threadsafe(coroutine, loop)
    try:
        return future.result(timeout)
    finally:
        future.cancel()


def resolve(value: Any) -> Any:
    """The value itself, or what it turns into if it has to be awaited."""
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
            thread = threading.Thread(target=loop.run_forever, name="turnwise-async", daemon=True)
            thread.start()
            pair = _loops[os.getpid()] = (loop, thread)
        return pair
