"""The sessions of a served environment: their clients, last answers and timeouts."""

import asyncio
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from turnwise.config.schema import EnvConfig, RolloutConfig
from turnwise.envs.base import EnvError, EnvTimeoutError
from turnwise.envs.gate import admit_task, ask_within, words
from turnwise.envs.registry import make_env
from turnwise.envs.wire import observation_to_json, result_to_json
from turnwise.isolation.pools import EnvHandle, open_pool
from turnwise.procs.threads import DaemonThreads, SideThread
from turnwise.serve.http import ServeError
from turnwise.types import Json, Message, Task

logger = logging.getLogger(__name__)
MAX_NAME = 64
CALLS = ("reset", "step", "finish")


@dataclass(slots=True)
class _Session:
    handle: EnvHandle
    seen: float
    """Time of the client's last call or heartbeat."""
    busy: int = 0
    """Running calls."""
    call: int = 0
    """Number of the last call. Its answer or error is kept for a client that repeats the call."""
    answer: dict[str, Json] = field(default_factory=dict[str, Json])
    error: ServeError | None = None
    ended: bool = False
    """True after the session was closed. Its place is free once the running call has ended and the
    environment is closed."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


class Sessions:
    """The sessions of one environment. All methods run on the server's event loop.

    A session without a call or heartbeat for `idle_timeout` seconds is closed. Environments run as
    `rollout.isolation` says; one that hangs is killed with its worker after `rollout.step_timeout`.
    The workers' capacity limits the number of sessions.
    """

    def __init__(
        self,
        env: EnvConfig,
        rollout: RolloutConfig,
        *,
        max_sessions: int = 64,
        idle_timeout: float = 60.0,
    ) -> None:
        self.idle_timeout = idle_timeout
        self.ended_idle = 0
        """Sessions that were closed because they were idle."""
        self._limit = rollout.reset_timeout
        self._asks, self._beside = DaemonThreads(1, "turnwise-task"), SideThread("turnwise-probe")
        # Made where it makes tasks: what an environment opens may be bound to its thread.
        self._probe = self._beside.call(lambda: make_env(env), threading.TIMEOUT_MAX)
        self.name = env.name
        self._pool = open_pool({"env": env}, rollout)
        self.max_sessions = min(max_sessions, self._pool.places or max_sessions)
        self._sessions: dict[str, _Session] = {}
        self._reaper: asyncio.Task[None] | None = None

    def spec(self) -> dict[str, Json]:
        return {
            "name": self.name,
            "max_turns": self._probe.max_turns,
            "max_sessions": self.max_sessions,
        }

    def health(self) -> dict[str, Json]:
        return {
            "name": self.name,
            "sessions": len(self._sessions),
            "max_sessions": self.max_sessions,
            "ended_idle": self.ended_idle,
        }

    async def task(self, seed: int, split: str) -> dict[str, Json]:
        """The task of a seed. One environment answers, one request at a time."""

        def make() -> dict[str, Json]:
            return admit_task(self._probe.make_task(seed, split), name=self.name).to_json()

        what = f"{self.name}: make_task"
        job = self._asks.submit(ask_within, what, make, thread=self._beside, limit=self._limit)
        try:
            return await asyncio.wrap_future(job)
        except EnvTimeoutError as error:
            raise ServeError(504, "env_timeout", words(error)) from error
        except EnvError as error:
            raise ServeError(422, "env_error", words(error)) from error

    def open(self, name: str) -> dict[str, Json]:
        """Opens a session with the client's name for it. A repeated request gives the same
        session."""
        if not (name.isalnum() and name.isascii() and len(name) <= MAX_NAME):
            raise ServeError(
                400, "bad_request", f"a session's name must have 1 to {MAX_NAME} letters and digits"
            )
        if self._reaper is None:
            self._reaper = asyncio.create_task(self._reap())
        if name not in self._sessions:
            if len(self._sessions) >= self.max_sessions:
                raise ServeError(
                    503, "full", f"all {self.max_sessions} sessions are taken; try later"
                )
            self._sessions[name] = _Session(handle=self._pool.open("env"), seen=time.monotonic())
        return {"session": name, "idle_timeout": self.idle_timeout}

    async def call(self, name: str, what: str, body: Mapping[str, Json]) -> dict[str, Json]:
        """The answer to a numbered reset, step or finish. A repeated last number gives the last
        answer."""
        number = body.get("call")
        if what not in CALLS:
            raise ServeError(404, "bad_request", f"there is no request {what[:80]!r}")
        if not isinstance(number, int):
            raise ServeError(
                400, "bad_request", f"{what} needs the number of the call, got {number!r}"
            )
        session = self._find(name)
        session.busy += 1
        try:
            async with session.turn:
                self._find(name)  # the session may have been closed while this call waited
                if number == session.call:
                    if session.error is not None:
                        raise session.error
                    return session.answer
                if number != session.call + 1:
                    raise ServeError(
                        409, "bad_request", f"call {number} does not follow call {session.call}"
                    )
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

    def heartbeat(self, name: str) -> dict[str, Json]:
        self._find(name)
        return {"session": name}

    async def close_session(self, name: str) -> dict[str, Json]:
        """Closes a session. Closing an unknown one is not an error."""
        await self._end(name)
        return {"session": name}

    async def close(self) -> None:
        """Closes all sessions and their worker processes."""
        if self._reaper is not None:
            self._reaper.cancel()
        for name in list(self._sessions):
            try:
                await self._end(name)
            except ServeError as error:
                logger.warning("session %s: %s", name, error)
        await self._pool.close()
        self._asks.shutdown(cancel_futures=True)
        try:
            ask_within("close", self._probe.close, thread=self._beside, limit=self._limit)
        except EnvError as error:
            logger.warning("%s: %s", self.name, error)
        self._beside.close()

    async def _play(
        self, handle: EnvHandle, what: str, body: Mapping[str, Json]
    ) -> dict[str, Json]:
        try:
            match what:
                case "reset":
                    task = Task.from_json(body["task"])
                    return observation_to_json(
                        await handle.reset(task, int(body.get("noise_seed", 0)))
                    )
                case "step":
                    return result_to_json(await handle.step(Message.from_json(body["message"])))
                case _:
                    return result_to_json(await handle.finish())
        except EnvTimeoutError as error:
            raise ServeError(504, "env_timeout", str(error)) from error
        except EnvError as error:
            raise ServeError(422, "env_error", str(error)) from error
        except (
            Exception
        ) as error:  # the boundary of the session: a failure is the episode's, not the server's
            raise ServeError(422, "env_error", f"{type(error).__name__}: {error}") from error

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, self.idle_timeout / 4))
            oldest = time.monotonic() - self.idle_timeout
            idle = [n for n, s in self._sessions.items() if not s.busy and s.seen < oldest]
            for name in idle:
                self.ended_idle += 1
                try:
                    await self._end(name)
                except ServeError as error:  # its place is free anyway
                    logger.warning("session %s was idle for too long: %s", name, error)

    async def _end(self, name: str) -> None:
        session = self._sessions.get(name)
        if session is None or session.ended:
            return
        session.ended = True
        try:
            async with session.turn:  # an environment answers one call at a time
                await session.handle.close()
        except Exception as error:
            raise ServeError(
                422, "env_error", f"closing failed: {type(error).__name__}: {error}"
            ) from error
        finally:
            del self._sessions[name]

    def _find(self, name: str) -> _Session:
        session = self._sessions.get(name)
        if session is None or session.ended:
            raise ServeError(
                410,
                "gone",
                f"there is no session {name[:MAX_NAME]!r}: it was closed, or idle for too long",
            )
        session.seen = time.monotonic()
        return session
