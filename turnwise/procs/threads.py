"""Threads for calls that may hang: a hanging thread is abandoned and replaced."""

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

T = TypeVar("T")
_Job = tuple["Future[Any]", Callable[[], Any]]


class DaemonThreads(Executor):
    """A pool of daemon threads. Unlike concurrent.futures, a hanging thread does not keep the
    process alive.

    Example:
        >>> pool = DaemonThreads(2, "example")
        >>> pool.submit(max, 3, 4).result()
        4
        >>> pool.shutdown()
    """

    def __init__(self, count: int, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._given_up: weakref.WeakSet[Future[Any]] = weakref.WeakSet()
        self._count = count
        for _ in range(count):
            self._start()

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> "Future[T]":
        future: Future[T] = Future()
        self._jobs.put((future, lambda: fn(*args, **kwargs)))
        return future

    def replace(self, future: "Future[Any]") -> None:
        """Replaces the thread that hangs in this job. The old thread ends when the job returns."""
        self._given_up.add(future)
        self._start()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Shuts the pool down without waiting for its threads."""
        while cancel_futures:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                break
            if job is not None:
                job[0].cancel()
        for _ in range(self._count):
            self._jobs.put(None)

    def _start(self) -> None:
        threading.Thread(target=self._run, name=self._name, daemon=True).start()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, function = job
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except BaseException as error:
                    future.set_exception(error)
            if future in self._given_up:
                return
            del job, future, function


class SideThread:
    """Runs calls one at a time in a thread while the caller waits, up to a limit: as quick as a
    call can be that can be given up (two locks, no queue).

    Example:
        >>> SideThread("example").call(lambda: 3 + 4, 5.0)
        7
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._line: _Line | None = None

    def call(self, function: Callable[[], T], limit: float) -> T:
        """The result of the function, or its exception.

        Raises:
            TimeoutError: it was not over after `limit` seconds. Its thread is left behind.
        """
        line = self._line or _Line(self._name)
        self._line = None  # whatever ends the wait early, this thread may still be busy
        line.job = function
        line.begin.release()
        if not line.end.acquire(timeout=limit):
            raise TimeoutError
        self._line = line
        result, error, line.result, line.error = line.result, line.error, None, None
        if error is not None:
            raise error
        return result

    def close(self) -> None:
        """Ends the thread. A later call starts another."""
        line, self._line = self._line, None
        if line is not None:
            line.begin.release()


class _Line:
    """A thread and what it is given."""

    def __init__(self, name: str) -> None:
        self.begin, self.end = threading.Lock(), threading.Lock()
        self.begin.acquire()
        self.end.acquire()
        self.job: Callable[[], Any] | None = None
        self.result: Any = None
        self.error: BaseException | None = None
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def _run(self) -> None:
        while True:
            self.begin.acquire()
            job, self.job = self.job, None
            if job is None:
                return
            try:
                self.result = job()
            except BaseException as error:
                self.error = error
            del job
            self.end.release()
