"""One time limit for many concurrent waits."""

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

T = TypeVar("T")
TICKS = 20
"""Checks for overdue waits per time limit."""
LONGEST_TICK = 1.0


class Deadlines:
    """`await deadlines.wait(job)` raises TimeoutError like asyncio.timeout, up to a twentieth of
    the limit later.

    A rollout starts thousands of waits, and almost none of them times out. One timer that checks
    all of them is cheaper than one timer each.

    Example:
        >>> asyncio.run(Deadlines(0.02).wait(asyncio.sleep(0, "in time")))
        'in time'
        >>> asyncio.run(Deadlines(0.02).wait(asyncio.sleep(5)))
        Traceback (most recent call last):
        TimeoutError: not over after 0.02 s
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._since: dict[asyncio.Task[Any], float] = {}
        """The waiting tasks, in the order in which they started to wait."""
        self._late: set[asyncio.Task[Any]] = set()
        """Tasks that were cancelled because of the limit."""
        self._loop: asyncio.AbstractEventLoop | None = None
        """The event loop of the timer, None if there is no timer."""

    async def wait(self, job: Awaitable[T]) -> T:
        """The job's result. A task may wait for only one job at a time."""
        loop = asyncio.get_running_loop()
        task = asyncio.current_task(loop)
        assert task is not None
        cancelled = task.cancelling()
        self._since[task] = loop.time()
        if self._loop is not loop:
            self._loop = loop
            self._arm(loop)
        try:
            return await job
        except BaseException as error:
            # A cancellation from elsewhere must still propagate, as with asyncio.timeout.
            late = task in self._late and task.uncancel() <= cancelled
            if late and isinstance(error, asyncio.CancelledError):
                raise TimeoutError(f"not over after {self._seconds:g} s") from None
            raise
        finally:
            self._since.pop(task, None)
            self._late.discard(task)

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.call_later(min(self._seconds / TICKS, LONGEST_TICK), self._tick, loop)

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._loop is not loop:  # another loop is in use now; the tasks of this one are gone
            return
        now = loop.time()
        for task, since in list(self._since.items()):
            if now - since < self._seconds:
                break  # the remaining ones started later
            del self._since[task]
            self._late.add(task)
            task.cancel()
        if self._since:
            self._arm(loop)
        else:
            self._loop = None
