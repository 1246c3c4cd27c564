"""Where environments run: inline, in threads, or in worker processes that can be killed."""

import asyncio
import contextlib
import itertools
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from turnwise.config.schema import EnvConfig, RolloutConfig
from turnwise.envs.base import Env, EnvError
from turnwise.envs.registry import make_env
from turnwise.rollout.plan import EnvFactory
from turnwise.rollout.wire import decode, encode, observation_from_json, result_from_json
from turnwise.rollout.worker import receive_frame, send_frame
from turnwise.types import Json, Message, Observation, StepResult, Task

logger = logging.getLogger(__name__)
T = TypeVar("T")


class EnvTimeoutError(EnvError):
    """The environment did not answer in time. The episode ends as `env_timeout`."""


class WorkerLostError(EnvError):
    """The worker process died, or was killed because another environment in it hung: not this episode's fault."""


class EnvHandle(Protocol):
    """An environment, wherever it runs."""

    async def reset(self, task: Task, noise_seed: int) -> Observation: ...
    async def step(self, message: Message) -> StepResult: ...
    async def finish(self) -> StepResult: ...
    async def close(self) -> None: ...


class EnvPool(Protocol):
    """Opens environments and owns what they run in."""

    def open(self, tag: str) -> EnvHandle: ...
    async def close(self) -> None: ...


class _LocalHandle:
    """An environment in this process. `call` decides whether its methods run inline or in a thread."""

    def __init__(self, factory: EnvFactory, pool: "LocalPool") -> None:
        self._factory = factory
        self._pool = pool
        self._env: Env | None = None

    async def reset(self, task: Task, noise_seed: int) -> Observation:
        def run() -> Observation:
            if self._env is None:
                self._env = self._factory()
            return self._env.reset(task, noise_seed)

        return await self._pool.call(run, self._pool.config.reset_timeout, "reset")

    async def step(self, message: Message) -> StepResult:
        env = self._live()
        return await self._pool.call(lambda: env.step(message), self._pool.config.step_timeout, "step")

    async def finish(self) -> StepResult:
        env = self._live()
        return await self._pool.call(env.finish, self._pool.config.step_timeout, "finish")

    async def close(self) -> None:
        env, self._env = self._env, None
        if env is not None:
            await self._pool.call(env.close, self._pool.config.step_timeout, "close")

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
        self._factories = factories
        self._threads = threads
        self._executor = ThreadPoolExecutor(threads, "turnwise-env") if threads else None

    def open(self, tag: str) -> EnvHandle:
        return _LocalHandle(self._factories[tag], self)

    async def call(self, function: Callable[[], T], limit: float, what: str) -> T:
        if self._executor is None:
            return function()
        loop = asyncio.get_running_loop()
        started = loop.create_future()

        def run() -> T:
            loop.call_soon_threadsafe(_set, started)
            return function()

        job = loop.run_in_executor(self._executor, run)
        await started  # the limit counts from when a thread is free
        try:
            return await asyncio.wait_for(asyncio.shield(job), limit)
        except TimeoutError:
            # The hung thread keeps its place in the pool, so make room for the others.
            self._executor = ThreadPoolExecutor(self._threads, "turnwise-env")
            raise EnvTimeoutError(f"{what} took longer than {limit:g} s") from None

    async def close(self) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)


def _set(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


class _Worker:
    """One worker process. Requests are answered one at a time, in order."""

    def __init__(self, memory_mb: int | None) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "turnwise.rollout.worker", str(theirs.fileno()), str(memory_mb or 0)]
        # Environments neither see our standard input nor write into our standard output.
        self._process = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        theirs.close()
        self._socket = ours
        self._turn = asyncio.Lock()
        self._reader = ThreadPoolExecutor(1, "turnwise-worker")
        self.lost: str | None = None
        self.num_open = 0

    async def request(self, body: Mapping[str, Json], limit: float) -> Json:
        async with self._turn:
            if self.lost is not None:
                raise WorkerLostError(self.lost)
            loop = asyncio.get_running_loop()
            data = encode(body)
            answer = loop.run_in_executor(self._reader, self._exchange, data)
            try:
                received = await asyncio.wait_for(asyncio.shield(answer), limit)
            except TimeoutError:
                self.kill(f"its environment's {body['op']} took longer than {limit:g} s")
                raise EnvTimeoutError(f"{body['op']} took longer than {limit:g} s; its worker was killed") from None
            except asyncio.CancelledError:
                self.kill("a request was cancelled")
                raise
            if received is None:
                self.kill("it died")
                raise EnvError(f"the worker process died during {body['op']} (exit {self._process.returncode})")
            result = decode(received)
            if "error" in result:
                raise EnvError(result["error"])
            return result["ok"]

    def _exchange(self, data: bytes) -> bytes | None:
        try:
            send_frame(self._socket, data)
        except OSError:
            return None
        return receive_frame(self._socket)

    def kill(self, reason: str) -> None:
        if self.lost is None:
            self.lost = f"the worker process was lost: {reason}"
        self._process.kill()
        self._process.wait()
        self._socket.close()
        self._reader.shutdown(wait=False, cancel_futures=True)


