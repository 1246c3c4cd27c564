"""Evaluation: how good a player is on held-out tasks, how sure that is, and whether another one is better."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from turnwise.config.schema import Config
from turnwise.envs.base import EnvFactory
from turnwise.evaluate.players import Player, player_proxy, with_episodes
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
from turnwise.generate.base import Generator
from turnwise.log.events import Evaluated
from turnwise.log.metrics import successes
from turnwise.rollout.proxy import AgentProxy
from turnwise.types import Episode, Json


class EvaluationError(RuntimeError):
    """Nothing could be evaluated; the message has the first error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyPlayer:
    """A policy whose tokens a generator samples; it plays through AgentProxy."""

    generator: Generator
    tokenizer: Any
    name: str = "policy"


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How one task went."""

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
        ...     turn = Turn(prompt_ids=(), completion=Completion(ids=(), logprobs=(), finish_reason="stop"), text="",
        ...                 restart=True, reward=float(won), info={"success": won})
        ...     return Episode(id=str(n), task=Task(id=str(n), seed=n), group_id=n, index=0, tag="", seed=0,
        ...                    noise_seed=0, prompt=(), turns=(turn,), status=Status.COMPLETED)
        >>> result = EvalResult.of("mine", [episode(n, n < 8) for n in range(10)])
        >>> print(result.success)
        0.800 [0.490, 0.943]
    """

    player: str
    success: Interval | None
    """Share of successes with Wilson's 95 % interval; None where the environment says nothing of success."""
    reward: Interval
    """Mean reward per episode with Student's 95 % interval."""
    outcomes: tuple[Outcome, ...]
    failures: int
    episodes: tuple[Episode, ...] = field(default=(), repr=False)

    @classmethod
    def of(cls, player: str, episodes: Sequence[Episode]) -> "EvalResult":
        """The result of these episodes.

        Raises:
            EvaluationError: every one of them failed.
        """
        played = [episode for episode in episodes if not episode.status.failed]
        if not played:
            first = next((f"{one.status.value}: {one.error}" for one in episodes if one.error), "there was none")
            raise EvaluationError(
                f"not one of {len(episodes)} episodes of {player} could be played; first error: {first}"
            )
        judged = successes(played)
        wins = [success for success in judged if success is not None]
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
        return cls(
            player=player,
            success=wilson(sum(wins), len(wins)) if wins else None,
            reward=mean_interval([episode.reward for episode in played]),
            outcomes=outcomes,
            failures=len(episodes) - len(played),
            episodes=tuple(episodes),
        )

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

    def event(self, step: int, label: Literal["before", "during", "after", "baseline"]) -> Evaluated:
        """The result as it is told to consoles and trackers."""
        success = None if self.success is None else (self.success.low, self.success.estimate, self.success.high)
        reward = (self.reward.low, self.reward.estimate, self.reward.high)
        return Evaluated(step=step, label=label, episodes=len(self.outcomes), success=success, reward=reward)

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
    """Tasks that only A solved."""
    only_b: int = 0
    more: int | None = 0
    """Further tasks that would settle it with probability 0.8 if the difference is what was seen. 0: it is settled.
    None: no difference was seen."""

    @property
    def p(self) -> float:
        return self.reward_p if self.success_p is None else self.success_p

    def verdict(self) -> str:
        """The result in a sentence.

        Example:
            >>> zero = Interval(estimate=0.0, low=-0.1, high=0.1)
            >>> Comparison(a="new", b="old", tasks=50, reward=zero, reward_p=1.0, more=None).verdict()
            'new and old did equally well on 50 tasks (difference in reward 0.000 [-0.100, 0.100], p = 1)'
        """
        what, interval = ("success", self.success) if self.success is not None else ("reward", self.reward)
        facts = f"difference in {what} {interval}, p = {self.p:.2g}"
        if self.more is None:
            return f"{self.a} and {self.b} did equally well on {self.tasks} tasks ({facts})"
        better, worse = (self.a, self.b) if interval.estimate > 0 else (self.b, self.a)
        if self.more == 0:
            return f"{better} is better than {worse} on {self.tasks} tasks ({facts})"
        return (
            f"{better} did better than {worse} on {self.tasks} tasks, but that may be chance ({facts}); about "
            f"{self.more} more tasks would settle it"
        )


def evaluate(
    config: Config,
    player: Player | PolicyPlayer,
    *,
    episodes: int | None = None,
    split: str = "val",
    step: int = 0,
    factories: Mapping[str, EnvFactory] | None = None,
    on_episode: Callable[[Episode], None] | None = None,
) -> EvalResult:
    """How the player does on held-out tasks. The same config and count are the same tasks, whoever plays.

    Args:
        episodes: how many tasks, each played once. None: config.eval.episodes.
        factories: environments given as objects, by tag.
        on_episode: hears of every episode when it is over.

    Raises:
        EvaluationError: every episode failed.
    """
    config = with_episodes(config, config.eval.episodes if episodes is None else episodes, split=split)
    if isinstance(player, PolicyPlayer):
        proxy = AgentProxy(config, player.generator, player.tokenizer, split=split, factories=factories)
    else:
        proxy = player_proxy(config, player, split=split, factories=factories)
    try:
        return EvalResult.of(player.name, proxy.play_all(step, on_episode=on_episode))
    finally:
        proxy.close()


def compare(a: EvalResult, b: EvalResult, *, alpha: float = 0.05) -> Comparison:
    """The paired comparison over the tasks that both played: McNemar's exact test for success, sign flips for reward.

    Raises:
        ValueError: they share no task, so there is nothing to pair.
    """
    others = {(outcome.task_id, outcome.index): outcome for outcome in b.outcomes}
    pairs = [(one, others[key]) for one in a.outcomes if (key := (one.task_id, one.index)) in others]
    if not pairs:
        raise ValueError(
            f"{a.player} and {b.player} share no task; evaluate both with the same environment, seed and split"
        )
    differences = [one.reward - other.reward for one, other in pairs]
    reward, reward_p = paired_bootstrap(differences), sign_flip_test(differences)
    known = [(one.success, other.success) for one, other in pairs if None not in (one.success, other.success)]
    if not known:
        needed = pairs_to_settle(differences, alpha=alpha)
        return Comparison(
            a=a.player,
            b=b.player,
            tasks=len(pairs),
            reward=reward,
            reward_p=reward_p,
            more=_more(reward_p, needed, len(pairs), alpha),
        )
    only_a = sum(bool(one) and not other for one, other in known)
    only_b = sum(bool(other) and not one for one, other in known)
    p = mcnemar(only_a, only_b)
    return Comparison(
        a=a.player,
        b=b.player,
        tasks=len(known),
        reward=reward,
        reward_p=reward_p,
        success=paired_share_interval(only_a, only_b, len(known)),
        success_p=p,
        only_a=only_a,
        only_b=only_b,
        more=_more(p, tasks_to_settle(only_a, only_b, len(known), alpha=alpha), len(known), alpha),
    )


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
