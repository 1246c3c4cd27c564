"""Runs beside each other: what their configs differ in, and how they did on shared tasks."""

from collections.abc import Sequence

from turnwise.inspect.episode_rows import number
from turnwise.inspect.folder import Skips, step_name
from turnwise.inspect.runs import Run
from turnwise.log.store import read_episode
from turnwise.types import Episode, Json


def compare_runs(runs: Sequence[Run]) -> dict[str, Json]:
    """The answer of /api/compare: the settings that differ, and paired tests of every other run
    with the first."""
    # These import numpy, so they are imported when runs are compared.
    from turnwise.evaluate.results import EvalResult, EvaluationError, compare
    from turnwise.evaluate.runs import config_differences

    skips = Skips()
    configs = {run.name: config for run in runs if (config := run.config(skips)[1]) is not None}
    settings = config_differences(configs) if len(configs) > 1 else {}
    results: dict[str, EvalResult] = {}
    for run in runs:
        try:
            episodes = _held_out(run, skips)
            if episodes:
                results[run.name] = EvalResult.of(run.name, episodes)
            else:
                skips.add(f"{run.name} has no evaluation")
        except EvaluationError as error:
            skips.add(str(error))
    pairs: list[dict[str, Json]] = []
    names = [run.name for run in runs if run.name in results]
    for other in names[1:]:
        try:
            found = compare(results[other], results[names[0]])
        except ValueError as error:
            skips.add(f"{other} and {names[0]} cannot be paired: {error}")
            continue
        interval = found.reward if found.success is None else found.success
        pairs.append(
            {
                "text": found.verdict(),
                "of": "reward" if found.success is None else "success",
                "runs": [other, names[0]],
                "difference": number(interval.estimate),
                "low": number(interval.low),
                "high": number(interval.high),
                "p": number(found.p),
                "tasks": found.tasks,
            }
        )
    return {
        "config": [
            {"key": key, "values": dict(zip(configs, values, strict=True))}
            for key, values in settings.items()
        ],
        "paired": pairs[0] if pairs else None,
        "pairs": pairs,
        "skipped": skips.words(),
    }


def _held_out(run: Run, skips: Skips) -> list[Episode]:
    """The episodes of the run's last evaluation."""
    steps = [file.step for file in run.folder.step_files("episodes") if file.split == "eval"]
    if not steps:
        return []
    name = step_name("episodes", "eval", steps[-1])
    return run.folder.rows(name, read_episode, skips, whole=True)
