"""Refusals that need no libraries: they come before the seconds that importing torch takes."""

from pathlib import Path

from turnwise.config.schema import GROUP_RELATIVE, Config
from turnwise.log.store import check_new_run
from turnwise.models.source import ask_hub, model_source


def refuse_early(config: Config, *, resume: Path | None = None, writes: bool = True) -> None:
    """Raises what is wrong with a run before anything of it is loaded.

    Args:
        resume: the run directory that goes on; it has its model already.
        writes: whether the run makes a run directory.

    Raises:
        ValueError: there is no such model, the hub does not answer, or the groups are too
            small to compare.
        RunDirectoryError: the run directory cannot be made.
    """
    if config.train.steps:
        refuse_lone_groups(config, compares_groups=config.algo.name in GROUP_RELATIVE)
    if resume is None:
        source = model_source(config.model)
        if writes:
            if source is not None:
                ask_hub(source)
            check_new_run(config.log)


def refuse_lone_groups(config: Config, *, compares_groups: bool) -> None:
    """Raises ValueError if the algorithm compares the episodes of a group and each is alone."""
    alone = config.rollout.train.group_size == 1 and config.algo.singleton == "error"
    if compares_groups and alone:
        raise ValueError(
            f"rollout.train.group_size=1: algo.name={config.algo.name!r} compares the episodes of "
            "a group; raise it, as in rollout.train.group_size=8, or set algo.singleton: zero"
        )
