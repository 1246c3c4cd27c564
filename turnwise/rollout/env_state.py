"""EnvStateManager: the environments of a rollout, their groups, seeds and states."""

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from turnwise.config.schema import Config
from turnwise.envs.base import Env, EnvFactory
from turnwise.envs.registry import make_env
from turnwise.isolation.pools import open_pool
from turnwise.procs.event_loop import EventLoop
from turnwise.rollout.agents import Agent, agent_class
from turnwise.rollout.outputs import EnvInput, EnvOutput
from turnwise.rollout.plan import EpisodePlan, env_configs, plan_rollout
from turnwise.types import Episode, Json, Status


class EnvStateManager:
    """Holds one agent per episode of the current rollout.

    `reset`, `step` and `get_rollout_states` drive all environments in lockstep; the agents themselves (`start`,
    `restart`) are what AgentProxy plays one by one, without a barrier between episodes.
    """

    def __init__(
        self,
        config: Config,
        *,
        split: str = "train",
        factories: Mapping[str, EnvFactory] | None = None,
        agent_cls: type[Agent] | None = None,
    ) -> None:
        groups = config.rollout.train if split == "train" else config.rollout.val
        self.split = split
        self.agents: dict[int, Agent] = {}
        self.num_resets = 0
        """How many rollouts were started: the step of the next `reset`. Part of a checkpoint."""
        self._config = config
        self._agent_cls = agent_cls or agent_class(config.rollout.agent)
        self._loop = EventLoop()
        configs = env_configs(config, groups)
        given = dict(factories or {})
        self.probes: dict[str, Env] = {
            tag: given[tag]() if tag in given else make_env(env) for tag, env in configs.items()
        }
        """One environment per tag, which makes tasks and answers questions; it plays no episode."""
        self._pool = open_pool(configs, config.rollout, factories=given)

    def start(self, step: int) -> list[Agent]:
        """The agents of one rollout, none of them reset yet."""
        plans = plan_rollout(self._config, split=self.split, step=step, probes=self.probes)
        self.num_resets = step + 1
        self.agents = {plan.env_id: self._agent(plan) for plan in plans}
        return list(self.agents.values())

    def take(self, plans: Sequence[EpisodePlan]) -> list[Agent]:
        """Agents for exactly these plans, beside those that are there; their env_ids are the caller's to keep apart."""
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
        """Plays one reply in each of the environments given; returns the states of those that are not over."""
        moving = [self.agents[env_input.env_id] for env_input in env_inputs]
        steps = [agent.step(env_input) for agent, env_input in zip(moving, env_inputs, strict=True)]
        self._loop.run(_all(steps))
        return [agent.env_output() for agent in moving if not agent.done]

    def cut(self, env_id: int, status: Status) -> None:
        """Ends one episode before its next turn, because no further token fits."""
        self._loop.run(self.agents[env_id].cut(status))

    def get_rollout_states(self) -> list[EnvOutput]:
        """The states of all environments of the rollout, finished or not."""
        return [agent.env_output() for agent in self.agents.values()]

    def episodes(self) -> list[Episode]:
        """The rollout's finished episodes."""
        return [agent.episode() for agent in self.agents.values() if agent.done]

    def pool_facts(self) -> dict[str, Json]:
        """Where the environments run (isolation), what they were measured to take (ms_per_call), and how many workers
        were started, restarted, hung or died."""
        return self._pool.facts()

    async def aclose(self) -> None:
        """Closes every environment."""
        for agent in self.agents.values():
            await agent.handle.close()
        await self._pool.close()
        for probe in self.probes.values():
            probe.close()

    def close(self) -> None:
        self._loop.run(self.aclose())
        self._loop.close()

    def _agent(self, plan: EpisodePlan, *, attempts: int = 1) -> Agent:
        return self._agent_cls(plan, self._pool.open(plan.tag), attempts=attempts)


async def _all(jobs: Sequence[Coroutine[Any, Any, None]]) -> None:
    await asyncio.gather(*jobs)