class _RemoteHandle:
    def __init__(self, pool: "ProcessPool", worker: _Worker, handle_id: int, config: Mapping[str, Json]) -> None:
        self._pool = pool
        self._worker = worker
        self._id = handle_id
        self._config = config
        self._opened = False
        self._closed = False
        worker.num_open += 1

    async def reset(self, task: Task, noise_seed: int) -> Observation:
        limit = self._pool.config.reset_timeout
        if not self._opened:
            self._opened = True
            # A fresh worker imports packages first: a minute for that, whatever the environment's own limit.
            await self._worker.request({"op": "open", "id": self._id, "config": self._config}, limit + 60.0)
        body = {"op": "reset", "id": self._id, "task": task.to_json(), "noise_seed": noise_seed}
        return observation_from_json(await self._worker.request(body, limit))

    async def step(self, message: Message) -> StepResult:
        body = {"op": "step", "id": self._id, "message": message.to_json()}
        return result_from_json(await self._worker.request(body, self._pool.config.step_timeout))

    async def finish(self) -> StepResult:
        body = {"op": "finish", "id": self._id}
        return result_from_json(await self._worker.request(body, self._pool.config.step_timeout))

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._worker.num_open -= 1
        if self._opened:
            # An environment whose worker is gone is closed.
            with contextlib.suppress(WorkerLostError):
                await self._worker.request({"op": "close", "id": self._id}, self._pool.config.step_timeout)


class ProcessPool:
    """Environments in worker processes: an episode stays in its worker, a hung one is killed with its worker, and a
    worker that died is replaced. Episodes that only shared the worker raise WorkerLostError and start again."""

    def __init__(self, configs: Mapping[str, EnvConfig], config: RolloutConfig) -> None:
        self.config = config
        self._configs = {tag: env.model_dump(mode="json") for tag, env in configs.items()}
        self._workers: list[_Worker] = []
        self._ids = itertools.count()

    def open(self, tag: str) -> EnvHandle:
        self._workers = [worker for worker in self._workers if worker.lost is None]
        idle = [worker for worker in self._workers if worker.num_open == 0]
        if idle:
            worker = idle[0]
        elif len(self._workers) < self.config.num_workers:
            worker = _Worker(self.config.worker_memory_mb)
            self._workers.append(worker)
        else:
            worker = min(self._workers, key=lambda candidate: candidate.num_open)
        return _RemoteHandle(self, worker, next(self._ids), self._configs[tag])

    async def close(self) -> None:
        for worker in self._workers:
            if worker.lost is None:
                worker.kill("the pool was closed")
        self._workers = []


CHEAP_STEP_SECONDS = 0.002


def measure_step_seconds(factory: EnvFactory) -> float:
    """Seconds that a reset and a few steps take on average, measured on an environment of their own."""
    env = factory()
    started = time.perf_counter()
    calls = 1
    env.reset(env.make_task(0, "train"), 0)
    for _ in range(3):
        calls += 1
        if env.step(Message(role="assistant", content="")).done:
            break
    seconds = (time.perf_counter() - started) / calls
    env.close()
    return seconds


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
    local = {tag: given.get(tag) or _factory(env) for tag, env in configs.items()}
    kind = config.isolation
    if kind == "auto":
        kind = "inline"
        for tag, factory in local.items():
            try:
                seconds = measure_step_seconds(factory)
            except Exception as error:  # an environment that fails here fails in its episode, where it is counted
                logger.warning("could not measure %s: %s: %s", tag, type(error).__name__, error)
                continue
            if seconds > CHEAP_STEP_SECONDS:
                kind = "thread" if given else "process"
            logger.info("environment %s takes %.2f ms a call: %s", tag, seconds * 1e3, kind)
    if kind == "process":
        return ProcessPool(configs, config)
    return LocalPool(local, config, threads=config.num_workers if kind == "thread" else 0)


def _factory(config: EnvConfig) -> EnvFactory:
    return lambda: make_env(config)
