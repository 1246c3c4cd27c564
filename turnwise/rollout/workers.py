"""Where environments run: inline, in threads, or in worker processes that can be killed."""

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping
from random import Random
from typing import Protocol, TypeVar

from turnwise.config.schema import EnvConfig, Isolation, RolloutConfig
from turnwise.envs.adapt import TextTurns
from turnwise.envs.base import Env, EnvError, EnvTimeoutError
from turnwise.envs.registry import find_env, make_env
from turnwise.envs.remote import RemoteEnv, ServerFullError
from turnwise.rollout.plan import EnvFactory
from turnwise.rollout.processes import ProcessPool, WorkerLostError
from turnwise.rollout.threads import DaemonThreads
from turnwise.types import Json, Message, Observation, StepResult, Task

__all__ = [
    "EnvHandle",
    "EnvPool",
    "EnvTimeoutError",
    "LocalPool",
    "ProcessPool",
    "WorkerLostError",
    "measure_step_seconds",
    "open_pool",
]
logger = logging.getLogger(__name__)
T = TypeVar("T")
FULL_PAUSE = 0.25
"""Seconds between two tries to get a session of a server that is full."""


class EnvHandle(Protocol):
    """An environment, wherever it runs."""

    async def reset(self, task: Task, noise_seed: int) -> Observation: ...
    async def step(self, message: Message) -> StepResult: ...
    async def finish(self) -> StepResult: ...
    async def close(self) -> None: ...


class EnvPool(Protocol):
    """Opens environments and owns what they run in."""

    def open(self, tag: str) -> EnvHandle: ...
    def expect_together(self, count: int) -> None:
        """Says that `count` environments will be open at once, none of them waiting for another's end."""
        ...

    def facts(self) -> dict[str, Json]:
        """Where the environments run, what was measured of them, and what happened to worker processes."""
        ...

    async def close(self) -> None: ...


class _LocalHandle:
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
            except ServerFullError as error:  # others play there, and an episode of ours may be one of them
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

    async def close(self) -> None:
        env, self._env = self._env, None
        if isinstance(env, RemoteEnv):  # its session is wanted by others
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

    def open(self, tag: str) -> EnvHandle:
        return _LocalHandle(tag, self)

    def expect_together(self, count: int) -> None:
        """Remembered for environments that are served elsewhere; here there is room for any number."""
        self._together = count

    def facts(self) -> dict[str, Json]:
        return {"isolation": "thread" if self._threads else "inline", "ms_per_call": self.measured}

    def take(self, tag: str) -> Env:
        """An environment that nobody uses, or a new one."""
        idle = self._idle.get(tag)
        env = idle.pop() if idle else self._factories[tag]()
        if isinstance(env, RemoteEnv):
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


CHEAP_STEP_SECONDS = 0.002
MEASURED_STEPS = 5


def measure_step_seconds(factory: EnvFactory) -> float:
    """Seconds that a reset and a few steps take on average, measured on an environment of their own.

    A first episode warms up, because imports and loaded files are paid once and not in every step.
    """
    env = factory()
    try:
        return [_play_a_little(env, seed) for seed in range(2)][-1]
    finally:
        env.close()


def _play_a_little(env: Env, seed: int) -> float:
    rng = Random(seed)
    started = time.perf_counter()
    env.reset(env.make_task(seed, "train"), 0)
    calls = 1
    for _ in range(MEASURED_STEPS):
        reply = env.random_reply(rng) if isinstance(env, TextTurns) else "nothing"
        calls += 1
        if env.step(Message(role="assistant", content=reply)).done:
            break
    return (time.perf_counter() - started) / calls


def _measure(factory: EnvFactory, *, limit: float) -> tuple[float, bool]:
    """(seconds per call, whether the environment only talks to another machine). Infinite where it hangs."""
    found: list[tuple[float, bool] | Exception] = []

    def run() -> None:
        try:
            probe = factory()
            probe.close()
            found.append((measure_step_seconds(factory), isinstance(probe, RemoteEnv)))
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run, name="turnwise-measure", daemon=True)
    thread.start()
    thread.join(limit)
    if not found:
        return float("inf"), False
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


def choose_isolation(
    factories: Mapping[str, EnvFactory], config: RolloutConfig, *, objects: bool
) -> tuple[Isolation, dict[str, float]]:
    """(where these environments should run, milliseconds per call of each), by measurement: inline where every one of
    them is cheap, else in worker processes; in threads where they are objects, which cannot move, or wait for another
    machine."""
    kind: Isolation = "inline"
    measured: dict[str, float] = {}
    for tag, factory in factories.items():
        try:
            seconds, remote = _measure(factory, limit=config.reset_timeout + MEASURED_STEPS * config.step_timeout)
        except Exception as error:  # an environment that fails here fails in its episode, where it is counted
            logger.warning("could not measure %s: %s: %s", tag, type(error).__name__, error)
            continue
        measured[tag] = seconds * 1e3
        if seconds > CHEAP_STEP_SECONDS and kind != "process":
            kind = "thread" if objects or remote else "process"
    shown = ", ".join(f"{tag} {ms:.2f} ms" for tag, ms in measured.items())
    logger.info("environments run in isolation %s, measured per call: %s", kind, shown or "nothing")
    return kind, measured


def open_pool(
    configs: Mapping[str, EnvConfig], config: RolloutConfig, *, factories: Mapping[str, EnvFactory] | None = None
) -> EnvPool:
    """The pool that `rollout.isolation` asks for. `auto` measures: cheap environments stay inline.

    Args:
        factories: environments given as objects rather than by name. They cannot move to another process.
    """
    given = dict(factories or {})
    if config.isolation == "process" and given:
        raise ValueError(
            f"environments given as objects ({', '.join(given)}) cannot run in worker processes; register them by "
            "name, or set rollout.isolation to thread or inline"
        )
    served = [tag for tag, env in configs.items() if tag not in given and find_env(env.name).name.startswith("remote")]
    if config.isolation == "process" and served:
        raise ValueError(
            f"{', '.join(served)} runs in another process already; set rollout.isolation to auto or thread"
        )
    local = {tag: given.get(tag) or _factory(env) for tag, env in configs.items()}
    kind, measured = config.isolation, dict[str, float]()
    if kind == "auto":
        kind, measured = choose_isolation(local, config, objects=bool(given))
    if kind == "process":
        pool = ProcessPool(configs, config)
    else:
        pool = LocalPool(local, config, threads=config.num_workers if kind == "thread" else 0)
    pool.measured = measured
    return pool


def _factory(config: EnvConfig) -> EnvFactory:
    return lambda: make_env(config)
