"""BatchPlayer: plays the rows of TRL's batches with AgentProxy, now or ahead of training."""

import asyncio
import itertools
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from turnwise.config.schema import Config
from turnwise.envs.base import EnvError, EnvTimeoutError
from turnwise.envs.gate import words
from turnwise.generate.base import Generator
from turnwise.integrations.trl.engines import TRLGenerator
from turnwise.integrations.trl.sources import EnvSource
from turnwise.rollout.plan import EpisodePlan, turns_or_error
from turnwise.rollout.proxy import AgentProxy
from turnwise.seeding import derive_seed
from turnwise.types import Episode, Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """One process's part of a generation batch."""

    numbers: tuple[int, ...]
    """Which task of the split each row is."""
    split: str
    first: int
    """Place of the first row among the rows of all processes."""
    group_size: int
    moment: tuple[int, ...]
    """Identifies the batch within the run; seeds are derived from it."""


class BatchPlayer:
    """The environments, contexts and generator of a run, with their event loop.

    Args:
        ahead: play on a thread of its own, beside training; else in the caller's thread.
        around: what a rollout in the caller's thread runs in, such as autocast.
    """

    def __init__(
        self,
        *,
        config: Config,
        source: EnvSource,
        make_generator: Callable[[], Generator],
        tokenizer: Any,
        timeout: float,
        ahead: bool,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._config = config
        self._source = source
        self._timeout = timeout
        self._around = around
        self._env_ids = itertools.count()
        self._runner = None if ahead else asyncio.Runner()
        self._loop: asyncio.AbstractEventLoop | None = None
        if ahead:
            self._loop = asyncio.new_event_loop()
            threading.Thread(
                target=self._loop.run_forever, name="turnwise-episodes", daemon=True
            ).start()

        async def build() -> AgentProxy:
            factories = None if source.by_name else {config.env.name: source.factory}
            return AgentProxy(config, make_generator(), tokenizer, factories=factories)

        self.proxy = self.run(build())

    def run(self, job: Coroutine[Any, Any, Any]) -> Any:
        """The coroutine's result, waited for."""
        return self.submit(job).result()

    def submit(self, job: Coroutine[Any, Any, Any]) -> "Future[Any]":
        """The coroutine, started on the player's thread; where it has none, it is run to its
        end."""
        if self._loop is not None:
            return asyncio.run_coroutine_threadsafe(job, self._loop)
        assert self._runner is not None
        future: Future[Any] = Future()
        with self._around():
            future.set_result(self._runner.run(job))
        return future

    def play(self, rows: Rows) -> "Future[list[Episode]]":
        """The rows' episodes in order, including failed ones."""
        self._refuse_split_groups(rows)
        plans = self.plans(rows)
        generator = self.proxy.generator
        inner = getattr(generator, "_generator", generator)
        if isinstance(inner, TRLGenerator):
            return self.submit(self._scored(self._play_in_rounds(plans, inner)))
        return self.submit(self._scored(self.proxy.play_plans(plans, timeout=self._timeout)))

    def _refuse_split_groups(self, rows: Rows) -> None:
        if self._source.score_group is None:
            return
        if rows.first % rows.group_size or len(rows.numbers) % rows.group_size:
            raise ValueError(
                f"{self._source.name} scores the {rows.group_size} episodes of a group together, "
                f"and each process plays {len(rows.numbers)}; choose a batch per process that is a "
                "multiple of num_generations"
            )

    async def _scored(self, job: Coroutine[Any, Any, list[Episode]]) -> list[Episode]:
        """The episodes, with the rewards that a group gets together."""
        episodes, score = await job, self._source.score_group
        if score is None:
            return episodes
        groups: dict[int, list[Episode]] = {}
        for episode in episodes:
            if episode.turns and not episode.status.failed:
                groups.setdefault(episode.group_id, []).append(episode)
        found: dict[str, Episode] = {}
        for members in groups.values():
            scored = await asyncio.to_thread(score, members)
            found |= {episode.id: episode for episode in scored}
        return [found.get(episode.id, episode) for episode in episodes]

    async def _play_in_rounds(
        self, plans: Sequence[EpisodePlan], engine: TRLGenerator
    ) -> list[Episode]:
        job = asyncio.create_task(self.proxy.play_plans(plans, timeout=self._timeout))
        try:
            await engine.serve(job)
        finally:
            if not job.done():
                job.cancel()
        return await job

    def plans(self, rows: Rows) -> list[EpisodePlan]:
        """The plans of the rows' episodes."""
        config, seed = self._config, self._config.seed
        limit, wrong = turns_or_error(config, config.env, self._source.probe, thread=None)
        label = "-".join(str(part) for part in rows.moment)
        plans: list[EpisodePlan] = []
        late: list[str] = []
        for offset, number in enumerate(rows.numbers):
            task, error = self._task(rows.split, number, late)
            place = rows.first + offset
            group, index = divmod(place, rows.group_size)
            plans.append(
                EpisodePlan(
                    env_id=next(self._env_ids),
                    group_id=group,
                    index=index,
                    tag=config.env.name,
                    task=task,
                    seed=derive_seed(seed, f"tokens/{rows.split}", *rows.moment, place),
                    noise_seed=derive_seed(seed, f"noise/{rows.split}", *rows.moment, place),
                    episode_id=f"{rows.split}-{label}-g{group}-m{index}",
                    max_turn=limit,
                    error=error or wrong,
                )
            )
        return plans

    def _task(self, split: str, number: int, late: list[str]) -> tuple[Task, str | None]:
        """(the task, None), or (a task without a payload, the error). After one that was not made
        in time, which goes into `late`, no other is asked for."""
        try:
            if late:
                raise EnvTimeoutError(late[0])
            return self._source.task(split, number), None
        except EnvError as error:
            told = words(error) or "EnvError"
            if isinstance(error, EnvTimeoutError):
                late[:] = [told]
            return Task(id=f"{self._source.name}/{split}/{number}", seed=0, split=split), told

    def close(self) -> None:
        """Closes the environments and the thread. May be called twice."""
        if self._loop is not None and self._loop.is_running():
            self.run(self.proxy.env_state.aclose())
            self._loop.call_soon_threadsafe(self._loop.stop)
        elif self._runner is not None:
            self._runner.run(self.proxy.env_state.aclose())
            self._runner.close()
            self._runner = None
