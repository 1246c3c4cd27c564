"""Which episodes a step of verl's waits for, from what its replay buffer sees in the queue."""

import logging
from collections.abc import Sequence
from typing import Any

from turnwise.integrations.verl.rollout.agent_loop import FAILURES
from turnwise.procs.progress import Stall, some_of

logger = logging.getLogger(__name__)


class QueueWatch:
    """Says in the driver which episodes are not over, once none has ended for so many seconds."""

    def __init__(self, seconds: float) -> None:
        self._stall = Stall(seconds)
        self._groups: dict[str, int] = {}

    def begin_step(self) -> None:
        self._groups.clear()

    def submitted(self, uids: Sequence[str], groups: Sequence[int]) -> None:
        """Remembers which group each of verl's prompts is."""
        self._groups |= zip(uids, groups, strict=True)

    def look(self, buffer: Any, partition: str, *, members: int, step: int) -> None:
        """Called at every poll of verl's replay buffer."""
        rows, failed = buffer.partitions[partition], buffer.partitions[FAILURES]
        over = {key.rsplit("_", 1)[0] for key in rows} | set(failed)
        seconds = self._stall.look((step, partition, len(over)))
        if seconds is None:
            return
        names = [
            f"{partition}-{step:06d}-g{self._groups.get(uid, uid)}-m{member}"
            for uid in sorted(buffer.pending_keys[partition] | buffer.running_keys[partition])
            for member in range(members)
            if f"{uid}_{member}" not in over
        ]
        logger.warning(
            "no episode has ended for %.0f s (rollout.stall_timeout); waiting for %s",
            seconds,
            some_of(names) or "verl's queue",
        )
