"""When a run ends because it learns nothing, and what it says then: the same on every backend that
can stop one."""

from collections.abc import Mapping

from turnwise.config.schema import TrainConfig
from turnwise.log.doctor import COLLAPSE_ADVICE
from turnwise.log.metrics import is_collapsed

_WHY = {None: "either every task is solved, or none ever is", 0.0: "no episode succeeds"}


class Standstill:
    """Counts the steps in a row that updated nothing, and those in which every reply was the same
    and nothing succeeded.

    Args:
        train: train.max_idle_steps, train.max_collapsed_steps.

    Example:
        >>> still = Standstill(TrainConfig(max_idle_steps=2))
        >>> for step in (1, 2):
        ...     still.count(step, {"rollout/success": 1.0}, updated=False, last=False)
        ...     print(still.idle, still.solved, still.why)
        1 False None
        2 True None
    """

    def __init__(self, train: TrainConfig) -> None:
        self._train = train
        self._metrics: Mapping[str, float] = {}
        self._step = self.idle = self.collapsed = 0
        self._last = False

    def count(self, step: int, metrics: Mapping[str, float], *, updated: bool, last: bool) -> None:
        """Counts a step that is done.

        Args:
            step: how many are done with it.
            last: the run ends with it in any case.
        """
        self._step, self._metrics, self._last = step, metrics, last
        self.idle = 0 if updated else self.idle + 1
        self.collapsed = self.collapsed + 1 if is_collapsed(metrics) else 0

    @property
    def solved(self) -> bool:
        """Whether the run may end because nothing is left to learn."""
        return self._idle_too_long and self._metrics.get("rollout/success") == 1.0

    @property
    def collapsing(self) -> bool:
        """Whether the run ends because it repeats one reply."""
        most = self._train.max_collapsed_steps
        return 0 < most <= self.collapsed and not self._last and not self._idle_too_long

    @property
    def why(self) -> str | None:
        """Why the run cannot go on, with what to do. None: it can."""
        if self._idle_too_long and not self.solved:
            why = _WHY.get(self._metrics.get("rollout/success"), "every group has one reward")
            return (
                f"{self.idle_note()}. Stopped: {why}. Make tasks easier or harder, raise "
                "rollout.train.group_size or rollout.temperature, shape the reward (env.shaping), "
                "or raise train.max_idle_steps"
            )
        if self.collapsing:
            return (
                f"{self.collapse_note()}. Stopped: {COLLAPSE_ADVICE}. train.max_collapsed_steps: 0 "
                "lets such a run go on"
            )
        return None

    def idle_note(self) -> str:
        penalties = int(self._metrics.get("group/penalty_only", 0.0))
        but = f" but for penalties in {penalties} (algo.penalty_only_groups)" if penalties else ""
        return (
            f"step {self._step}: in no group did episodes differ in reward{but}, so there was "
            f"nothing to learn ({self.idle} of {self._train.max_idle_steps} such steps in a row)"
        )

    def solved_note(self) -> str:
        return (
            f"every episode succeeded in the last {self.idle} steps; the run ends after step "
            f"{self._step}"
        )

    def collapse_note(self) -> str:
        return (
            f"step {self._step}: every reply is the same and nothing succeeds, for "
            f"{self.collapsed} steps in a row"
        )

    @property
    def _idle_too_long(self) -> bool:
        return self.idle >= self._train.max_idle_steps and not self._last
