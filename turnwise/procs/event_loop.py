"""An event loop that persists between calls, because worker processes, locks and the generator's
driver are bound to it."""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from turnwise.procs.interrupts import interrupts, watching_interrupts

T = TypeVar("T")


class EventLoop:
    """Runs coroutines one after the other on its own loop.

    asyncio.Runner formats the task's repr for an exception that it then drops; with a rollout as
    the result, that costs more than the rollout's bookkeeping.

    If a loop already runs in this thread, as in a notebook, another thread runs this one.

    Example:
        >>> loop = EventLoop()
        >>> async def answer():
        ...     return 42
        >>> loop.run(answer())
        42
        >>> loop.close()
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, job: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result. On an interrupt, all tasks of the loop are cancelled first."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        loop = self._loop
        with watching_interrupts():
            try:
                return _complete(loop, job)
            except BaseException:
                _end_tasks(loop)
                raise

    def close(self) -> None:
        """Closes the loop and cancels its tasks. The next use opens a new loop."""
        if self._loop is not None:
            _end_tasks(self._loop)
            _complete(self._loop, self._loop.shutdown_asyncgens())
            self._loop.close()
            self._loop = None


def _complete(loop: asyncio.AbstractEventLoop, job: Coroutine[Any, Any, T]) -> T:
    if not _another_runs():
        return loop.run_until_complete(job)
    found: list[T] = []
    raised: list[BaseException] = []
    ended = threading.Event()

    def work() -> None:
        try:
            found.append(loop.run_until_complete(job))
        except BaseException as error:
            raised.append(error)
        finally:
            ended.set()

    thread = threading.Thread(target=work, name="turnwise-loop", daemon=True)
    thread.start()
    try:
        # Not join: in Python 3.11, a thread whose join a signal interrupted counts as ended.
        ended.wait()
    except BaseException:  # Ctrl-C reaches this thread only; cancel the other
        loop.call_soon_threadsafe(_cancel_now, loop)
        ended.wait()
        raise
    if raised:
        raise raised[0]
    return found[0]


def _another_runs() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _cancel_now(loop: asyncio.AbstractEventLoop) -> None:
    for task in asyncio.all_tasks(loop):
        task.cancel()


def _end_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """Cancels all tasks of the loop and waits until they have ended.

    A KeyboardInterrupt in one task is raised again by every task that awaited it; only a new Ctrl-C
    ends the wait.
    """
    before = interrupts()
    while tasks := asyncio.all_tasks(loop):
        for task in tasks:
            task.cancel()
        try:
            _complete(loop, _settled(tasks))
        except (KeyboardInterrupt, SystemExit):
            if interrupts() != before:
                raise


async def _settled(tasks: "set[asyncio.Task[Any]]") -> None:
    await asyncio.gather(*tasks, return_exceptions=True)
