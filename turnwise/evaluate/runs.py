"""Runs beside each other: what their configs differ in, and how they did on the held-out tasks that
they share."""

from collections.abc import Mapping, Sequence

from turnwise.config.schema import Config
from turnwise.config.tree import differences
from turnwise.evaluate.results import EvalResult
from turnwise.evaluate.statistics import Interval, mean_interval
from turnwise.log.store import RunReader
from turnwise.types import Json

PRIVATE = ("log.",)
"""Keys that say where a run is, not what it does."""


def config_differences(configs: Mapping[str, Config]) -> dict[str, list[Json]]:
    """Key -> its value in every config, for the keys that say what a run does.

    Example:
        >>> config_differences({"a": Config(), "b": Config(seed=1)})
        {'seed': [0, 1]}
    """
    found = differences(list(configs.values()))
    return {key: values for key, values in found.items() if not key.startswith(PRIVATE)}


def held_out(run: RunReader) -> EvalResult | None:
    """The run's last evaluation, from its stored episodes; None where there is none."""
    steps = run.steps(split="eval")
    if not steps:
        return None
    return EvalResult.of(run.path.name, run.episodes(steps[-1], split="eval"))


def over_seeds(values: Sequence[float]) -> Interval:
    """The mean over runs that differ in their seed alone, with Student's 95 % interval."""
    return mean_interval(values)
