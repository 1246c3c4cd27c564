"""EnvStateManager: the environments of a rollout, their groups, seeds and states."""

import asyncio
import logging
import threading
from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

from turnwise.config.load import load_config
from turnwise.config.schema import Config
from turnwise.envs.base import Env, EnvError, EnvFactory
from turnwise.envs.gate import ask_within
from turnwise.envs.registry import make_env
from turnwise.envs.shaping import Overlong
from turnwise.isolation.pools import open_pool
from turnwise.procs.event_loop import EventLoop
from turnwise.procs.threads import SideThread
from turnwise.rollout.agents import Agent, agent_class, find_shaper
from turnwise.rollout.outputs import EnvInput, EnvOutput
from turnwise.rollout.plan import (
    EpisodePlan,
    env_configs,
    plan_rollout,
    task_of_seed,
    turns_or_error,
)
from turnwise.types import Episode, Status, Task

logger = logging.getLogger(__name__)


class EnvStateManager:
    """Holds one agent per episode of the current rollout.

    `reset`, `step` and `get_rollout_states` drive all environments in lockstep; the agents
    themselves (`start`, `restart`) are what AgentProxy plays one by one, without a barrier between
    episodes.

    Args:
        config: a Config, or a mapping in any spelling that `load_config` takes.
        mode: another name for `split`.
    """

    def __init__(
        self,
        config: Config | Mapping[str, Any],
        *,
        split: str | None = None,
        mode: str | None = None,
        factories: Mapping[str, EnvFactory] | None = None,
        agent_cls: type[Agent] | None = None,
    ) -> None:
        if mode is not None and split not in (None, mode):
            raise ValueError(f"mode = {mode!r} contradicts split = {split!r}; keep one")
        self.split = split or mode or "train"
        if self.split not in ("train", "val"):
            raise ValueError(f"split is train or val, got {self.split!r}")
        config = config if isinstance(config, Config) else load_config(config)
        groups = config.rollout.train if self.split == "train" else config.rollout.val
        self.agents: dict[int, Agent] = {}
        self.num_resets = 0
        """Number of rollouts started: the step of the next `reset`. Part of a checkpoint."""
        self._config = config
        self._agent_cls = agent_cls or agent_class(config.rollout.agent)
        self._loop = EventLoop()
        self._configs = configs = env_configs(config, groups)
        self._shapers = {
            tag: find_shaper(env.shaping.function)
            for tag, env in configs.items()
            if env.shaping.function is not None
        }
        limit = config.rollout.max_response_tokens
        self._overlong = {
            tag: Overlong(
                limit=limit,
                tokens=env.shaping.overlong_tokens,
                penalty=env.shaping.overlong_penalty,
            )
            for tag, env in configs.items()
            if env.shaping.overlong_tokens
        }
        given = dict(factories or {})
        self._beside = SideThread("turnwise-probe")
        self._stuck: dict[str, str] = {}
        self._stuck_step = -1
        # Made where they make tasks: what an environment opens may be bound to its thread.
        self.probes: dict[str, Env] = {
            tag: self._beside.call(
                given[tag] if tag in given else partial(make_env, env), threading.TIMEOUT_MAX
            )
            for tag, env in configs.items()
        }
        """One environment per tag, to make tasks and read limits; it plays no episode."""
        self._pool = open_pool(configs, config.rollout, factories=given)

    def start(self, step: int) -> list[Agent]:
        """The agents of one rollout, none of them reset yet."""
        plans = plan_rollout(
            self._config, split=self.split, step=step, probes=self.probes, thread=self._beside
        )
        self.num_resets = step + 1
        self.agents = {plan.env_id: self._agent(plan) for plan in plans}
        return list(self.agents.values())

    def task(self, tag: str, seed: int, *, step: int) -> tuple[Task, str | None]:
        """(the task of a seed, None), or (a task without a payload, the error), within
        `rollout.reset_timeout`. An environment that was late is not asked again in the same
        step."""
        if step != self._stuck_step:
            self._stuck, self._stuck_step = {}, step
        return task_of_seed(
            self.probes[tag],
            seed,
            self.split,
            tag=tag,
            thread=self._beside,
            limit=self._config.rollout.reset_timeout,
            stuck=self._stuck,
        )

    def turns(self, tag: str) -> tuple[int, str | None]:
        """(the turns per episode, None), or (1, the error), within `rollout.reset_timeout`."""
        env_config = self._configs[tag]
        return turns_or_error(self._config, env_config, self.probes[tag], thread=self._beside)

    def take(self, plans: Sequence[EpisodePlan]) -> list[Agent]:
        """Agents for exactly these plans, besides the existing agents. The caller must keep env_ids
        distinct."""
        taken = {plan.env_id: self._agent(plan) for plan in plans}
        self.agents |= taken
        return list(taken.values())

    def restart(self, env_id: int, *, count: bool = True) -> Agent:
        """A new agent with a fresh environment for the same episode: same task, same seeds."""
        old = self.agents[env_id]
        self.agents[env_id] = self._agent(old.plan, attempts=old.attempts + count)
        return self.agents[env_id]

    def reset(self) -> list[EnvOutput]:
        """Starts the next rollout and resets all its environments; returns their first states."""
        agents = self.start(self.num_resets)
        self._pool.expect_together(len(agents))
        self._loop.run(_all([agent.reset() for agent in agents]))
        return [agent.env_output() for agent in agents]

    def step(self, env_inputs: Sequence[EnvInput]) -> list[EnvOutput]:
        """Plays one reply in each of the given environments; returns the states of those that are
        not over."""
        moving = [self.agents[env_input.env_id] for env_input in env_inputs]
        steps = [agent.step(env_input) for agent, env_input in zip(moving, env_inputs, strict=True)]
        self._loop.run(_all(steps))
        return [agent.env_output() for agent in moving if not agent.done]

    def cut(self, env_id: int, status: Status, reason: str) -> None:
        """Ends one episode before its next turn, because no further token fits."""
        self._loop.run(self.agents[env_id].cut(status, reason))

    def get_rollout_states(self) -> list[EnvOutput]:
        """The states of all environments of the rollout, finished or not."""
        return [agent.env_output() for agent in self.agents.values()]

    def episodes(self) -> list[Episode]:
        """The rollout's finished episodes."""
        return [agent.episode() for agent in self.agents.values() if agent.done]

    async def aclose(self) -> None:
        """Closes every environment."""
        for agent in self.agents.values():
            try:
                await agent.handle.close()
            except EnvError as error:  # close the others too
                logger.warning("closing the environment of %s: %s", agent.plan.episode_id, error)
        await self._pool.close()
        for tag, probe in self.probes.items():
            try:
                limit = self._config.rollout.step_timeout
                ask_within(f"{tag}: close", probe.close, thread=self._beside, limit=limit)
            except EnvError as error:
                logger.warning("%s", error)
        self._beside.close()

    def close(self) -> None:
        self._loop.run(self.aclose())
        self._loop.close()

    def _agent(self, plan: EpisodePlan, *, attempts: int = 1) -> Agent:
        agent = self._agent_cls(plan, self._pool.open(plan.tag), attempts=attempts)
        agent.shaper = self._shapers.get(plan.tag)
        agent.overlong = self._overlong.get(plan.tag)
        return agent


async def _all(jobs: Sequence[Coroutine[Any, Any, None]]) -> None:
    await asyncio.gather(*jobs)
