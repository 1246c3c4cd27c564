"""Environments in this process: inline, or in threads with a time limit."""

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TypeVar, cast

from turnwise.config.schema import RolloutConfig
from turnwise.envs.base import (
    Cut,
    Env,
    EnvBusyError,
    EnvError,
    EnvFactory,
    EnvTimeoutError,
    Hint,
    WaitingEnv,
    hint_of,
    is_shared,
)
from turnwise.envs.gate import (
    admit_observation,
    admit_result,
    ask,
    ask_within,
    own_task,
    read_hint,
)
from turnwise.procs.deadlines import Deadlines
from turnwise.procs.threads import DaemonThreads, SideThread
from turnwise.types import Json, Message, Observation, StepResult, Task

logger = logging.getLogger(__name__)
T = TypeVar("T")
NAME = "turnwise-env"
FULL_PAUSE = 0.25
"""Seconds between two attempts to get a place in a shared environment that is full."""

MEND_PAUSE = 2.0
"""Seconds between two looks whether anybody is left who could play a task that waits."""


class LocalHandle:
    """An environment in this process. `call` decides whether its methods run inline or in a
    thread."""

    def __init__(self, tag: str, pool: "LocalPool") -> None:
        self._tag = tag
        self._pool = pool
        self._env: Env | None = None
        self._shared = False
        self._sound = True
        self._closed = False

    async def reset(self, task: Task, noise_seed: int) -> Observation:
        def run() -> Observation:
            if self._env is None:
                self._env = self._pool.take(self._tag)
            env = self._env
            self._shared = is_shared(env)
            if self._closed:  # it took too long to make
                env.close()
                raise EnvError("the environment was closed before it was made")
            return admit_observation(env.reset(own_task(task), noise_seed), name=self._tag)

        limit = self._pool.config.reset_timeout
        if self._tag in self._pool.waiting:
            env = self._env = self._env or self._pool.take(self._tag)
            await self._taken(cast(WaitingEnv, env), task, noise_seed)
            job = cast(WaitingEnv, env).submit_opening()
            return admit_observation(await self._wait(job, "reset"), name=self._tag)
        waited = 0.0
        while True:
            try:
                return await self._pool.call(run, limit, "reset")
            except EnvBusyError as error:  # other episodes use it, some perhaps of this rollout
                if self._env is None or not self._shared:
                    self._sound = False
                    raise
                self._pool.give_back(self._tag, self._env)  # it would hold a connection
                self._env = None
                if waited % 60.0 < FULL_PAUSE:
                    logger.info("%s; waiting for a place", error)
                waited += FULL_PAUSE
                await asyncio.sleep(FULL_PAUSE)
            except BaseException:
                self._sound = False
                raise

    async def step(self, message: Message, said: object = None) -> StepResult:
        env = self._live()
        if self._tag in self._pool.waiting:
            job = cast(WaitingEnv, env).submit_step(message, said)
            return admit_result(await self._wait(job, "step"), name=self._tag)
        return await self._call(
            lambda: admit_result(env.step(message), name=self._tag),
            self._pool.config.step_timeout,
            "step",
        )

    async def finish(self, why: Cut = "turns") -> StepResult:
        env = self._live()
        if self._tag in self._pool.waiting:
            job = cast(WaitingEnv, env).submit_finish(why)
            return admit_result(await self._wait(job, "finish"), name=self._tag)
        return await self._call(
            lambda: admit_result(env.finish(), name=self._tag),
            self._pool.config.step_timeout,
            "finish",
        )

    async def hint(self, what: Hint, seed: int) -> Json:
        env = self._live()
        return await self._call(
            lambda: read_hint(hint_of(env, what, seed), what=what),
            self._pool.config.step_timeout,
            f"hint {what!r}",
        )

    @property
    def env(self) -> Env | None:
        """The environment, after its first reset."""
        return self._env

    async def close(self) -> None:
        self._closed = True
        env, self._env = self._env, None
        if env is not None and self._tag in self._pool.waiting:
            await self._wait(cast(WaitingEnv, env).submit_end(), "close")
        if env is not None and self._shared:  # other episodes need its session
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

    async def _taken(self, env: WaitingEnv, task: Task, noise_seed: int) -> None:
        """Returns when somebody plays the task. The limit of a reset counts from then on."""
        job = asyncio.wrap_future(env.submit_reset(task, noise_seed))
        try:
            while not (await asyncio.wait({job}, timeout=MEND_PAUSE))[0]:
                env.mend()
            job.result()
        except BaseException:
            self._sound = False
            raise
        finally:
            job.cancel()

    async def _wait(self, job: Future[T], what: str) -> T:
        """The job's result, awaited without a thread."""
        pool = self._pool
        resets = what == "reset"
        limit = pool.config.reset_timeout if resets else pool.config.step_timeout
        try:
            deadlines = pool.reset_deadlines if resets else pool.step_deadlines
            return await deadlines.wait(asyncio.wrap_future(job))
        except TimeoutError:
            self._sound = False
            raise EnvTimeoutError(f"{what} took longer than {limit:g} s") from None
        except BaseException:
            self._sound = False
            raise

    def _live(self) -> Env:
        if self._env is None:
            raise EnvError("the environment was stepped before its reset")
        return self._env


