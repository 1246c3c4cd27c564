# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
"""An environment on another machine: the client of `turnwise serve-env`. JSON over HTTP, standard
library only."""

import contextlib
import http.client
import logging
import os
import socket
import threading
import time
import uuid
import weakref
from collections.abc import Mapping
from typing import cast
from urllib.parse import urlsplit

from turnwise.envs.base import EnvBusyError, EnvError, EnvTimeoutError
from turnwise.envs.gate import brief, read_reward, read_text, words
from turnwise.envs.wire import (
    decode,
    encode,
    observation_from_json,
    result_from_json,
    task_from_json,
)
from turnwise.procs.answers import LongAnswerError, read_body
from turnwise.types import Json, Message, Observation, StepResult, Task

logger = logging.getLogger(__name__)
TOKEN_VARIABLE = "TURNWISE_TOKEN"
VERSION = "v1"
MAX_ANSWER = 128 << 20
"""Maximum bytes of an answer. The gate allows environments less text than this."""
PAUSES = (0.05, 0.2, 0.5, 1.0, 2.0)
"""Seconds between attempts of a request whose connection failed."""


class RemoteEnv:
    """An environment served by `turnwise serve-env`, with the interface of a local one.

    Every call has a number and the server keeps its last answer, so a call that is repeated after a
    broken connection is executed once. A thread per server sends the heartbeats of all sessions
    there. A session ends with `close`, or when its heartbeats stop because the process or the
    object is gone.

    Args:
        url: the server's address, such as http://10.0.0.7:8765.
        timeout: seconds for one request; longer than the server's own limits for a reset or a step.
        wait: seconds to wait for a session if the server is full.
        token: the server's token. None: the environment variable TURNWISE_TOKEN.
    """

    def __init__(
        self, url: str, *, timeout: float = 120.0, wait: float = 60.0, token: str | None = None
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(
                f"a remote environment has a url such as http://host:8765, got {url!r}"
            )
        self.url = url.rstrip("/")
        self._timeout, self.wait = timeout, wait
        self._token = os.environ.get(TOKEN_VARIABLE) if token is None else token
        self._lock = threading.Lock()
        self._connection: http.client.HTTPConnection | None = None
        self._session: str | None = None
        self._calls = 0
        self._beaten = 0.0
        self.idle_timeout = 0.0
        spec = self._request("GET", "spec")
        self.name = read_text(spec.get("name"), what=f"{self.url}: the environment's name")
        self.max_sessions = _count(spec.get("max_sessions"), what=f"{self.url}: max_sessions")
        turns = spec.get("max_turns")
        self._max_turns = None if turns is None else _count(turns, what=f"{self.url}: max_turns")

    @property
    def max_turns(self) -> int | None:
        return self._max_turns

    def make_task(self, seed: int, split: str) -> Task:
        answer = self._request("POST", "task", {"seed": seed, "split": split})
        return task_from_json(answer, name=self.name)

    def reset(self, task: Task, noise_seed: int = 0) -> Observation:
        if self._session is None:
            self._open()
        return observation_from_json(
            self._call("reset", {"task": task.to_json(), "noise_seed": noise_seed}), name=self.name
        )

    def step(self, message: Message) -> StepResult:
        answer = self._call("step", {"message": message.to_json()})
        return result_from_json(answer, name=self.name)

    def finish(self) -> StepResult:
        return result_from_json(self._call("finish", {}), name=self.name)

    def close(self) -> None:
        self._give_up()
        with self._lock:
            self._drop_connection()

    def beat(self) -> bool:
        """Sends a heartbeat if one is due. False if the server could not be reached.

        Uses its own connection, so that a running call and the heartbeat do not block each other.
        """
        session = self._session
        if session is None or time.monotonic() - self._beaten < self.idle_timeout / 4:
            return True
        self._beaten = time.monotonic()
        try:
            with contextlib.closing(self._connect(timeout=min(5.0, self._timeout))) as connection:
                self._exchange(connection, "POST", f"sessions/{session}/heartbeat", {})
        except (OSError, http.client.HTTPException) as error:
            logger.debug("heartbeat to %s: %s", self.url, error)
            return False
        except EnvError as error:  # the session is gone; the next call will raise
            logger.debug("heartbeat to %s: %s", self.url, error)
        return True

    def _open(self) -> None:
        session = uuid.uuid4().hex
        opened = self._request("POST", f"sessions/{session}/open", {}, wait=self.wait)
        self._session, self._calls = session, 0
        self.idle_timeout = read_reward(
            opened.get("idle_timeout"), name=self.url, what="the idle_timeout"
        )
        self._beaten = time.monotonic()
        _hearts.add(self)

    def _give_up(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            _hearts.discard(self)
            try:
                self._request("POST", f"sessions/{session}/close", {}, tries=1)
            except EnvError as error:  # the server ends the session by itself
                logger.warning("could not close a session of %s: %s", self.url, error)

    def _call(self, what: str, body: Mapping[str, Json]) -> dict[str, Json]:
        if self._session is None:
            raise EnvError(f"{self.name}: {what} needs a running episode; call reset first")
        self._calls += 1
        try:
            return self._request(
                "POST", f"sessions/{self._session}/{what}", {**body, "call": self._calls}
            )
        except (SessionGoneError, ServerLostError, EnvTimeoutError):
            self._give_up()  # the next reset opens a new session
            raise

    def _request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Json] | None = None,
        *,
        tries: int = 0,
        wait: float = 0.0,
    ) -> dict[str, Json]:
        """The server's answer. Retries broken connections, and a full server for `wait` seconds."""
        deadline = time.monotonic() + wait
        tries = tries or len(PAUSES) + 1
        with self._lock:
            attempt = 0
            while True:
                attempt += 1
                try:
                    if self._connection is None:
                        self._connection = self._connect(timeout=self._timeout)
                    answer = self._exchange(self._connection, method, path, body)
                    self._beaten = time.monotonic()
                    return answer
                except ServerFullError:
                    if time.monotonic() >= deadline:
                        raise
                    time.sleep(min(0.5, max(deadline - time.monotonic(), 0.01)))
                except TimeoutError:
                    self._drop_connection()
                    raise EnvTimeoutError(
                        f"{self.url}/{path}: no answer within {self._timeout:g} s"
                    ) from None
                except (OSError, http.client.HTTPException) as error:
                    self._drop_connection()
                    if attempt >= tries:
                        raise ServerLostError(
                            f"no answer from {self.url} after {attempt} tries "
                            f"({type(error).__name__}: {error}); is "
                            "`turnwise serve-env` running there?"
                        ) from error
                    time.sleep(PAUSES[min(attempt, len(PAUSES)) - 1])

    def _exchange(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        body: Mapping[str, Json] | None,
    ) -> dict[str, Json]:
        headers = {"Content-Type": "application/json"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        prefix = urlsplit(self.url).path
        connection.request(
            method, f"{prefix}/{VERSION}/{path}", None if body is None else encode(body), headers
        )
        response = connection.getresponse()
        deadline = time.monotonic() + cast(float, connection.timeout)
        try:
            answer = decode(read_body(response, limit=MAX_ANSWER, deadline=deadline))
        except LongAnswerError as error:
            connection.close()
            raise EnvError(f"{self.url} answered with {error}") from None
        except ValueError:
            raise EnvError(
                f"{self.url} answered {response.status} without a JSON object; is it "
                "`turnwise serve-env`?"
            ) from None
        if response.status == 200:
            return answer
        raise _error(response.status, answer, self.url)

    def _connect(self, *, timeout: float) -> http.client.HTTPConnection:
        parts = urlsplit(self.url)
        kind = (
            http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        )
        connection = kind(parts.hostname or "", parts.port, timeout=timeout)
        connection.connect()
        # A request is two small writes; Nagle's algorithm would delay the second by 40 ms.
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def _drop_connection(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class SessionGoneError(EnvError):
    """The server ended the session: heartbeats stopped for too long, or the server was
    restarted."""


class ServerLostError(EnvError):
    """The server cannot be reached."""


class ServerFullError(EnvBusyError):
    """The server has its maximum number of sessions."""


def _error(status: int, answer: Mapping[str, Json], url: str) -> EnvError:
    given = answer.get("error")
    problem = cast(Mapping[str, Json], given) if isinstance(given, dict) else {}
    kind, message = problem.get("kind"), words(problem.get("message") or brief(answer))
    kinds = {"env_timeout": EnvTimeoutError, "gone": SessionGoneError, "full": ServerFullError}
    return kinds.get(str(kind), EnvError)(
        message if kind == "env_error" else f"{url}: {message} (status {status})"
    )


def _count(value: Json, *, what: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise EnvError(f"{what} must be an integer of at least 1, got {brief(value)}")
    return value


class _Hearts:
    """One thread per server that sends the heartbeats of this process's sessions there, so that a
    server which answers slowly costs no other server's sessions. It ends with the last session, and
    keeps only weak references to them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[str, weakref.WeakSet[RemoteEnv]] = {}
        self._pid = 0

    def add(self, env: RemoteEnv) -> None:
        with self._lock:
            if self._pid != os.getpid():  # after a fork the threads are missing
                self._pid = os.getpid()
                self._open.clear()
            if env.url not in self._open:
                self._open[env.url] = weakref.WeakSet()
                threading.Thread(
                    target=self._run, args=(env.url,), name="turnwise-heartbeat", daemon=True
                ).start()
            self._open[env.url].add(env)

    def discard(self, env: RemoteEnv) -> None:
        with self._lock:
            if env.url in self._open:
                self._open[env.url].discard(env)

    def _run(self, url: str) -> None:
        while (pause := self._beat_all(url)) is not None:
            time.sleep(pause)

    def _beat_all(self, url: str) -> float | None:
        """Sends the heartbeats that are due to one server; returns the seconds until the next
        round, None if the server has no session left."""
        with self._lock:
            envs = list(self._open[url])
            if not envs:
                del self._open[url]
                return None
        for env in envs:
            if not env.beat():  # nor would the others reach it
                break
        return max(min([1.0, *(env.idle_timeout / 8 for env in envs)]), 0.02)


_hearts = _Hearts()
