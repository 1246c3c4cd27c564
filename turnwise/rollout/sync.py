"""SyncMultiTurnRollout: episodes in lockstep, for engines that generate in batches."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from turnwise.chat.render import Tokenizer
from turnwise.config.load import load_config
from turnwise.config.schema import Config
from turnwise.data.batch import Batch
from turnwise.envs.base import EnvFactory, WaitingEnv
from turnwise.envs.gate import describe
from turnwise.generate.base import ContextOverflowError, Generator, Sampling, Session
from turnwise.procs.event_loop import EventLoop
from turnwise.procs.interrupts import interrupts
from turnwise.rollout.agents import Agent
from turnwise.rollout.context import ContextManager
from turnwise.rollout.env_state import EnvStateManager
from turnwise.rollout.outputs import EnvInput, EnvOutput, LmInput, LmOutput
from turnwise.rollout.proxy import ends_the_rollout, repair_groups, sampling_for
from turnwise.types import Completion, Episode, Status

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchRequest:
    """One sequence to continue.

    Example:
        >>> session = Session(key="a#0", seed=1)
        >>> BatchRequest(session=session, ids=(1, 2, 3), new_ids=(3,),
        ...     sampling=Sampling(max_tokens=8)).new_ids
        (3,)
    """

    session: Session
    ids: tuple[int, ...]
    """The whole context, for engines that keep nothing between calls."""
    new_ids: tuple[int, ...]
    """The new ids only, for engines that keep sessions."""
    sampling: Sampling


class BatchEngine(Protocol):
    """An engine that answers a whole batch at once."""

    @property
    def max_context(self) -> int: ...

    def generate_sequences(
        self, requests: Sequence[BatchRequest]
    ) -> Sequence[Completion | BaseException]:
        """The replies in the order of their requests. An exception in the place of a reply ends
        that episode alone."""
        ...


class SessionEngine:
    """A Generator as a batch engine: submits all requests and waits for all."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self._loop = EventLoop()

    @property
    def max_context(self) -> int:
        return self._generator.max_context

    def generate_sequences(
        self, requests: Sequence[BatchRequest]
    ) -> Sequence[Completion | BaseException]:
        async def run() -> list[Completion | BaseException]:
            jobs = (self._generator.generate(r.session, r.new_ids, r.sampling) for r in requests)
            return await asyncio.gather(*map(_outcome, jobs))

        return self._loop.run(run())

    def release(self, sessions: Sequence[Session]) -> None:
        async def run() -> None:
            for session in sessions:
                error = await _outcome(self._generator.release(session))
                if error is not None:
                    logger.warning("%s: closing failed: %s", session.key, describe(error))

        self._loop.run(run())


