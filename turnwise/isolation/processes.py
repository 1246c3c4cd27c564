"""Environments in worker processes. An episode stays in one worker; a hung worker is killed, a dead
one replaced."""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

from turnwise.config.schema import EnvConfig, RolloutConfig
from turnwise.envs.base import Cut, EnvError, EnvTimeoutError, Hint
from turnwise.envs.gate import read_hint, words
from turnwise.envs.wire import decode, encode, observation_from_json, result_from_json
from turnwise.procs.channel import receive_frame, send_frame, start_beside, stop
from turnwise.types import Json, Message, Observation, StepResult, Task

logger = logging.getLogger(__name__)
ENVS_PER_WORKER = 64
"""Environments per worker if the config sets no number and episodes run independently."""


class WorkerLostError(EnvError):
    """The worker process died, or was killed because another environment in it hung. The episode
    may be retried."""


@dataclass(slots=True)
class WorkerCounts:
    """Counts of the events of a pool's workers.

    Example:
        >>> WorkerCounts(started=3, restarted=1, hung=1).to_json()
        {'started': 3, 'restarted': 1, 'hung': 1, 'died': 0, 'waited': 0}
    """

    started: int = 0
    restarted: int = 0
    """Started as a replacement for a lost worker."""
    hung: int = 0
    """Killed because an environment did not answer in time."""
    died: int = 0
    """Ended without turnwise: crashed, or killed from outside."""
    waited: int = 0
    """Episodes that had to wait for a place in a worker."""

    def to_json(self) -> dict[str, Json]:
        return asdict(self)


class _Worker:
    """One worker process. It answers requests one at a time, in order."""

    def __init__(self, memory_mb: int | None, counts: WorkerCounts) -> None:
        self._process, self._socket = start_beside("turnwise.isolation.worker", str(memory_mb or 0))
        self._turn = asyncio.Lock()
        self._reader = ThreadPoolExecutor(1, "turnwise-worker")
        self._counts = counts
        self.lost: str | None = None
        self.num_open = 0
        self._num_requests = 0

    async def request(self, body: Mapping[str, Json], limit: float) -> Json:
        async with self._turn:
            if self.lost is not None:
                raise WorkerLostError(self.lost)
            loop = asyncio.get_running_loop()
            self._num_requests += 1
            data = encode({**body, "n": self._num_requests})
            answer = loop.run_in_executor(self._reader, self._exchange, data)
            try:
                received = await asyncio.wait_for(asyncio.shield(answer), limit)
            except TimeoutError:
                self._counts.hung += 1
                self.kill(f"its environment's {body['op']} took longer than {limit:g} s")
                raise EnvTimeoutError(
                    f"{body['op']} took longer than {limit:g} s; its worker was killed"
                ) from None
            except asyncio.CancelledError:
                self.kill("a request was cancelled")
                raise
            if received is None:
                self._counts.died += 1
                self.kill("it died")
                raise EnvError(
                    f"the worker process died during {body['op']} (exit {self._process.returncode})"
                )
            try:
                result = decode(received)
            except ValueError as error:  # later answers would be out of order
                self.kill("its answer was not JSON")
                raise EnvError(f"the worker process's answer is not JSON: {error}") from error
            if result.get("n") != self._num_requests:
                self.kill(f"its answer to {body['op']} was not the answer to that request")
                raise WorkerLostError(self.lost)
            if "ok" not in result:
                raise EnvError(words(result.get("error")))
            return result["ok"]

    def _exchange(self, data: bytes) -> bytes | None:
        send_frame(self._socket, data)
        try:
            return receive_frame(self._socket)
        except ValueError:  # a frame over the limit
            return None

    def kill(self, reason: str) -> None:
        if self.lost is None:
            self.lost = f"the worker process was lost: {reason}"
            logger.info("worker %d: %s", self._process.pid, reason)
        stop(self._process)
        self._socket.close()
        self._reader.shutdown(wait=False, cancel_futures=True)


