"""Speakers: who replies in a rollout's episodes. The policy speaks in tokens, any other player in messages."""

import time
from dataclasses import replace
from typing import Protocol

from turnwise.generate.base import Generator, Sampling
from turnwise.procs.deadlines import Deadlines
from turnwise.rollout.agents import Agent
from turnwise.rollout.context import ContextManager
from turnwise.rollout.outputs import EnvInput, LmOutput


class PlayerError(ValueError):
    """This player cannot play this environment at all: not an episode's failure, but the rollout's."""


class Speaker(Protocol):
    """Replies for agents, many episodes at once."""

    def open(self, agent: Agent) -> None:
        """The agent's episode begins; its opening is there."""
        ...

    async def reply(self, agent: Agent) -> EnvInput:
        """What is said after the agent's last turn.

        Raises:
            ContextOverflowError: nothing more fits; the episode is cut.
            PlayerError: this player cannot play here; the rollout ends.
        """
        ...

    def final_ids(self, agent: Agent) -> tuple[int, ...]:
        """Ids of what the environment said last, for the critic of an episode that was cut after its last turn."""
        ...

    async def close(self, agent: Agent) -> None:
        """The episode is over. May be called for one that was never opened."""
        ...


class PolicySpeaker:
    """A policy whose tokens a generator samples. The context manager turns messages into its ids and back."""

    def __init__(self, context: ContextManager, generator: Generator, sampling: Sampling, *, timeout: float) -> None:
        self._context = context
        self._generator = generator
        self._sampling = sampling
        self._deadlines = Deadlines(timeout)

    def open(self, agent: Agent) -> None:
        assert agent.opening is not None
        self._context.open(
            agent.plan.env_id,
            key=agent.plan.episode_id,
            seed=agent.plan.seed,
            prompt=agent.opening.messages,
            tools=agent.opening.tools,
        )

    async def reply(self, agent: Agent) -> EnvInput:
        started = time.perf_counter()
        lm_input = self._context.next_input(agent.plan.env_id, agent.last_messages)
        if lm_input.stale is not None:
            await self._generator.release(lm_input.stale)
        sampling = self._sampling
        if lm_input.max_tokens < sampling.max_tokens:
            sampling = replace(sampling, max_tokens=lm_input.max_tokens)
        job = self._generator.generate(lm_input.session, lm_input.new_ids, sampling)
        completion = await self._deadlines.wait(job)
        output = LmOutput(env_id=agent.plan.env_id, completion=completion, seconds=time.perf_counter() - started)
        (env_input,) = self._context.get_env_inputs([output])
        return env_input

    def final_ids(self, agent: Agent) -> tuple[int, ...]:
        return self._context.final_ids(agent.plan.env_id, agent.last_messages)

    async def close(self, agent: Agent) -> None:
        session = self._context.close(agent.plan.env_id)
        if session is not None:
            await self._generator.release(session)
