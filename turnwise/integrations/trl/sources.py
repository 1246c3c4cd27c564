"""EnvSource: any supported environment as tasks to train on, and as a factory of environments to play them in."""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from turnwise.config.schema import EnvConfig
from turnwise.envs.adapters import as_env
from turnwise.envs.any_object import looks_like_env
from turnwise.envs.base import BaseEnv, Env, EnvError
from turnwise.envs.data_rows import prompt_messages
from turnwise.envs.messages import MultiTurnEnv
from turnwise.envs.registry import find_env, make_env
from turnwise.envs.validate import json_safe
from turnwise.integrations.trl.factory_env import FactoryTurns
from turnwise.integrations.verifiers.environments import (
    is_legacy_environment,
    is_taskset,
    legacy_source,
    taskset_source,
)
from turnwise.seeding import derive_seed
from turnwise.types import Json, Observation, Task

ROW = "turnwise_row"
"""The column of TRL's data set that says which task a row is."""
Row = Mapping[str, Json]


@dataclass(kw_only=True, slots=True)
class EnvSource:
    """Tasks and environments of one run.

    Tasks are rows: of the environment's own data set, of one that the user gave, or drawn by seed.
    """

    name: str
    factory: Callable[[], Env]
    config: EnvConfig
    by_name: bool = False
    """A registered name: rollouts may then run it in worker processes."""
    rows: dict[str, Sequence[Row] | None]
    """By split; None where tasks are drawn by seed."""
    seed: int = 0
    num_tasks: int = 1024
    groups: int | None = None
    """Tasks per step, where tasks are drawn as the native trainer draws them: by step and group."""
    original: object = None
    """The environment as it was given."""

    _probe: Env | None = field(default=None, init=False)

    @property
    def probe(self) -> Env:
        """An environment that makes tasks and plays no episode of the run."""
        if self._probe is None:
            self._probe = self.factory()
        return self._probe

    def length(self, split: str) -> int:
        rows = self.rows.get(split)
        return self.num_tasks if rows is None else len(rows)

    def columns(self, split: str, number: int) -> dict[str, Json]:
        """What reward functions are told about a task, beside prompt and completion."""
        rows = self.rows.get(split)
        return {} if rows is None else {key: value for key, value in rows[number].items() if key != "prompt"}

    def task(self, split: str, number: int) -> Task:
        """Task number `number` of a split: the same one whenever it is asked for."""
        rows = self.rows.get(split)
        indices = (number,) if self.groups is None else divmod(number, self.groups)
        seed = derive_seed(self.seed, f"task/{split}", *indices)
        if rows is None:
            return self.probe.make_task(seed, split)
        payload = json_safe(dict(rows[number]))
        return Task(id=f"{self.name}/{split}/{number}", seed=seed, payload=payload, split=split)

    def openings(self, split: str, *, limit: int | None = None) -> Iterator[Observation]:
        """What the first tasks of a split show before the first turn, the system message included."""
        env = self.factory()
        try:
            count = self.length(split)
            for number in range(count if limit is None else min(limit, count)):
                yield env.reset(self.task(split, number))
        finally:
            env.close()

    def placeholder(self, split: str, number: int) -> list[dict[str, Json]]:
        """The prompt as far as it is known without a reset. Once played, the real opening takes its place."""
        rows = self.rows.get(split)
        found = prompt_messages(rows[number], name=self.name) if rows is not None else []
        return found or [{"role": "user", "content": f"{self.name}: task {number}"}]

    def use_rows(self, split: str, rows: Any) -> None:
        """Takes the tasks of a split from a data set that the user gave."""
        if len(rows) == 0:
            raise ValueError(f"the {split} data set is empty")
        self.rows[split] = rows


def make_source(env: object, *, seed: int = 0, num_tasks: int = 1024, config: EnvConfig | None = None) -> EnvSource:
    """The source that an environment is: a registered name, a turnwise environment, a class in the style of TRL's
    `environment_factory`, an environment of verifiers up to 0.3.1, or a taskset of verifiers 0.4.

    Example:
        >>> source = make_source("bandit", num_tasks=3)
        >>> source.length("train"), source.task("train", 2) == source.task("train", 2)
        (3, True)
    """
    if isinstance(env, EnvSource):
        return env
    shared: dict[str, Any] = {"seed": seed, "num_tasks": num_tasks, "original": env}
    if isinstance(env, str):
        config = (config or EnvConfig()).model_copy(update={"name": env})
        name = env if ":" in env else find_env(env).name
        drawn: dict[str, Sequence[Row] | None] = {"train": None, "val": None}
        return EnvSource(name=name, factory=lambda: make_env(config), config=config, by_name=True, rows=drawn, **shared)
    name = env.__name__ if inspect.isclass(env) else type(env).__name__
    config = (config or EnvConfig()).model_copy(update={"name": name})
    if is_legacy_environment(env):
        factory, rows = legacy_source(env)
    elif is_taskset(env):
        factory, rows = taskset_source(env)
    elif isinstance(env, MultiTurnEnv):
        factory = lambda: as_env(env, config=config, name=name)  # noqa: E731
        rows = {split: _own_rows(env, split) for split in ("train", "val")}
    else:
        factory, rows = _from_object(env, config, name), {"train": None, "val": None}
    return EnvSource(name=name, factory=factory, config=config, rows=rows, **shared)


def _own_rows(env: MultiTurnEnv, split: str) -> list[dict[str, Json]] | None:
    rows = env.rows(split)
    if rows is not None and not rows and split == "train":
        raise EnvError(f"{type(env).__name__}: the data set has no row to train on; give more rows or val_fraction=0")
    return rows


def _from_object(env: object, config: EnvConfig, name: str) -> Callable[[], Env]:
    """A factory that gives every episode an environment of its own."""
    if inspect.isclass(env) and not issubclass(env, BaseEnv | MultiTurnEnv) and not looks_like_env(env):
        if not callable(getattr(env, "reset", None)):
            raise EnvError(f"{name} is no environment: a class needs reset, and either step or methods that are tools")
        return lambda: FactoryTurns(env, name=name)
    if inspect.isclass(env):
        return lambda: as_env(env(), config=config, name=name)
    as_env(env, config=config, name=name)  # refuses what is no environment, before anything else happens
    return lambda: as_env(copy.deepcopy(env), config=config, name=name)
