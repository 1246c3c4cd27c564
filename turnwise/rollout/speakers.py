"""Speakers: the sources of replies in a rollout. The policy replies in tokens, other players in
messages."""

import time
from dataclasses import replace
from typing import Protocol

from turnwise.data.samples import path_ids
from turnwise.generate.base import Generator, Sampling
from turnwise.procs.deadlines import Deadlines
from turnwise.rollout.agents import Agent
from turnwise.rollout.context import ContextManager
from turnwise.rollout.outputs import EnvInput, LmOutput


class PlayerError(ValueError):
    """This player cannot play this environment. It fails the rollout, not an episode."""


class Speaker(Protocol):
    """Replies for the agents of many concurrent episodes."""

    def open(self, agent: Agent) -> None:
        """Called when the agent's episode begins, after the reset."""
        ...

    async def reply(self, agent: Agent) -> EnvInput:
        """The reply after the agent's last turn.

        Raises:
            ContextOverflowError: no token fits; the episode is cut.
            PlayerError: this player cannot play this environment; the rollout ends.
        """
        ...

    def final_ids(self, agent: Agent) -> tuple[int, ...]:
        """Ids of the environment's last messages, for the critic's value after a cut episode."""
        ...

    async def close(self, agent: Agent) -> None:
        """Called when the episode is over, even if it was never opened."""
        ...


class PolicySpeaker:
    """A policy whose tokens a generator samples. The context manager converts messages to ids and
    back."""

    def __init__(
        self, context: ContextManager, generator: Generator, sampling: Sampling, *, timeout: float
    ) -> None:
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
        start, started = time.time(), time.perf_counter()
        call = agent.call
        lm_input = self._context.next_input(
            agent.plan.env_id,
            agent.last_messages,
            agent.last_rewritten,
            call,
            path=None if call is None else lambda turn: path_ids(agent.turns, turn),
        )
        if lm_input.stale is not None:
            await self._generator.release(lm_input.stale)
        sampling, limit = self._sampling, lm_input.max_tokens
        if call is not None:
            if call.max_tokens is not None and call.max_tokens < limit:
                limit = lm_input.max_tokens = call.max_tokens
                lm_input.context_bound = False
            sampling = replace(sampling, stop=(*sampling.stop, *call.stop))
        if limit < sampling.max_tokens:
            sampling = replace(sampling, max_tokens=limit)
        new_ids = (*lm_input.prefix, *lm_input.new_ids) if lm_input.prefix else lm_input.new_ids
        job = self._generator.generate(lm_input.session, new_ids, sampling)
        completion = await self._deadlines.wait(job)
        output = LmOutput(
            env_id=agent.plan.env_id,
            completion=completion,
            seconds=time.perf_counter() - started,
            start=start,
        )
        (env_input,) = self._context.get_env_inputs([output])
        return env_input

    def final_ids(self, agent: Agent) -> tuple[int, ...]:
        parent = None if agent.call is None else agent.call.parent
        if parent is not None and parent != len(agent.turns) - 1:
            return ()  # the next turn would have been in another conversation
        return self._context.final_ids(agent.plan.env_id, agent.last_messages, agent.last_rewritten)

    async def close(self, agent: Agent) -> None:
        session = self._context.close(agent.plan.env_id)
        if session is not None:
            await self._generator.release(session)
