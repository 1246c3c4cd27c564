"""The sessions of a served environment: who holds one, what it was last told, and when it is given up."""

import asyncio
import logging
import threading
import time
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from turnwise.config.schema import EnvConfig, RolloutConfig
from turnwise.envs.base import EnvError, EnvTimeoutError
from turnwise.envs.registry import make_env
from turnwise.envs.wire import observation_to_json, result_to_json
from turnwise.isolation.pools import EnvHandle, open_pool
from turnwise.types import Json, Message, Task

logger = logging.getLogger(__name__)
T = TypeVar("T")
MAX_NAME = 64


class ServeError(Exception):
    """A request that cannot be answered as asked: an HTTP status, a kind that clients tell apart, and a message."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status, self.kind = status, kind


@dataclass(slots=True)
class _Session:
    handle: EnvHandle
    seen: float
    """When the client last showed a sign of life."""
    busy: int = 0
    """Calls under way."""
    call: int = 0
    """Number of the last call, and what it came to: a client that heard no answer asks again."""
    answer: dict[str, Json] = field(default_factory=dict[str, Json])
    error: ServeError | None = None
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


class Sessions:
    """The sessions of one environment, on an event loop in a thread of its own.

    A session without a sign of life for `idle_timeout` seconds is closed and its place given to the next. Environments
    run where `rollout.isolation` says; one that hangs is killed with its worker after `rollout.step_timeout`.
    """

    def __init__(
        self, env: EnvConfig, rollout: RolloutConfig, *, max_sessions: int = 64, idle_timeout: float = 60.0
    ) -> None:
        self.max_sessions, self.idle_timeout = max_sessions, idle_timeout
        self.ended_idle = 0
        """Sessions that were given up because their client was gone."""
        self._limit = rollout.reset_timeout + 120.0
        self._probe = make_env(env)
        self.name = env.name
        self._pool = open_pool({"env": env}, rollout)
        self._sessions: dict[str, _Session] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="turnwise-sessions", daemon=True)
        self._thread.start()
        self._reaper = asyncio.run_coroutine_threadsafe(self._reap(), self._loop)

    def spec(self) -> dict[str, Json]:
        return {"name": self.name, "max_turns": self._probe.max_turns, "max_sessions": self.max_sessions}

    def health(self) -> dict[str, Json]:
        return {
            "name": self.name,
            "sessions": len(self._sessions),
            "max_sessions": self.max_sessions,
            "ended_idle": self.ended_idle,
        }

    def task(self, seed: int, split: str) -> dict[str, Json]:
        """The task of a seed. Asked of one environment, one request at a time."""

        async def ask() -> dict[str, Json]:
            return self._probe.make_task(seed, split).to_json()

        return self._run(ask())

    def open(self, name: str) -> dict[str, Json]:
        """Opens a session under the client's name for it. Asking twice gives the same session."""
        if not (name.isalnum() and name.isascii() and len(name) <= MAX_NAME):
            raise ServeError(400, "bad_request", f"a session's name has up to {MAX_NAME} letters and digits")

        async def run() -> dict[str, Json]:
            if name not in self._sessions:
                if len(self._sessions) >= self.max_sessions:
                    raise ServeError(503, "full", f"all {self.max_sessions} sessions are taken; try later")
                self._sessions[name] = _Session(handle=self._pool.open("env"), seen=time.monotonic())
            return {"session": name, "idle_timeout": self.idle_timeout}

        return self._run(run())

    def call(self, name: str, what: str, body: Mapping[str, Json]) -> dict[str, Json]:
        """The answer to a numbered reset, step or finish. The last number again gives the last answer again."""
        number = body.get("call")
        if not isinstance(number, int):
            raise ServeError(400, "bad_request", f"{what} needs the number of the call, got {number!r}")
        return self._run(self._call(name, what, body, number))

    def heartbeat(self, name: str) -> dict[str, Json]:
        async def run() -> dict[str, Json]:
            self._find(name).seen = time.monotonic()
            return {"session": name}

        return self._run(run())

    def close_session(self, name: str) -> dict[str, Json]:
        """Ends a session. Ending an unknown one is no error."""

        async def run() -> dict[str, Json]:
            await self._end(name)
            return {"session": name}

        return self._run(run())

    def close(self) -> None:
        """Ends all sessions, and every worker process with them."""

        async def run() -> None:
            self._reaper.cancel()
            for name in list(self._sessions):
                try:
                    await self._end(name)
                except ServeError as error:
                    logger.warning("session %s: %s", name, error)
            await self._pool.close()

        self._run(run())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5.0)
        self._probe.close()

    async def _call(self, name: str, what: str, body: Mapping[str, Json], number: int) -> dict[str, Json]:
        session = self._find(name)
        session.busy += 1
        try:
            async with session.turn:
                if number == session.call:
                    if session.error is not None:
                        raise session.error
                    return session.answer
                if number != session.call + 1:
                    raise ServeError(409, "bad_request", f"call {number} does not follow call {session.call}")
                session.call, session.error = number, None
                try:
                    session.answer = await self._play(session.handle, what, body)
                except ServeError as error:
                    session.error = error
                    raise
                return session.answer
        finally:
            session.busy -= 1
            session.seen = time.monotonic()

    async def _play(self, handle: EnvHandle, what: str, body: Mapping[str, Json]) -> dict[str, Json]:
        try:
            match what:
                case "reset":
                    task = Task.from_json(body["task"])
                    return observation_to_json(await handle.reset(task, int(body.get("noise_seed", 0))))
                case "step":
                    return result_to_json(await handle.step(Message.from_json(body["message"])))
                case "finish":
                    return result_to_json(await handle.finish())
                case _:
                    raise ServeError(404, "bad_request", f"there is no request {what!r}")
        except ServeError:
            raise
        except EnvTimeoutError as error:
            raise ServeError(504, "env_timeout", str(error)) from error
        except EnvError as error:
            raise ServeError(422, "env_error", str(error)) from error
        except Exception as error:  # the boundary of the session: a failure is the episode's, not the server's
            raise ServeError(422, "env_error", f"{type(error).__name__}: {error}") from error

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, self.idle_timeout / 4))
            oldest = time.monotonic() - self.idle_timeout
            for name in [n for n, s in self._sessions.items() if not s.busy and s.seen < oldest]:
                self.ended_idle += 1
                try:
                    await self._end(name)
                except ServeError as error:  # its place is free in any case
                    logger.warning("session %s was idle for too long: %s", name, error)

    async def _end(self, name: str) -> None:
        session = self._sessions.pop(name, None)
        if session is None:
            return
        try:
            await session.handle.close()
        except Exception as error:
            raise ServeError(422, "env_error", f"closing failed: {type(error).__name__}: {error}") from error

    def _find(self, name: str) -> _Session:
        session = self._sessions.get(name)
        if session is None:
            raise ServeError(
                410, "gone", f"there is no session {name[:MAX_NAME]!r}: it was closed, or idle for too long"
            )
        session.seen = time.monotonic()
        return session

    def _run(self, job: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(job, self._loop).result(self._limit)
