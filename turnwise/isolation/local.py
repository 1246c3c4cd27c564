"""Environments in this process: inline, or in threads with a time limit."""

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping
from typing import TypeVar

from turnwise.config.schema import RolloutConfig
from turnwise.envs.base import Env, EnvBusyError, EnvError, EnvFactory, EnvTimeoutError, Hint, SharedEnv, hint_of
from turnwise.procs.threads import DaemonThreads
from turnwise.types import Json, Message, Observation, StepResult, Task

logger = logging.getLogger(__name__)
T = TypeVar("T")
FULL_PAUSE = 0.25
"""Seconds between two tries to get a place in a shared environment that is full."""


class LocalHandle:
    """An environment in this process. `call` decides whether its methods run inline or in a thread."""

    def __init__(self, tag: str, pool: "LocalPool") -> None:
        self._tag = tag
        self._pool = pool
        self._env: Env | None = None
        self._sound = True

    async def reset(self, task: Task, noise_seed: int) -> Observation:
        def run() -> Observation:
            if self._env is None:
                self._env = self._pool.take(self._tag)
            return self._env.reset(task, noise_seed)

        limit = self._pool.config.reset_timeout
        waited = 0.0
        while True:
            try:
                return await self._pool.call(run, limit, "reset")
            except EnvBusyError as error:  # others play there, and an episode of ours may be one of them
                if waited % 60.0 < FULL_PAUSE:
                    logger.info("%s; waiting for a place", error)
                waited += FULL_PAUSE
                await asyncio.sleep(FULL_PAUSE)
            except BaseException:
                self._sound = False
                raise

    async def step(self, message: Message) -> StepResult:
        env = self._live()
        return await self._call(lambda: env.step(message), self._pool.config.step_timeout, "step")

    async def finish(self) -> StepResult:
        env = self._live()
        return await self._call(env.finish, self._pool.config.step_timeout, "finish")

    async def hint(self, what: Hint, seed: int) -> Json:
        env = self._live()
        return await self._call(lambda: hint_of(env, what, seed), self._pool.config.step_timeout, f"hint {what!r}")

    @property
    def env(self) -> Env | None:
        """The environment itself, once it was reset."""
        return self._env

    async def close(self) -> None:
        env, self._env = self._env, None
        if isinstance(env, SharedEnv):  # its session is wanted by others
            await self._pool.call(env.close, self._pool.config.step_timeout, "close")
        if env is not None and self._sound:
            self._pool.give_back(self._tag, env)
        elif env is not None:
            await self._pool.call(env.close, self._pool.config.step_timeout, "close")

    async def _call(self, function: Callable[[], T], limit: float, what: str) -> T:
        try:
            return await self._pool.call(function, limit, what)
        except BaseException:
            self._sound = False
            raise

    def _live(self) -> Env:
        if self._env is None:
            raise EnvError("the environment was stepped before its reset")
        return self._env


class LocalPool:
    """Environments in this process: inline (cheap ones), or in threads with a time limit.

    A call that hangs inline cannot be stopped, and one that hangs in a thread leaves the thread behind until it
    returns; worker processes can be killed.
    """

    def __init__(self, factories: Mapping[str, EnvFactory], config: RolloutConfig, *, threads: int = 0) -> None:
        self.config = config
        self.measured: dict[str, float] = {}
        self._factories = factories
        self._threads = threads
        self._executor = DaemonThreads(threads, "turnwise-env") if threads else None
        self._idle: dict[str, list[Env]] = {}
        self._together = 0

    def open(self, tag: str) -> LocalHandle:
        return LocalHandle(tag, self)

    def expect_together(self, count: int) -> None:
        """Remembered for environments that are served elsewhere; here there is room for any number."""
        self._together = count

    def facts(self) -> dict[str, Json]:
        return {"isolation": "thread" if self._threads else "inline", "ms_per_call": self.measured}

    def take(self, tag: str) -> Env:
        """An environment that nobody uses, or a new one."""
        idle = self._idle.get(tag)
        env = idle.pop() if idle else self._factories[tag]()
        if isinstance(env, SharedEnv):
            env.wait = 0.0  # the handle waits for a place itself, without holding a thread
            if env.max_sessions < self._together:
                raise EnvError(
                    f"a rollout in lockstep holds its {self._together} environments at once, and {env.url} has "
                    f"{env.max_sessions} sessions; raise its --max-sessions"
                )
        return env

    def give_back(self, tag: str, env: Env) -> None:
        """Keeps an environment whose episode went well for the next one. One that failed is never used again."""
        self._idle.setdefault(tag, []).append(env)

    async def call(self, function: Callable[[], T], limit: float, what: str) -> T:
        if self._executor is None:
            return function()
        loop = asyncio.get_running_loop()
        started = loop.create_future()

        def run() -> T:
            loop.call_soon_threadsafe(_set, started)
            return function()

        job = self._executor.submit(run)
        answer = asyncio.wrap_future(job)
        await started  # the limit counts from when a thread is free
        await asyncio.wait((answer,), timeout=limit)
        if answer.done():
            return answer.result()
        self._executor.replace(job)
        answer.cancel()
        raise EnvTimeoutError(f"{what} took longer than {limit:g} s")

    async def close(self) -> None:
        for env in itertools.chain.from_iterable(self._idle.values()):
            env.close()
        self._idle = {}
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)


def _set(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)
