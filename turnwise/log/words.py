"""Steps, evaluations and times in words, for terminals and files."""

from turnwise.log.events import Evaluated, StepDone


def step_line(event: StepDone, *, total: int, left: float | None = None) -> str:
    """The step in a line.

    Example:
        >>> step_line(StepDone(step=5, metrics={"rollout/success": 0.25, "rollout/reward": 0.1,
        ...                                     "time/generated_tokens_per_second": 300.0}),
        ...                                     total=50, left=90.0)
        'step 5/50  success 25.0 %  reward 0.100  300 tokens/s  1 min 30 s left'
    """
    parts = [f"step {event.step}/{total}"]
    if (success := event.metrics.get("rollout/success")) is not None:
        parts.append(f"success {success:.1%}".replace("%", " %"))
    if (reward := event.metrics.get("rollout/reward")) is not None:
        parts.append(f"reward {reward:.3f}")
    if (loss := event.metrics.get("sft/loss")) is not None:
        parts.append(f"loss {loss:.3f}")
    if (accuracy := event.metrics.get("sft/token_accuracy")) is not None:
        parts.append(f"held-out accuracy {accuracy:.1%}".replace("%", " %"))
    name = "trained" if loss is not None else "generated"
    if (speed := event.metrics.get(f"time/{name}_tokens_per_second")) is not None:
        parts.append(f"{speed:.0f} tokens/s")
    if left is not None:
        parts.append(f"{duration(left)} left")
    return "  ".join(parts)


def evaluated_line(event: Evaluated) -> str:
    """An evaluation in a line.

    Example:
        >>> evaluated_line(Evaluated(step=0, label="before", episodes=256,
        ...                          success=(0.08, 0.11, 0.15), reward=(-0.1, 0.0, 0.1)))
        'evaluation before training: success 11.0 % [8.0 %, 15.0 %], reward 0.000 [-0.100, 0.100], 256 episodes'
    """  # noqa: E501
    whens = {"during": f"at step {event.step}", "baseline": f"of the {event.player}"}
    when = whens.get(event.label, f"{event.label} training")
    success = "" if event.success is None else f"success {_share(event.success)}, "
    low, mean, high = event.reward
    return f"evaluation {when}: {success}reward {mean:.3f} [{low:.3f}, {high:.3f}], {played(event)}"


def played(event: Evaluated) -> str:
    """How much was played, in words.

    Example:
        >>> played(Evaluated(step=0, label="after", episodes=8, tasks=2, success=None,
        ...                  reward=(0, 0, 0)))
        '8 episodes of only 2 tasks'
    """
    few = event.tasks is not None and event.tasks < event.episodes
    return f"{event.episodes} episodes" + (f" of only {event.tasks} tasks" if few else "")


def duration(seconds: float) -> str:
    """Seconds for people.

    Example:
        >>> duration(3.4), duration(200), duration(7500)
        ('3 s', '3 min 20 s', '2 h 5 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def _share(interval: tuple[float, float, float]) -> str:
    low, middle, high = (f"{100 * value:.1f} %" for value in interval)
    return f"{middle} [{low}, {high}]"