class LocalPool:
    """Environments in this process: inline (one call at a time), or several in threads.

    A call that takes longer than its limit is given up. It leaves its thread behind until it
    returns; worker processes can be killed.

    Args:
        trusted: the environments' steps are known to end, so that inline they need no thread.
        waiting: tags of environments that wait for others, such as programs. Their calls need no
            thread.
    """

    def __init__(
        self,
        factories: Mapping[str, EnvFactory],
        config: RolloutConfig,
        *,
        threads: int = 0,
        trusted: bool = False,
        waiting: frozenset[str] = frozenset(),
    ) -> None:
        self.config = config
        self.waiting = waiting
        self.reset_deadlines = Deadlines(config.reset_timeout)
        self.step_deadlines = Deadlines(config.step_timeout)
        self.measured: dict[str, float] = {}
        self._factories = factories
        self._executor = DaemonThreads(threads, NAME) if threads else None
        self._beside = SideThread(NAME)
        self._trusted = trusted
        self._idle: dict[str, list[Env]] = {}
        self._together = 0

    def open(self, tag: str) -> LocalHandle:
        return LocalHandle(tag, self)

    @property
    def places(self) -> None:
        """No limit."""
        return None

    def expect_together(self, count: int) -> None:
        """Keeps the number for the check of served environments; this pool itself has no limit."""
        self._together = count

    def facts(self) -> dict[str, Json]:
        kind = "inline" if self._executor is None else "thread"
        return {"isolation": kind, "ms_per_call": self.measured}

    def take(self, tag: str) -> Env:
        """An idle environment, or a new one."""
        try:
            env = self._idle[tag].pop()
        except (KeyError, IndexError):  # no check first: another thread may take it in between
            env = self._factories[tag]()
        if is_shared(env):
            env.wait = 0.0  # the handle waits for a place itself, without blocking a thread
            if env.max_sessions < self._together:
                raise EnvError(
                    f"a rollout in lockstep holds its {self._together} environments at once, and "
                    f"{env.url} has "
                    f"{env.max_sessions} sessions; raise its --max-sessions"
                )
        return env

    def give_back(self, tag: str, env: Env) -> None:
        """Keeps an environment for the next episode. A failed environment is never reused."""
        self._idle.setdefault(tag, []).append(env)

    async def call(self, function: Callable[[], T], limit: float, what: str) -> T:
        """The function's result. Any exception becomes an EnvError."""
        if self._executor is None:
            return self._call_inline(function, limit, what)
        loop = asyncio.get_running_loop()
        started = loop.create_future()

        def run() -> T:
            loop.call_soon_threadsafe(_set, started)
            return ask(what, function)

        job = self._executor.submit(run)
        answer = asyncio.wrap_future(job)
        try:
            await started  # the limit counts from the start of the call
            await asyncio.wait((answer,), timeout=limit)
        finally:
            # It took too long, or the episode was given up: its thread may never be free again.
            if not answer.done():
                if not job.cancel():
                    self._executor.replace(job)
                answer.cancel()
        if answer.cancelled():
            raise EnvTimeoutError(f"{what} took longer than {limit:g} s")
        return answer.result()

    def _call_inline(self, function: Callable[[], T], limit: float, what: str) -> T:
        if self._trusted and what != "reset":  # a reset may look for a map that does not exist
            return ask(what, function)
        try:
            return self._beside.call(lambda: ask(what, function), limit)
        except TimeoutError:
            if self.config.isolation == "auto":
                logger.warning(
                    "%s took longer than %g s: environments run in threads now", what, limit
                )
                self._executor = DaemonThreads(self.config.num_workers, NAME)
            raise EnvTimeoutError(f"{what} took longer than {limit:g} s") from None

    async def close(self) -> None:
        limit = self.config.step_timeout
        for env in itertools.chain.from_iterable(self._idle.values()):
            try:
                ask_within("close", env.close, thread=self._beside, limit=limit)
            except EnvTimeoutError as error:  # each of the others may take as long
                logger.warning("closing the environments was given up: %s", error)
                break
            except EnvError as error:  # close the others too
                logger.warning("closing an environment failed: %s", error)
        self._idle = {}
        self._beside.close()
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)


def _set(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)
