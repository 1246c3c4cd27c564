"""Where environments run: inline, in threads, or in worker processes that can be killed."""

import logging
from collections.abc import Mapping
from typing import Protocol, TypeVar

from turnwise.config.schema import EnvConfig, RolloutConfig
from turnwise.envs.base import Env, EnvFactory, Hint
from turnwise.envs.registry import find_env
from turnwise.isolation.local import LocalPool
from turnwise.isolation.measure import choose_isolation, factory_of
from turnwise.isolation.processes import ProcessPool
from turnwise.types import Json, Message, Observation, StepResult, Task

logger = logging.getLogger(__name__)
T = TypeVar("T")


class EnvHandle(Protocol):
    """An environment, wherever it runs."""

    async def reset(self, task: Task, noise_seed: int) -> Observation: ...
    async def step(self, message: Message) -> StepResult: ...
    async def finish(self) -> StepResult: ...
    async def hint(self, what: Hint, seed: int) -> Json:
        """What a player might do now; None where the environment does not know."""
        ...

    @property
    def env(self) -> Env | None:
        """The environment itself where it is in this process, once it was reset."""
        ...

    async def close(self) -> None: ...


class EnvPool(Protocol):
    """Opens environments and owns what they run in."""

    def open(self, tag: str) -> EnvHandle: ...
    def expect_together(self, count: int) -> None:
        """Says that `count` environments will be open at once, none of them waiting for another's end."""
        ...

    def facts(self) -> dict[str, Json]:
        """Where the environments run, what was measured of them, and what happened to worker processes."""
        ...

    async def close(self) -> None: ...


def open_pool(
    configs: Mapping[str, EnvConfig], config: RolloutConfig, *, factories: Mapping[str, EnvFactory] | None = None
) -> EnvPool:
    """The pool that `rollout.isolation` asks for. `auto` measures: cheap environments stay inline.

    Args:
        factories: environments given as objects rather than by name. They cannot move to another process.
    """
    given = dict(factories or {})
    if config.isolation == "process" and given:
        raise ValueError(
            f"environments given as objects ({', '.join(given)}) cannot run in worker processes; register them by "
            "name, or set rollout.isolation to thread or inline"
        )
    served = [tag for tag, env in configs.items() if tag not in given and find_env(env.name).name.startswith("remote")]
    if config.isolation == "process" and served:
        raise ValueError(
            f"{', '.join(served)} runs in another process already; set rollout.isolation to auto or thread"
        )
    local = {tag: given.get(tag) or factory_of(env) for tag, env in configs.items()}
    kind, measured = config.isolation, dict[str, float]()
    if kind == "auto":
        kind, measured = choose_isolation(configs, config, factories=given)
    if kind == "process":
        pool = ProcessPool(configs, config)
    else:
        pool = LocalPool(local, config, threads=config.num_workers if kind == "thread" else 0)
    pool.measured = measured
    return pool
