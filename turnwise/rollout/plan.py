"""Plans the episodes of a rollout: groups, tags, tasks and seeds, all fixed before anything
runs."""

from collections.abc import Mapping
from dataclasses import dataclass

from turnwise.config.schema import Config, EnvConfig, GroupsConfig
from turnwise.envs.base import Env, EnvError, EnvTimeoutError
from turnwise.envs.gate import admit_task, ask, ask_within, read_count, words
from turnwise.procs.threads import SideThread
from turnwise.seeding import derive_seed
from turnwise.types import Task


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodePlan:
    """One episode before it is played.

    Example:
        >>> plan = EpisodePlan(env_id=5, group_id=1, index=1, tag="FrozenLake",
        ...     task=Task(id="t", seed=3),
        ...                    seed=11, noise_seed=12, episode_id="train-000000-g1-m1", max_turn=5)
        >>> plan.task.seed
        3
    """

    env_id: int
    """Position in the rollout, 0 to env_groups * group_size - 1."""
    group_id: int
    index: int
    """Index in the group."""
    tag: str
    task: Task
    """Shared by the members of a group."""
    seed: int
    """Seeds the sampling of the episode's tokens; differs between the members of a group."""
    noise_seed: int
    """Seeds the environment's own noise; differs between the members of a group."""
    episode_id: str
    max_turn: int
    error: str | None = None
    """Why the environment has no task for this seed. Only this episode fails."""


def divide_groups(groups: GroupsConfig) -> list[str]:
    """The tag of every group, in order. Without n_groups, groups are divided evenly; the first tags
    get the remainder.

    Example:
        >>> divide_groups(GroupsConfig(env_groups=3, group_size=2, tags=("a", "b")))
        ['a', 'a', 'b']
    """
    tags = groups.tags or ("",)
    share, rest = divmod(groups.env_groups, len(tags))
    counts = groups.n_groups or tuple(share + (index < rest) for index in range(len(tags)))
    return [tag for tag, count in zip(tags, counts, strict=True) for _ in range(count)]


def env_configs(config: Config, groups: GroupsConfig) -> dict[str, EnvConfig]:
    """The environment config of each tag of a rollout. A tag that is not a key of `envs` is an
    environment's name; it has the settings of `env` if that is the same environment.

    Example:
        >>> config = Config(envs={"lake": EnvConfig(name="frozen_lake", max_turn=3)})
        >>> env_configs(config, GroupsConfig(tags=("lake", "bandit"))) == {
        ...     "lake": config.envs["lake"], "bandit": EnvConfig(name="bandit")}
        True
    """
    found: dict[str, EnvConfig] = {}
    for tag in groups.tags or ("",):
        if not tag:
            found[config.env.name] = config.env
        elif tag in config.envs:
            found[tag] = config.envs[tag]
        else:
            found[tag] = EnvConfig(name=tag) if tag != config.env.name else config.env
    return found


def turn_limit(
    config: Config, env_config: EnvConfig, env: Env, *, thread: SideThread | None = None
) -> int:
    """Turns per episode: the lower of the config's limit and the environment's own.

    Args:
        thread: where the environment is asked, within `rollout.reset_timeout`. None: here.

    Raises:
        EnvError: the environment's own limit is none.
    """
    if not config.train.multi_turn or env_config.single_turn:
        return 1
    limit = env_config.max_turn or config.train.max_turn
    what = f"{env_config.name}: max_turns"
    if thread is None:
        own = ask(what, lambda: env.max_turns)
    else:
        seconds = config.rollout.reset_timeout
        own = ask_within(what, lambda: env.max_turns, thread=thread, limit=seconds)
    return limit if own is None else min(limit, read_count(own, what=what, least=1))


def turns_or_error(
    config: Config, env_config: EnvConfig, env: Env, *, thread: SideThread | None
) -> tuple[int, str | None]:
    """(the turns of `turn_limit`, None), or (1, the error)."""
    try:
        return turn_limit(config, env_config, env, thread=thread), None
    except EnvError as error:
        return 1, words(error) or "EnvError"


def plan_rollout(
    config: Config,
    *,
    split: str,
    step: int,
    probes: Mapping[str, Env],
    thread: SideThread | None = None,
) -> list[EpisodePlan]:
    """Every episode of one rollout. The same config, split and step give the same plan.

    Validation plans do not depend on the step: all evaluations of runs with the same seed play the
    same tasks, so that results can be compared pairwise.

    Args:
        probes: one environment per tag, to make tasks from seeds.
        thread: where they do so, each within `rollout.reset_timeout`. None: here, without a limit.
    """
    groups = config.rollout.train if split == "train" else config.rollout.val
    configs = env_configs(config, groups)
    moment = step if split == "train" else 0
    plans: list[EpisodePlan] = []
    stuck: dict[str, str] = {}
    turns: dict[str, tuple[int, str | None]] = {}  # asked once: an answer may take its whole limit
    for group_id, tag in enumerate(divide_groups(groups)):
        tag = tag or config.env.name
        probe = probes[tag]
        seed = derive_seed(config.seed, f"task/{split}", moment, group_id)
        task, error = task_of_seed(
            probe,
            seed,
            split,
            tag=tag,
            thread=thread,
            limit=config.rollout.reset_timeout,
            stuck=stuck,
        )
        max_turn = 1
        if error is None:
            if tag not in turns:
                turns[tag] = turns_or_error(config, configs[tag], probe, thread=thread)
            max_turn, error = turns[tag]
        for index in range(groups.group_size):
            plans.append(
                EpisodePlan(
                    env_id=group_id * groups.group_size + index,
                    group_id=group_id,
                    index=index,
                    tag=tag,
                    task=task,
                    seed=derive_seed(config.seed, f"tokens/{split}", moment, group_id, index),
                    noise_seed=derive_seed(config.seed, f"noise/{split}", moment, group_id, index),
                    episode_id=f"{split}-{step:06d}-g{group_id}-m{index}",
                    max_turn=max_turn,
                    error=error,
                )
            )
    return plans


def task_of_seed(
    probe: Env,
    seed: int,
    split: str,
    *,
    tag: str,
    thread: SideThread | None,
    limit: float,
    stuck: dict[str, str],
) -> tuple[Task, str | None]:
    """(the task of a seed, None), or (a task without a payload, the error).

    Args:
        thread: where it is made, within `limit` seconds. None: here, without a limit.
        stuck: errors of environments that were late, by tag. They are not asked again: each further
            task could take as long.
    """
    if tag in stuck:
        return _no_task(seed, split, tag=tag), stuck[tag]

    def make() -> Task:
        return admit_task(probe.make_task(seed, split), name=tag)

    what = f"{tag}: make_task"
    try:
        if thread is None:
            return ask(what, make), None
        return ask_within(what, make, thread=thread, limit=limit), None
    except EnvError as error:
        told = words(error) or "EnvError"
        if isinstance(error, EnvTimeoutError):
            stuck[tag] = told
        return _no_task(seed, split, tag=tag), told


def _no_task(seed: int, split: str, *, tag: str) -> Task:
    return Task(id=f"{tag}/{split}/{seed}", seed=seed, split=split)
