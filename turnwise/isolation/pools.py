"""Where environments run: inline, in threads, or in worker processes that can be killed."""

import logging
from collections.abc import Mapping
from typing import Protocol, TypeVar

from turnwise.config.schema import EnvConfig, RolloutConfig
from turnwise.envs.base import Cut, Env, EnvFactory, Hint
from turnwise.envs.registry import is_ours, is_program, is_remote
from turnwise.isolation.local import LocalPool
from turnwise.isolation.measure import choose_isolation, factory_of
from turnwise.isolation.processes import ProcessPool
from turnwise.types import Json, Message, Observation, StepResult, Task
from turnwise.user_code import is_only_here

logger = logging.getLogger(__name__)
T = TypeVar("T")


class EnvHandle(Protocol):
    """An environment, in this process or another."""

    async def reset(self, task: Task, noise_seed: int) -> Observation: ...
    async def step(self, message: Message, said: object = None) -> StepResult:
        """`said` are the tokens of the message, for an environment in this process that wants
        them."""
        ...

    async def finish(self, why: Cut = "turns") -> StepResult: ...
    async def hint(self, what: Hint, seed: int) -> Json:
        """A hint for the next reply; None if the environment has none."""
        ...

    @property
    def env(self) -> Env | None:
        """The environment, after its first reset, if it is in this process."""
        ...

    async def close(self) -> None: ...


class EnvPool(Protocol):
    """Opens environments and owns their threads or processes."""

    def open(self, tag: str) -> EnvHandle: ...

    @property
    def places(self) -> int | None:
        """How many environments can be open at once; further ones wait in their reset. None: no
        limit."""
        ...

    def expect_together(self, count: int) -> None:
        """Announces that `count` environments will be open at once, so none may wait for another to
        end."""
        ...

    def facts(self) -> dict[str, Json]:
        """Where the environments run, their measured times, and counts of worker events."""
        ...

    async def close(self) -> None: ...


def open_pool(
    configs: Mapping[str, EnvConfig],
    config: RolloutConfig,
    *,
    factories: Mapping[str, EnvFactory] | None = None,
) -> EnvPool:
    """The pool for `rollout.isolation`. `auto` measures: cheap environments stay inline.

    Args:
        factories: environments given as objects rather than by name. They cannot move to another
            process.
    """
    given = {tag: factory_of(env) for tag, env in configs.items() if is_only_here(env.name)}
    given |= dict(factories or {})
    if config.isolation == "process" and given:
        raise ValueError(
            f"environments given as objects ({', '.join(given)}) cannot run in worker processes; "
            "register them by "
            "name, or set rollout.isolation to thread or inline"
        )
    served = [tag for tag, env in configs.items() if tag not in given and is_remote(env.name)]
    if config.isolation == "process" and served:
        raise ValueError(
            f"{', '.join(served)} runs in another process already; set rollout.isolation to auto "
            "or thread"
        )
    local = {tag: given.get(tag) or factory_of(env) for tag, env in configs.items()}
    programs = frozenset(
        tag for tag, env in configs.items() if tag not in given and is_program(env.name)
    )
    if programs and config.isolation == "process" and len(programs) < len(configs):
        raise ValueError(
            f"agents ({', '.join(sorted(programs))}) have processes of their own and cannot share "
            "a run with environments in worker processes; set rollout.isolation to auto, thread or "
            "inline"
        )
    kind, measured = config.isolation, dict[str, float]()
    if programs and kind in ("auto", "process"):
        kind = "inline" if len(programs) == len(configs) else "thread"
    if kind == "auto":
        kind, measured = choose_isolation(configs, config, factories=given)
    if kind == "process":
        pool = ProcessPool(configs, config)
    else:
        trusted = all(tag not in given and is_ours(env.name) for tag, env in configs.items())
        threads = config.num_workers if kind == "thread" else 0
        pool = LocalPool(local, config, threads=threads, trusted=trusted, waiting=programs)
    pool.measured = measured
    return pool
