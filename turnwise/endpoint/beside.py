"""The trainer's side of the endpoint, which runs in a process of its own
(turnwise/endpoint/process.py): reading HTTP takes several times as long as everything else that a
rollout does for a turn, and would hold up the generator."""

import itertools
import logging
import secrets
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from turnwise.envs.base import EnvError
from turnwise.envs.wire import decode, encode
from turnwise.isolation.processes import WorkerLostError
from turnwise.procs.channel import receive_frame, send_frame, start_beside
from turnwise.serve.http import listen
from turnwise.types import Json

logger = logging.getLogger(__name__)
T = TypeVar("T")


class EndpointProcess:
    """The endpoint in a process that ends with this one. One that dies loses its episodes; another
    takes its place, at the same address.

    Args:
        host, port: where it listens. Beyond this machine a token for workers must be given.
        token: what workers must carry. None: one that only this process and what it starts know.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0, token: str | None = None) -> None:
        self._listener, self.url = listen(host, port, token=token)
        self.work_token = token or secrets.token_urlsafe(24)
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._channel: socket.socket | None = None
        self._waiting: dict[int, tuple[Future[Any], Callable[[Json], Any]]] = {}

    def call(self, op: str, env: int, read: Callable[[Json], T], **fields: Json) -> Future[T]:
        """The endpoint's answer to a request for an environment, converted by `read`."""
        future: Future[T] = Future()
        with self._lock:
            if self._channel is None:
                self._channel = self._start()
            number = next(self._numbers)
            self._waiting[number] = future, read
            # If it has died, `_listen` tells those who wait.
            send_frame(self._channel, encode({"id": number, "op": op, "env": env, **fields}))
        return future

    def _start(self) -> socket.socket:
        self._process, channel = start_beside(
            "turnwise.endpoint.process", str(self._listener.fileno()), sockets=[self._listener]
        )
        send_frame(channel, self.work_token.encode())
        threading.Thread(
            target=self._listen, args=(channel,), name="turnwise-endpoint", daemon=True
        ).start()
        return channel

    def _listen(self, channel: socket.socket) -> None:
        try:
            with channel:
                while (data := receive_frame(channel)) is not None:
                    answer = decode(data)
                    with self._lock:
                        future, read = self._waiting.pop(answer["id"])
                    if future.set_running_or_notify_cancel():
                        _settle(future, read, answer)
        finally:  # no answer can come any more: fail all pending requests
            with self._lock:
                self._channel = None
                waiting, self._waiting = self._waiting, {}
            for future, _ in waiting.values():
                if future.set_running_or_notify_cancel():
                    future.set_exception(WorkerLostError("the process of the endpoint died"))


def _settle(future: Future[Any], read: Callable[[Json], Any], answer: dict[str, Json]) -> None:
    if "ok" in answer:
        try:
            future.set_result(read(answer["ok"]))
        except Exception as error:  # those who wait for it are told
            future.set_exception(error)
        return
    kind = WorkerLostError if answer["lost"] else EnvError
    future.set_exception(kind(answer["error"]))


_shared: dict[tuple[str, int], EndpointProcess] = {}
_sharing = threading.Lock()


def shared_endpoint(
    host: str = "127.0.0.1", port: int = 0, token: str | None = None
) -> EndpointProcess:
    """The endpoint of this process at this address, started when it is first wanted."""
    with _sharing:
        if (host, port) not in _shared:
            _shared[host, port] = EndpointProcess(host, port, token)
        return _shared[host, port]
