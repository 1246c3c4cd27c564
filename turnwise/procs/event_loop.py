"""One event loop, kept between calls: worker processes, their locks and the generator's driver belong to it."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class EventLoop:
    """Runs coroutines one after the other on a loop of its own.

    asyncio.Runner would do, but it puts the running task's representation into an exception that it then drops; with
    a rollout as the task's result that costs more than the rollout's bookkeeping.

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
        """The coroutine's result. Where it is interrupted, everything on the loop is cancelled first."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        loop = self._loop
        try:
            return loop.run_until_complete(job)
        except BaseException:
            loop.run_until_complete(_cancel_all())
            raise

    def close(self) -> None:
        """Ends the loop and whatever still runs on it. It may be used again, and is then a new one."""
        if self._loop is not None:
            self._loop.run_until_complete(_cancel_all())
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()
            self._loop = None


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
