# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
"""Spreads a step's episodes over all agent loop workers.

verl gives whole groups to its workers, in equal runs: 8 groups on 32 workers keep 8 of them busy,
and 40 groups keep 20 busy. Here group g belongs to worker g modulo their number. Where there are
fewer groups than workers, the members of a group are played by several workers.
"""

import asyncio
from typing import Any

import ray
from tensordict import NonTensorData, TensorDict
from verl.trainer.ppo.v1 import AgentLoopManagerTQ
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ

GROUPS = "turnwise_groups"
"""The column that tells a worker how many groups were handed out."""


def worker_of(member: int, *, own: int, groups: int, workers: int) -> int:
    """The worker that plays a member of a group which worker `own` has.

    Example: 3 groups of 4 on 8 workers
        >>> [[worker_of(m, own=g, groups=3, workers=8) for m in range(4)] for g in range(3)]
        [[0, 3, 6, 1], [1, 4, 7, 2], [2, 5, 0, 3]]
        >>> worker_of(2, own=1, groups=8, workers=8)
        1
    """
    return own if groups >= workers else (own + member * groups) % workers


class SpreadWorker(AgentLoopWorkerTQ.__ray_metadata__.modified_class):  # pyright: ignore
    """verl's worker, which sends members of its groups to its peers."""

    peers: tuple[Any, ...] = ()
    own = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._groups: dict[str, asyncio.Task[Any]] = {}
        """The groups that this worker has, by uid."""
        self._episodes: dict[str, set[asyncio.Task[Any]]] = {}
        """The episodes that this worker plays, by their group's uid."""
        self._dropped: frozenset[str] = frozenset()

    def meet(self, peers: list[Any], own: int) -> None:
        """Tells the worker who the others are."""
        self.peers, self.own = tuple(peers), own

    async def play(self, sampling_params: dict[str, Any], trajectory: Any, row: Any) -> None:
        """Plays an episode of a group that another worker has. Its rows go to the queue."""
        await self._play_here(sampling_params, trajectory, row)

    async def drop(self, uids: list[str]) -> None:
        """Gives up the episodes of these groups. Returns when none of them goes on here, and no
        group of this worker's waits for another worker."""
        self._dropped = frozenset(uids)
        jobs = [job for uid in uids for job in self._episodes.get(uid, ())]
        for job in jobs:
            job.cancel()
        groups = [self._groups[uid] for uid in uids if uid in self._groups]
        await asyncio.gather(*jobs, *groups, return_exceptions=True)

    async def _play_here(
        self, sampling_params: dict[str, Any], trajectory: Any, row: dict[str, Any]
    ) -> None:
        """Plays an episode, unless its group is given up before the end."""
        uid = row["uid"]
        if uid in self._dropped:
            return
        job = asyncio.create_task(super()._run_agent_loop(sampling_params, trajectory, **row))
        self._episodes.setdefault(uid, set()).add(job)
        try:
            await job
        except asyncio.CancelledError:
            if uid not in self._dropped:
                raise
        finally:
            self._episodes[uid].discard(job)
            if not self._episodes[uid]:
                del self._episodes[uid]

    async def _run_prompt(self, prompt: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        uid, task = prompt["uid"], asyncio.current_task()
        assert task is not None
        self._groups[uid] = task
        try:
            await super()._run_prompt(prompt, *args, **kwargs)
        finally:
            del self._groups[uid]

    async def _run_agent_loop(
        self, sampling_params: dict[str, Any], trajectory: dict[str, Any], **row: Any
    ) -> None:
        place = worker_of(
            int(row.get("session_id", 0)),
            own=self.own,
            groups=int(row.pop(GROUPS, len(self.peers))),
            workers=len(self.peers),
        )
        if place == self.own:
            await self._play_here(sampling_params, trajectory, row)
        else:
            await self.peers[place].play.remote(sampling_params, trajectory, row)


class SpreadManager(AgentLoopManagerTQ):
    """verl's manager of agent loop workers, which hands groups out one by one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(SpreadWorker)

    async def _init_agent_loop_workers(self) -> None:
        await super()._init_agent_loop_workers()
        workers = self.agent_loop_workers
        await asyncio.gather(*(one.meet.remote(workers, n) for n, one in enumerate(workers)))

    def generate_sequences(self, prompts: TensorDict) -> None:
        """Starts the episodes of these groups. Their rows come through the queue."""
        groups, workers = len(prompts), self.agent_loop_workers
        prompts[GROUPS] = NonTensorData(groups)
        ray.get(
            [
                worker.generate_sequences.remote(prompts[number :: len(workers)])
                for number, worker in enumerate(workers[:groups])
            ]
        )

    def drop(self, uids: list[str]) -> None:
        """Gives up the episodes of these groups, on whatever workers they are."""
        ray.get([worker.drop.remote(uids) for worker in self.agent_loop_workers])
