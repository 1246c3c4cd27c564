# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
"""EnvSource: any supported environment as tasks to train on, and as a factory of environments to
play them in."""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeGuard, TypeVar

from turnwise.config.schema import EnvConfig
from turnwise.envs.adapters import as_env
from turnwise.envs.any_object import looks_like_env
from turnwise.envs.base import BaseEnv, Env, EnvError, EnvTimeoutError
from turnwise.envs.data_rows import prompt_messages
from turnwise.envs.gate import admit_observation, admit_task, json_safe, read_count
from turnwise.envs.messages import MultiTurnEnv
from turnwise.envs.registry import find_env, make_env
from turnwise.integrations.trl.factory_env import WHICH, FactoryTurns
from turnwise.integrations.trl.guard import SECONDS, guarded
from turnwise.integrations.verifiers.environments import (
    is_legacy_environment,
    is_taskset,
    verifiers_source,
)
from turnwise.seeding import derive_seed
from turnwise.types import Episode, Json, Observation, Task

ROW = "turnwise_row"
"""The column of TRL's data set that says which task a row is."""
SPLIT = "turnwise_split"
COLUMNS = "turnwise_columns"
"""The column with the whole row, where the rows are streamed."""
Row = Mapping[str, Json]
T = TypeVar("T")


@dataclass(slots=True)
class Stream:
    """Rows of an iterable data set: those of the batch at hand, by number."""

    dataset: Any
    known: dict[int, Row]

    def __len__(self) -> int:
        return len(self.known)

    def __getitem__(self, number: int) -> Row:
        return self.known[number]


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
    rows: dict[str, Sequence[Row] | Stream | None]
    """By split; None where tasks are drawn by seed."""
    text_splits: set[str] = field(default_factory=set[str])
    """Splits that the user gave with prompts of plain text: reward functions then get text."""
    instances: dict[int, object] = field(default_factory=dict[int, object])
    """Objects of a class in the style of `environment_factory`, by the noise seed of their
    episode."""
    seed: int = 0
    num_tasks: int = 1024
    groups: int | None = None
    """Tasks per step, where tasks are drawn as the native trainer draws them: by step and group."""
    original: object = None
    """The environment as it was given."""
    score_group: Callable[[Sequence[Episode]], list[Episode]] | None = None
    """Gives the usable episodes of a group their rewards, where these are only known together."""
    texts: bool = False
    """Prompts are texts to continue: TRL encodes them as they are, without a chat template."""
    close: Callable[[], None] | None = None
    """Stops what the environments share."""
    timeout: float = SECONDS
    """Seconds for one call of an environment outside its episodes."""

    _probe: Env | None = field(default=None, init=False)

    @property
    def probe(self) -> Env:
        """An environment that makes tasks and plays no episode of the run."""
        if self._probe is None:
            self._probe = self.ask("making it", self.factory)
        return self._probe

    @property
    def max_turns(self) -> int | None:
        """The environment's own limit on turns."""
        probe = self.probe
        own = self.ask("max_turns", lambda: probe.max_turns)
        return None if own is None else read_count(own, what=f"{self.name}: max_turns", least=1)

    def ask(self, what: str, function: Callable[[], T]) -> T:
        """The result of the environment's code. Whatever it raises is an EnvError that names the
        environment, and so is a call that takes longer than `timeout`."""
        return guarded(f"{self.name}: {what}", function, limit=self.timeout)

    def length(self, split: str) -> int:
        rows = self.rows.get(split)
        return self.num_tasks if rows is None else len(rows)

    def columns(self, split: str, number: int) -> dict[str, Json]:
        """Arguments of reward functions about a task, besides prompt and completion."""
        rows = self.rows.get(split)
        return (
            {}
            if rows is None
            else {key: value for key, value in rows[number].items() if key != "prompt"}
        )

    def task(self, split: str, number: int) -> Task:
        """Task number `number` of a split: the same one whenever it is asked for."""
        rows = self.rows.get(split)
        indices = (number,) if self.groups is None else divmod(number, self.groups)
        seed = derive_seed(self.seed, f"task/{split}", *indices)
        if rows is None:
            probe = self.probe
            return self.ask(
                "make_task", lambda: admit_task(probe.make_task(seed, split), name=self.name)
            )
        payload = json_safe(dict(rows[number]))
        return Task(id=f"{self.name}/{split}/{number}", seed=seed, payload=payload, split=split)

    def openings(self, split: str, *, limit: int | None = None) -> Iterator[Observation]:
        """The openings of the first tasks of a split, the system message included."""
        env = self.ask("making it", self.factory)
        try:
            rows = self.rows.get(split)
            numbers = rows.known if isinstance(rows, Stream) else range(self.length(split))
            for number in islice(numbers, limit):
                yield self.opening(env, split, number)
        except EnvTimeoutError:
            raise  # it is still busy, and closing it could take as long
        except BaseException:
            with suppress(EnvError):
                self.ask("close", env.close)
            raise
        self.ask("close", env.close)

    def opening(self, env: Env, split: str, number: int) -> Observation:
        """The opening of one task, played in `env`."""
        task = self.task(split, number)
        return self.ask("reset", lambda: admit_observation(env.reset(task), name=self.name))

    def placeholder(self, split: str, number: int) -> list[dict[str, Json]]:
        """The prompt as far as it is known without a reset. Once played, the real opening takes its
        place."""
        rows = self.rows.get(split)
        found = prompt_messages(rows[number], name=self.name) if rows is not None else []
        return found or [{"role": "user", "content": f"{self.name}: task {number}"}]

    def use_rows(self, split: str, rows: Any, *, name: str) -> None:
        """Takes the tasks of a split from a data set that the user gave as the argument `name`."""
        if not hasattr(rows, "__len__"):
            if not hasattr(rows, "map"):
                raise ValueError(
                    f"{name} is a data set or an iterable data set of the library datasets, or a "
                    f"list of rows, got {type(rows).__name__}"
                )
            rows = Stream(rows, dict(enumerate(islice(rows, 1))))
        if len(rows) == 0:
            raise ValueError(f"{name} is empty")
        self._check_rows(rows, name)
        self.rows[split] = rows
        if isinstance(rows[0].get("prompt"), str):
            self.text_splits.add(split)

    def _check_rows(self, rows: Any, name: str) -> None:
        """Raises ValueError where a column is missing without which no episode can begin."""
        if not isinstance(rows[0], Mapping):
            raise ValueError(f"a row of {name} is a dict, got {type(rows[0]).__name__}")
        columns = ", ".join(rows[0])
        if isinstance(self.original, MultiTurnEnv) and not prompt_messages(rows[0], name=name):
            raise ValueError(f"{name} has no column 'prompt'; its columns are {columns}")
        if isinstance(self.original, Mapping):
            missing = {row.get(WHICH) for row in rows} if not isinstance(rows, Stream) else set()
            missing -= set(self.original)
            if missing:
                raise ValueError(
                    f"the column {WHICH!r} of {name} says which of env's classes "
                    f"({', '.join(self.original)}) plays a row, got {sorted(map(str, missing))}"
                )

    def remember(self, inputs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The rows of TRL's batch; those of a stream are kept until the next batch."""
        if COLUMNS in inputs[0]:
            stream = self.rows[inputs[0][SPLIT]]
            assert isinstance(stream, Stream)
            stream.known = {row[ROW]: row[COLUMNS] for row in inputs}
        return [{key: row[key] for key in row if key != COLUMNS} for row in inputs]


def make_source(
    env: object, *, seed: int = 0, num_tasks: int = 1024, config: EnvConfig | None = None
) -> EnvSource:
    """The source that an environment is: a registered name, a turnwise environment, a class in the
    style of TRL's `environment_factory`, an environment of verifiers up to 0.3.1, or a taskset of
    verifiers 0.4.

    Example:
        >>> source = make_source("bandit", num_tasks=3)
        >>> source.length("train"), source.task("train", 2) == source.task("train", 2)
        (3, True)
    """
    if isinstance(env, EnvSource):
        return env
    rows: dict[str, Sequence[Row] | Stream | None] = {"train": None, "val": None}
    shared: dict[str, Any] = {"seed": seed, "num_tasks": num_tasks, "original": env}
    if isinstance(env, str):
        config = (config or EnvConfig()).model_copy(update={"name": env})
        name = env if ":" in env else find_env(env).name
        return EnvSource(
            name=name,
            factory=lambda: make_env(config),
            config=config,
            by_name=True,
            rows=rows,
            **shared,
        )
    name = env.__name__ if inspect.isclass(env) else type(env).__name__
    if inspect.isroutine(env):
        raise EnvError(
            f"env is a function ({env.__name__}); a reward function goes into reward_funcs"
        )
    if isinstance(env, Mapping):
        name = "-".join(map(str, env))
    config = (config or EnvConfig()).model_copy(update={"name": name})
    if is_legacy_environment(env) or is_taskset(env):
        found = verifiers_source(env)
        factory = found.factory
        rows.update(found.rows)
        shared |= {"score_group": found.score_group, "texts": found.texts, "close": found.close}
    elif isinstance(env, MultiTurnEnv):
        factory = lambda: as_env(env, config=config, name=name)  # noqa: E731
        rows = {split: _own_rows(env, split) for split in ("train", "val")}
    elif _in_trls_style(env):
        shared["instances"] = instances = dict[int, object]()
        factory = lambda: FactoryTurns(env, name=name, instances=instances)  # noqa: E731
        # Refuses what is no environment, before anything else happens.
        guarded(f"{name}: making it", factory)
    else:
        factory = _from_object(env, config, name)
    return EnvSource(name=name, factory=factory, config=config, rows=rows, **shared)


def _own_rows(env: MultiTurnEnv, split: str) -> list[dict[str, Json]] | None:
    rows = env.rows(split)
    if rows is not None and not rows and split == "train":
        raise EnvError(
            f"{type(env).__name__}: the data set has no row to train on; give more rows or "
            "val_fraction=0"
        )
    return rows


def _in_trls_style(env: object) -> TypeGuard[type | Mapping[str, type]]:
    """True for a class that is not one of turnwise's environments and has no `step`, and for a
    dict of such classes by name."""
    if isinstance(env, Mapping):
        return True
    return (
        inspect.isclass(env)
        and not issubclass(env, BaseEnv | MultiTurnEnv)
        and not looks_like_env(env)
    )


def _from_object(env: object, config: EnvConfig, name: str) -> Callable[[], Env]:
    """A factory that gives every episode an environment of its own."""
    if inspect.isclass(env):
        return lambda: as_env(env(), config=config, name=name)
    # Refuses what is no environment, before anything else happens.
    guarded(f"{name}: reading it", lambda: as_env(env, config=config, name=name))
    return lambda: as_env(copy.deepcopy(env), config=config, name=name)
