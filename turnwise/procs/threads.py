"""Threads for calls that may hang: one that does is left behind, and another takes its place."""

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

T = TypeVar("T")
_Job = tuple["Future[Any]", Callable[[], Any]]


class DaemonThreads(Executor):
    """A pool of threads that never keeps the process from ending, as those of concurrent.futures do when one hangs.

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
        """Starts a thread in the place of the one that hangs in this job, which ends by itself if it ever returns."""
        self._given_up.add(future)
        self._start()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Lets the threads end. None is waited for."""
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
