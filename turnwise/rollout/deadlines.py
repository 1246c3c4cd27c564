"""One time limit for many things that are waited for at once."""

import asyncio
from types import TracebackType

TICKS = 20
"""How often overdue ones are looked for, within one limit."""
LONGEST_TICK = 1.0


class Deadlines:
    """`async with deadlines.limit():` raises TimeoutError like asyncio.timeout, up to a twentieth of the limit later.

    A thousand episodes begin to wait for a reply in every step of a rollout, and nearly none of them waits too long:
    one timer that looks at all of them costs less than one for each.

    Example:
        >>> async def wait(seconds):
        ...     async with Deadlines(0.02).limit():
        ...         await asyncio.sleep(seconds)
        >>> asyncio.run(wait(0))
        >>> asyncio.run(wait(5))
        Traceback (most recent call last):
        TimeoutError
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._waiting: dict[asyncio.Timeout, float] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        """The loop with the timer, None while there is none."""

    def limit(self) -> "_Limit":
        return _Limit(self)

    def begin(self) -> asyncio.Timeout:
        loop = asyncio.get_running_loop()
        timeout = asyncio.timeout(None)
        self._waiting[timeout] = loop.time()
        if self._loop is not loop:
            self._loop = loop
            self._arm(loop)
        return timeout

    def end(self, timeout: asyncio.Timeout) -> None:
        self._waiting.pop(timeout, None)

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.call_later(min(self._seconds / TICKS, LONGEST_TICK), self._tick, loop)

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._loop is not loop:  # another loop waits now; what waited here went with it
            return
        now = loop.time()
        for timeout, since in list(self._waiting.items()):
            if now - since < self._seconds:
                break  # the others began later
            del self._waiting[timeout]
            timeout.reschedule(now)
        if self._waiting:
            self._arm(loop)
        else:
            self._loop = None


class _Limit:
    def __init__(self, deadlines: Deadlines) -> None:
        self._deadlines = deadlines

    async def __aenter__(self) -> None:
        self._timeout = self._deadlines.begin()
        await self._timeout.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._deadlines.end(self._timeout)
        await self._timeout.__aexit__(kind, error, trace)
