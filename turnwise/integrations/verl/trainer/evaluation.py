"""Evaluation on verl: what the agent loops say of held-out episodes, judged as natively."""

from dataclasses import asdict

from turnwise.evaluate.evaluation import EvalResult, Outcome
from turnwise.evaluate.statistics import mean_interval, wilson
from turnwise.log.metrics import judged
from turnwise.types import Episode

OUTCOMES = "turnwise_outcomes"
"""The partition of the TransferQueue in which held-out episodes are noted."""


async def note_outcome(episode: Episode, *, key: str) -> None:
    """Tells the driver how a held-out episode went."""
    import transfer_queue as tq

    outcome = Outcome(
        task_id=episode.task.id,
        index=episode.group_id,
        tag=episode.tag,
        success=episode.success,
        reward=episode.reward,
        turns=len(episode.turns),
        status=episode.status.value,
    )
    await tq.async_kv_put(key=key, partition_id=OUTCOMES, tag=asdict(outcome))


def take_result(*, failures: int) -> EvalResult | None:
    """The results noted since the last call, with intervals; None where there are none. Failed
    episodes are in no mean."""
    import transfer_queue as tq

    noted = (tq.kv_list(OUTCOMES) or {}).get(OUTCOMES, {})
    if not noted:
        return None
    tq.kv_clear(keys=list(noted), partition_id=OUTCOMES)
    return judge([Outcome(**tag) for tag in noted.values()], failures=failures)


def judge(outcomes: list[Outcome], *, failures: int) -> EvalResult:
    """The result of these outcomes, in the order of their tasks.

    Example:
        >>> won = [Outcome(task_id=str(n), index=n, tag="", success=n < 8, reward=1.0, turns=3,
        ...     status="completed")
        ...        for n in range(10)]
        >>> print(judge(won, failures=1).success)
        0.800 [0.490, 0.943]
    """
    known = judged([(outcome.tag, outcome.success) for outcome in outcomes])
    wins = [success for success in known if success is not None]
    return EvalResult(
        player="policy",
        success=wilson(sum(wins), len(wins)) if wins else None,
        reward=mean_interval([outcome.reward for outcome in outcomes]),
        outcomes=tuple(sorted(outcomes, key=lambda outcome: outcome.index)),
        failures=failures,
    )
