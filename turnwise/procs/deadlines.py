"""One time limit for many things that are waited for at once."""

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

T = TypeVar("T")
TICKS = 20
"""How often overdue ones are looked for, within one limit."""
LONGEST_TICK = 1.0


class Deadlines:
    """`await deadlines.wait(job)` raises TimeoutError like asyncio.timeout, up to a twentieth of the limit later.

    A thousand episodes begin to wait for a reply in every step of a rollout, and nearly none of them waits too long:
    one timer that looks at all of them costs less than one for each.

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
        """The tasks that wait, in the order in which they began to."""
        self._late: set[asyncio.Task[Any]] = set()
        """Tasks that were cancelled because they wait too long."""
        self._loop: asyncio.AbstractEventLoop | None = None
        """The loop with the timer, None while there is none."""

    async def wait(self, job: Awaitable[T]) -> T:
        """The job's result, in the running task, which waits for one thing at a time."""
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
            # Whoever else cancelled the task meanwhile is still to be heard, as asyncio.timeout has it.
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
        if self._loop is not loop:  # another loop waits now; what waited here went with it
            return
        now = loop.time()
        for task, since in list(self._since.items()):
            if now - since < self._seconds:
                break  # the others began later
            del self._since[task]
            self._late.add(task)
            task.cancel()
        if self._since:
            self._arm(loop)
        else:
            self._loop = None