class SyncMultiTurnRollout:
    """Plays a batch of agents in lockstep: one generation call per turn for all that are still
    playing.

    For engines that only generate in batches. AgentProxy is faster if environments are slow.

    Args:
        actor_rollout_wg: the engine, either a BatchEngine or a Generator.
        cfg: a Config, or a mapping with any key names that `load_config` accepts (agent.max_turn,
            env_template, ...).
        processor: for multimodal models; must be None.
        agent_cls: the agent class. None: the one that `rollout.agent` names.
    """

    def __init__(
        self,
        actor_rollout_wg: BatchEngine | Generator,
        cfg: Config | Mapping[str, Any],
        tokenizer: Tokenizer,
        processor: object | None = None,
        agent_cls: type[Agent] | None = None,
        *,
        split: str = "train",
        factories: Mapping[str, EnvFactory] | None = None,
    ) -> None:
        if processor is not None:
            raise ValueError("SyncMultiTurnRollout supports text only: processor must be None")
        config = cfg if isinstance(cfg, Config) else load_config(cfg)
        if split == "train" and config.rollout.enough_groups is not None:
            raise ValueError(
                f"rollout.enough_groups = {config.rollout.enough_groups} cannot be honoured in "
                "lockstep, where all episodes play their turns together; remove it"
            )
        self._engine = _as_engine(actor_rollout_wg)
        self._config = config
        self._group_size = (
            config.rollout.train if split == "train" else config.rollout.val
        ).group_size
        self._sampling = sampling_for(config.rollout, split)
        self.env_state = EnvStateManager(
            config, split=split, factories=factories, agent_cls=agent_cls
        )
        for tag, probe in self.env_state.probes.items():
            if isinstance(probe, WaitingEnv):
                self.env_state.close()
                raise ValueError(
                    f"the agent {tag!r} calls the model when it likes, and cannot be played in "
                    "lockstep; use AgentProxy"
                )
        self.context = ContextManager(
            tokenizer, config.rollout, max_context=self._engine.max_context
        )
        self._ids: dict[int, tuple[int, ...]] = {}

    @property
    def engine(self) -> BatchEngine:
        """The generator."""
        return self._engine

    def reset(self) -> list[EnvOutput]:
        """Starts the next rollout; returns the environments' first states."""
        self._release()
        return self.env_state.reset()

    def rollout(self) -> list[EnvOutput]:
        """Plays every episode to its end; returns all final states. Resets first if that was not
        done."""
        if not self.env_state.agents or all(agent.done for agent in self.env_state.agents.values()):
            self.reset()
        live = [agent.env_output() for agent in self.env_state.agents.values() if not agent.done]
        while live:
            inputs = self._lm_inputs(live)
            if not inputs:
                break
            outputs = self._generate(inputs)
            live = self.env_state.step(self._env_inputs(outputs))
        for agent in self.env_state.agents.values():
            if agent.status is Status.TRUNCATED_TURNS:
                try:
                    agent.final_ids = self.context.final_ids(
                        agent.plan.env_id, agent.last_messages, agent.last_rewritten
                    )
                except Exception as error:
                    agent.fail(Status.GENERATOR_ERROR, error)
        return self.env_state.get_rollout_states()

    def episodes(self) -> list[Episode]:
        """The rollout's usable episodes: failed ones are dropped and their groups repaired."""
        kept, _ = repair_groups(
            self.env_state.episodes(), self._config.rollout, group_size=self._group_size
        )
        return kept

    def build_update_batch(self, *, pad_id: int = 0) -> Batch:
        """The rollout as a training batch."""
        return self.context.formulate_rollouts(self.episodes(), pad_id=pad_id)

    def close(self) -> None:
        self._release()
        self.env_state.close()

    def _lm_inputs(self, live: Sequence[EnvOutput]) -> list[LmInput]:
        inputs: list[LmInput] = []
        for output in live:
            try:
                inputs.extend(self.context.get_lm_inputs([output]))
            except Exception as error:  # this chat template may refuse the conversation
                self._end(output["env_id"], error)
        return inputs

    def _end(self, env_id: int, error: BaseException) -> None:
        """Ends one episode that cannot be continued."""
        if isinstance(error, ContextOverflowError):
            self.env_state.cut(env_id, Status.TRUNCATED_LENGTH, str(error))
        else:
            self.env_state.agents[env_id].fail(Status.GENERATOR_ERROR, error)

    def _env_inputs(self, outputs: Sequence[LmOutput]) -> list[EnvInput]:
        """The replies as text for the environments. An invalid reply fails only its episode."""
        inputs: list[EnvInput] = []
        for output in outputs:
            try:
                (env_input,) = self.context.get_env_inputs([output])
            except Exception as error:
                self._end(output.env_id, error)
            else:
                self._ids[output.env_id] += env_input.completion.ids
                inputs.append(env_input)
        return inputs

    def _generate(self, inputs: Sequence[LmInput]) -> list[LmOutput]:
        requests: list[BatchRequest] = []
        for lm_input in inputs:
            before = () if lm_input.restart else self._ids[lm_input.env_id]
            self._ids[lm_input.env_id] = before + lm_input.new_ids
            requests.append(
                BatchRequest(
                    session=lm_input.session,
                    ids=self._ids[lm_input.env_id],
                    new_ids=lm_input.new_ids,
                    sampling=replace(self._sampling, max_tokens=lm_input.max_tokens),
                )
            )
        start, started = time.time(), time.perf_counter()
        completions = self._engine.generate_sequences(requests)
        if len(completions) != len(requests):
            raise ValueError(f"the engine answered {len(completions)} of {len(requests)} requests")
        seconds = time.perf_counter() - started
        outputs: list[LmOutput] = []
        for lm_input, completion in zip(inputs, completions, strict=True):
            if isinstance(completion, BaseException):
                self._end(lm_input.env_id, completion)
                continue
            outputs.append(
                LmOutput(
                    env_id=lm_input.env_id, completion=completion, seconds=seconds, start=start
                )
            )
        stale = [lm_input.stale for lm_input in inputs if lm_input.stale is not None]
        if isinstance(self._engine, SessionEngine):
            self._engine.release(stale)
        return outputs

    def _release(self) -> None:
        sessions = [
            session for env_id in self._ids if (session := self.context.close(env_id)) is not None
        ]
        if isinstance(self._engine, SessionEngine):
            self._engine.release(sessions)
        self._ids = {}


async def _outcome(job: Awaitable[T]) -> T | BaseException:
    """The job's result, or the exception in its place."""
    before = interrupts()
    try:
        return await job
    except BaseException as error:
        if ends_the_rollout(error, before=before):
            raise
        return error


def _as_engine(engine: BatchEngine | Generator) -> BatchEngine:
    # Duck typing: users pass either kind, and need not inherit from our classes.
    if callable(getattr(engine, "generate_sequences", None)):
        return engine  # pyright: ignore[reportReturnType]
    return SessionEngine(engine)  # pyright: ignore[reportArgumentType]
