"""A function in a process of its own that can be killed: for calls that may hang, hold the
interpreter or eat memory.

A thread cannot be stopped and a signal needs the main thread; a process can always be killed. It is
started once, serves one call after the other over pipes (a line of JSON each way) and is replaced
when it had to be killed.
"""

import atexit
import importlib
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, cast

from turnwise.procs.channel import child_command, stop
from turnwise.procs.forks import end_fork

MAX_REPLY_BYTES = 16 * 1024 * 1024
START_SECONDS = 120.0
STALLED_SECONDS = 300.0
"""On the wall, after which a process that has not used its seconds of computing is no longer waited
for."""


class WorkerError(RuntimeError):
    """The function raised, or its process died."""


class Worker:
    """One process that serves calls of `module:function`. Safe to use from many threads; calls take
    turns.

    Example:
        >>> worker = Worker("operator:add")
        >>> worker.call(20, 22, timeout=30)
        42
        >>> worker.close()
    """

    def __init__(self, target: str, *, memory_mb: int | None = None) -> None:
        self.target = target
        self.memory_mb = memory_mb
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._pid = os.getpid()
        _all_workers.add(self)

    def call(self, *args: Any, timeout: float, keywords: Mapping[str, Any] | None = None) -> Any:
        """The result of the function; arguments and result are JSON.

        Raises:
            TimeoutError: it took longer than `timeout` seconds; the process was killed.
            WorkerError: it raised (the message says what), or its process died.
        """
        request = json.dumps({"args": args, "kwargs": dict(keywords or {})}).encode() + b"\n"
        with self._lock:
            process = self._started()
            reply = self._exchange(process, request, timeout)
        if "error" in reply:
            raise WorkerError(reply["error"])
        return reply["result"]

    def close(self) -> None:
        """Ends the process. The next call starts another."""
        with self._lock:
            self.kill()

    def kill(self) -> None:
        """Ends the process and whatever it started, without waiting for a call that is under
        way."""
        process, self._process = self._process, None
        if process is None or self._pid != os.getpid():
            return
        stop(process)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()

    def _started(self) -> subprocess.Popen[bytes]:
        if (
            self._pid != os.getpid()
        ):  # a fork took the object along, but the process belongs to the parent
            self._process, self._pid = None, os.getpid()
        if self._process is None or self._process.poll() is not None:
            self.kill()
            self._process = subprocess.Popen(
                child_command("turnwise.envs.tools.worker", self.target, str(self.memory_mb or 0)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                process_group=0,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                },
            )
            ready = self._exchange(self._process, b"", START_SECONDS)
            if "error" in ready:
                self.kill()
                raise WorkerError(f"{self.target} cannot be served: {ready['error']}")
        return self._process

    def _exchange(
        self, process: subprocess.Popen[bytes], request: bytes, timeout: float
    ) -> dict[str, Any]:
        assert process.stdin is not None
        assert process.stdout is not None
        deadline = time.monotonic() + timeout
        try:
            process.stdin.write(request)
            process.stdin.flush()
        except BrokenPipeError:
            self.kill()
            raise WorkerError(f"the process of {self.target} died") from None
        reply = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while not reply.endswith(b"\n"):
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    self.kill()
                    raise TimeoutError(f"{self.target} took longer than {timeout:g} seconds")
                chunk = os.read(process.stdout.fileno(), 1 << 16)
                reply += chunk
                if not chunk or len(reply) > MAX_REPLY_BYTES:
                    self.kill()
                    why = (
                        "died (out of memory, perhaps)"
                        if not chunk
                        else f"answered more than {MAX_REPLY_BYTES} bytes"
                    )
                    raise WorkerError(f"the process of {self.target} {why}")
        return cast(dict[str, Any], json.loads(reply))


_all_workers: weakref.WeakSet[Worker] = weakref.WeakSet()


@atexit.register
def _kill_all() -> None:
    for worker in list(_all_workers):
        worker.kill()


def load_target(target: str) -> Callable[..., Any]:
    """The function that module:function names.

    Example:
        >>> load_target("operator:add")(1, 2)
        3
    """
    module, _, path = target.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


@contextmanager
def computing_limit(seconds: float) -> Generator[None]:
    """Ends this process after so many seconds of computing inside the context. The clock on the
    wall would make right answers wrong on a busy machine."""
    signal.setitimer(signal.ITIMER_PROF, max(seconds, 0.01))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _limit(which: int, value: int) -> None:
    import resource

    hard = resource.getrlimit(which)[1]
    resource.setrlimit(which, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def main(arguments: list[str]) -> None:
    """The child's life: announces itself, then answers lines until its input ends."""
    import resource

    target, memory_mb, pid = arguments[0], int(arguments[1]), os.getpid()
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what the function prints is not an answer

    def send(reply: dict[str, Any]) -> None:
        out.write(json.dumps(reply).encode() + b"\n")
        out.flush()

    try:
        function = load_target(target)
    except Exception as error:
        send({"error": f"{type(error).__name__}: {error}"})
        return
    if memory_mb:
        _limit(resource.RLIMIT_AS, memory_mb << 20)
    send({"result": "ready"})
    for line in sys.stdin.buffer:
        request = json.loads(line)
        try:
            try:
                result = function(*request["args"], **request["kwargs"])
            finally:
                end_fork(pid, target)
            send({"result": result})
        except Exception as error:
            send({"error": f"{type(error).__name__}: {error}"})
