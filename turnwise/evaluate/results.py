"""Results of evaluations, and the paired comparison of two. Loads nothing heavy: the inspector
compares stored runs."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from turnwise.evaluate.statistics import (
    Interval,
    mcnemar,
    mean_interval,
    paired_bootstrap,
    paired_share_interval,
    pairs_to_settle,
    sign_flip_test,
    tasks_to_settle,
    wilson,
)
from turnwise.log.events import Evaluated
from turnwise.log.metrics import successes
from turnwise.types import Episode, Json


class EvaluationError(RuntimeError):
    """No episode could be evaluated; the message has the first error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The outcome of one task."""

    task_id: str
    index: int
    tag: str
    success: bool | None
    reward: float
    turns: int
    status: str


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalResult:
    """How a player did. Failed episodes are counted, and in no rate or mean.

    Example:
        >>> from turnwise.types import Task, Status
        >>> def episode(n, won):
        ...     from turnwise.types import Turn, Completion
        ...     said = Completion(ids=(), logprobs=(), finish_reason="stop")
        ...     turn = Turn(prompt_ids=(), completion=said, text="",
        ...                 restart=True, reward=float(won), info={"success": won})
        ...     return Episode(id=str(n), task=Task(id=str(n), seed=n), group_id=n, index=0, tag="",
        ...                    seed=0, noise_seed=0, prompt=(), turns=(turn,),
        ...                    status=Status.COMPLETED)
        >>> result = EvalResult.of("mine", [episode(n, n < 8) for n in range(10)])
        >>> print(result.success)
        0.800 [0.490, 0.943]
    """

    player: str
    success: Interval | None
    """Share of successes with Wilson's 95 % interval; None where the environment says nothing of
    success."""
    reward: Interval
    """Mean reward per episode with Student's 95 % interval."""
    outcomes: tuple[Outcome, ...]
    failures: int
    episodes: tuple[Episode, ...] = field(default=(), repr=False)

    @classmethod
    def of(
        cls, player: str, episodes: Sequence[Episode], *, speaking: Collection[str] = ()
    ) -> "EvalResult":
        """The result of these episodes.

        Args:
            speaking: tags whose environments are known to report success.

        Raises:
            EvaluationError: every one of them failed.
        """
        played = [episode for episode in episodes if not episode.status.failed]
        if not played:
            first = next(
                (f"{one.status.value}: {one.error}" for one in episodes if one.error),
                "there was none",
            )
            raise EvaluationError(
                f"not one of {len(episodes)} episodes of {player} could be played; first error: "
                f"{first}"
            )
        judged = successes(played, speaking=speaking)
        outcomes = tuple(
            Outcome(
                task_id=episode.task.id,
                index=episode.index,
                tag=episode.tag,
                success=success,
                reward=episode.reward,
                turns=len(episode.turns),
                status=episode.status.value,
            )
            for episode, success in zip(played, judged, strict=True)
        )
        shares = _by_task((outcome.task_id, outcome.success) for outcome in outcomes).values()
        rewards = _by_task((outcome.task_id, outcome.reward) for outcome in outcomes).values()
        return cls(
            player=player,
            success=wilson(math.fsum(shares), len(shares)) if shares else None,
            reward=mean_interval(list(rewards)),
            outcomes=outcomes,
            failures=len(episodes) - len(played),
            episodes=tuple(episodes),
        )

    @property
    def tasks(self) -> int:
        """Different tasks among the episodes. Fewer than episodes where the held-out set is small:
        intervals count each task once."""
        return len({outcome.task_id for outcome in self.outcomes})

    def metrics(self) -> dict[str, float]:
        """The numbers as eval/... metrics (docs/metrics.md)."""
        found = {
            "eval/reward": self.reward.estimate,
            "eval/reward_low": self.reward.low,
            "eval/reward_high": self.reward.high,
            "eval/episodes": float(len(self.outcomes)),
            "eval/failures": float(self.failures),
        }
        if self.success is not None:
            found["eval/success"] = self.success.estimate
            found["eval/success_low"] = self.success.low
            found["eval/success_high"] = self.success.high
        return found

    def event(
        self, step: int, label: Literal["before", "during", "after", "baseline"]
    ) -> Evaluated:
        """The result as an event for consoles and trackers."""
        success = (
            None
            if self.success is None
            else (self.success.low, self.success.estimate, self.success.high)
        )
        reward = (self.reward.low, self.reward.estimate, self.reward.high)
        return Evaluated(
            step=step,
            label=label,
            episodes=len(self.outcomes),
            success=success,
            reward=reward,
            tasks=self.tasks,
        )

    def to_json(self) -> dict[str, Json]:
        """Everything but the episodes."""
        return {
            "player": self.player,
            "success": _interval_json(self.success),
            "reward": _interval_json(self.reward),
            "failures": self.failures,
            "outcomes": [
                {
                    "task_id": outcome.task_id,
                    "index": outcome.index,
                    "success": outcome.success,
                    "reward": outcome.reward,
                    "turns": outcome.turns,
                    "status": outcome.status,
                }
                for outcome in self.outcomes
            ],
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Two players on the same tasks. Differences are A minus B."""

    a: str
    b: str
    tasks: int
    """Tasks that both played."""
    reward: Interval
    reward_p: float
    success: Interval | None = None
    success_p: float | None = None
    only_a: int = 0
    """Tasks that only A solved, or that it solved more often."""
    only_b: int = 0
    more: int | None = 0
    """Further tasks needed for a significant result with probability 0.8, assuming the observed
    difference. 0: it is significant. None: no difference was observed."""

    @property
    def p(self) -> float:
        return self.reward_p if self.success_p is None else self.success_p

    def verdict(self) -> str:
        """The result in a sentence.

        Example:
            >>> zero = Interval(estimate=0.0, low=-0.1, high=0.1)
            >>> same = Comparison(a="new", b="old", tasks=50, reward=zero, reward_p=1.0, more=None)
            >>> same.verdict()
            'new and old did equally well on 50 tasks (difference in reward 0.000 [-0.100, 0.100], p = 1)'
        """  # noqa: E501
        what, interval = (
            ("success", self.success) if self.success is not None else ("reward", self.reward)
        )
        a_is_better = interval.estimate > 0
        if not a_is_better and self.more is not None:  # the better one's lead is told
            interval = Interval(estimate=-interval.estimate, low=-interval.high, high=-interval.low)
        facts = f"difference in {what} {interval}, p = {self.p:.2g}"
        if self.more is None:
            return f"{self.a} and {self.b} did equally well on {self.tasks} tasks ({facts})"
        better, worse = (self.a, self.b) if a_is_better else (self.b, self.a)
        if self.more == 0:
            return f"{better} is better than {worse} on {self.tasks} tasks ({facts})"
        return (
            f"{better} did better than {worse} on {self.tasks} tasks, but that may be chance "
            f"({facts}); about "
            f"{self.more} more tasks would settle it"
        )


def _by_task(values: Iterable[tuple[str, float | bool | None]]) -> dict[str, float]:
    """Task -> the mean of its known values, in the order in which tasks first occur."""
    found: dict[str, list[float]] = {}
    for task, value in values:
        if value is not None:
            found.setdefault(task, []).append(float(value))
    return {task: math.fsum(known) / len(known) for task, known in found.items()}


def compare(a: EvalResult, b: EvalResult, *, alpha: float = 0.05) -> Comparison:
    """The paired comparison over the tasks that both played: McNemar's exact test for success, sign
    flips for reward, and for success where a task was played more than once. A task counts once.

    Raises:
        ValueError: they share no task, so there is nothing to pair.
    """
    differences = _differences(
        *(_by_task((one.task_id, one.reward) for one in result.outcomes) for result in (a, b))
    )
    if not differences:
        raise ValueError(
            f"{a.player} and {b.player} share no task; evaluate both with the same environment, "
            "seed and split"
        )
    reward, reward_p = paired_bootstrap(differences), sign_flip_test(differences)
    won = _differences(
        *(_by_task((one.task_id, one.success) for one in result.outcomes) for result in (a, b))
    )
    tasks = len(won or differences)
    needed = pairs_to_settle(won or differences, alpha=alpha)
    only_a, only_b = sum(value > 0 for value in won), sum(value < 0 for value in won)
    success, success_p = None, None
    if set(won) <= {-1.0, 0.0, 1.0} and won:
        success, success_p = paired_share_interval(only_a, only_b, tasks), mcnemar(only_a, only_b)
        needed = tasks_to_settle(only_a, only_b, tasks, alpha=alpha)
    elif won:  # tasks that were played often have shares of successes
        success, success_p = paired_bootstrap(won), sign_flip_test(won)
    return Comparison(
        a=a.player,
        b=b.player,
        tasks=tasks,
        reward=reward,
        reward_p=reward_p,
        success=success,
        success_p=success_p,
        only_a=only_a,
        only_b=only_b,
        more=_more(reward_p if success_p is None else success_p, needed, tasks, alpha),
    )


def _differences(a: Mapping[str, float], b: Mapping[str, float]) -> list[float]:
    """A less B for the tasks of both, in A's order."""
    return [mean - b[task] for task, mean in a.items() if task in b]


def _more(p: float, needed: int | None, played: int, alpha: float) -> int | None:
    if p < alpha:
        return 0
    return None if needed is None else max(1, needed - played)


def _interval_json(interval: Interval | None) -> Json:
    if interval is None:
        return None
    ends = {"low": interval.low, "high": interval.high}
    return {"estimate": interval.estimate} | {
        key: value if math.isfinite(value) else None for key, value in ends.items()
    }