class _ProcessHandle:
    """An environment in a worker. It takes its place at the first reset, so that a waiting episode
    holds none."""

    def __init__(self, pool: "ProcessPool", handle_id: int, config: Mapping[str, Json]) -> None:
        self._pool = pool
        self._id = handle_id
        self._config = config
        self._worker: _Worker | None = None
        self._closed = False

    async def reset(self, task: Task, noise_seed: int) -> Observation:
        limit = self._pool.config.reset_timeout
        if self._worker is None:
            worker = await self._pool.take_place()
            if self._closed:
                self._pool.free_place(worker)
                raise EnvError("the environment was closed while it waited for a worker")
            self._worker = worker
            # A new worker imports packages first: it gets a minute for that, besides the
            # environment's own limit.
            await self._worker.request(
                {"op": "open", "id": self._id, "config": self._config}, limit + 60.0
            )
        body = {"op": "reset", "id": self._id, "task": task.to_json(), "noise_seed": noise_seed}
        return observation_from_json(await self._live().request(body, limit))

    async def step(self, message: Message, said: object = None) -> StepResult:
        body = {"op": "step", "id": self._id, "message": message.to_json()}
        return result_from_json(await self._live().request(body, self._pool.config.step_timeout))

    async def finish(self, why: Cut = "turns") -> StepResult:
        body = {"op": "finish", "id": self._id}
        return result_from_json(await self._live().request(body, self._pool.config.step_timeout))

    async def hint(self, what: Hint, seed: int) -> Json:
        body = {"op": "hint", "id": self._id, "what": what, "seed": seed}
        said = await self._live().request(body, self._pool.config.step_timeout)
        return read_hint(said, what=what)

    @property
    def env(self) -> None:
        """None: the environment is in another process."""
        return None

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._worker is None:
            return
        try:
            # The environment ended with its worker.
            with contextlib.suppress(WorkerLostError):
                await self._worker.request(
                    {"op": "close", "id": self._id}, self._pool.config.step_timeout
                )
        finally:
            self._pool.free_place(self._worker)

    def _live(self) -> _Worker:
        if self._worker is None:
            raise EnvError("the environment was stepped before its reset")
        return self._worker


class ProcessPool:
    """Environments in worker processes. An episode stays in its worker. A hung environment is
    killed with its worker, and lost workers are replaced. Other episodes of that worker raise
    WorkerLostError and are restarted.

    A worker has at most `rollout.worker_envs` environments; further episodes wait in order.
    """

    def __init__(self, configs: Mapping[str, EnvConfig], config: RolloutConfig) -> None:
        self.config = config
        self.counts = WorkerCounts()
        self.measured: dict[str, float] = {}
        self._limit: int | None = config.worker_envs or ENVS_PER_WORKER
        self._configs = {tag: env.model_dump(mode="json") for tag, env in configs.items()}
        self._workers: list[_Worker] = []
        self._waiting: list[asyncio.Future[_Worker]] = []
        self._vacant = 0  # lost workers that are not replaced yet
        self._ids = itertools.count()

    def open(self, tag: str) -> _ProcessHandle:
        return _ProcessHandle(self, next(self._ids), self._configs[tag])

    @property
    def places(self) -> int | None:
        return None if self._limit is None else self._limit * self.config.num_workers

    def expect_together(self, count: int) -> None:
        """Makes room for `count` environments that are all open at once, as in lockstep rollouts.

        Raises:
            ValueError: the config's limit is lower.
        """
        if (
            self.config.worker_envs is not None
            and count > self.config.worker_envs * self.config.num_workers
        ):
            raise ValueError(
                f"a rollout in lockstep holds its {count} environments at once, and "
                f"{self.config.num_workers} workers "
                f"of {self.config.worker_envs} environments have no room for them; raise "
                "rollout.worker_envs or "
                "rollout.num_workers"
            )
        self._limit = self.config.worker_envs

    def facts(self) -> dict[str, Json]:
        return {
            "isolation": "process",
            "ms_per_call": self.measured,
            "workers": self.counts.to_json(),
        }

    async def take_place(self) -> _Worker:
        """The worker with the fewest environments, as soon as one has room. Takes the place."""
        worker = None if self._waiting else self._choose()
        if worker is not None:
            worker.num_open += 1
            return worker
        self.counts.waited += 1
        place: asyncio.Future[_Worker] = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        try:
            return await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self.free_place(place.result())
            raise

    def free_place(self, worker: _Worker) -> None:
        """Frees a place, and gives free places to waiting episodes in order."""
        worker.num_open -= 1
        self._waiting = [place for place in self._waiting if not place.done()]
        while self._waiting and (free := self._choose()) is not None:
            free.num_open += 1
            self._waiting.pop(0).set_result(free)

    def _choose(self) -> _Worker | None:
        alive = [worker for worker in self._workers if worker.lost is None]
        self._vacant += len(self._workers) - len(alive)
        self._workers = alive
        idle = next((worker for worker in alive if worker.num_open == 0), None)
        if idle is not None:
            return idle
        if len(alive) < self.config.num_workers:
            return self._start()
        best = min(alive, key=lambda worker: worker.num_open)
        return best if self._limit is None or best.num_open < self._limit else None

    def _start(self) -> _Worker:
        worker = _Worker(self.config.worker_memory_mb, self.counts)
        self.counts.started += 1
        if self._vacant:
            self._vacant -= 1
            self.counts.restarted += 1
        self._workers.append(worker)
        return worker

    async def close(self) -> None:
        for worker in self._workers:
            if worker.lost is None:
                worker.kill("the pool was closed")
        self._workers = []
        if self.counts.hung or self.counts.died:
            logger.warning("workers of this pool: %s", self.counts.to_json())
