"""Agent: one episode in progress, its environment and its history. `@register_agent` makes subclasses known by name."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from difflib import get_close_matches

from turnwise.envs.base import EnvError, EnvTimeoutError
from turnwise.isolation.pools import EnvHandle
from turnwise.rollout.outputs import EnvInput, EnvOutput, HistoryEntry
from turnwise.rollout.plan import EpisodePlan
from turnwise.types import Episode, Message, Observation, Status, StepResult, Turn

_agents: dict[str, type["Agent"]] = {}


def register_agent(name: str) -> Callable[[type["Agent"]], type["Agent"]]:
    """A decorator that makes an agent class known as `name` (config key rollout.agent).

    Example:
        >>> @register_agent("doctest-polite")
        ... class Polite(Agent):
        ...     def observe(self, messages):
        ...         return [replace(message, content="Please: " + message.content) for message in messages]
        >>> agent_class("doctest-polite") is Polite
        True
    """

    def register(cls: type["Agent"]) -> type["Agent"]:
        if _agents.setdefault(name, cls) is not cls:
            raise ValueError(f"an agent named {name!r} is registered already: {_agents[name].__qualname__}")
        return cls

    return register


def agent_class(name: str) -> type["Agent"]:
    """The agent class with this name."""
    if name not in _agents:
        near = get_close_matches(name, _agents, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; registered: {', '.join(sorted(_agents))}"
        raise ValueError(f"no agent is registered as {name!r}{hint}")
    return _agents[name]


@register_agent("default")
class Agent:
    """One episode in progress. Each agent manages its own environment and history.

    Subclasses override `observe` (what the model is shown of the environment's words) and `act` (what the environment
    is given of the model's). Neither can change what the model said: its tokens are kept apart.
    """

    def __init__(self, plan: EpisodePlan, handle: EnvHandle, *, attempts: int = 1) -> None:
        self.plan = plan
        self.handle = handle
        self.attempts = attempts
        self.status: Status | None = None
        self.error: str | None = None
        self.cause: Exception | None = None
        self.opening: Observation | None = None
        self.turns: list[Turn] = []
        self.final_ids: tuple[int, ...] = ()
        self._state_key = ""

    def observe(self, messages: Sequence[Message]) -> Sequence[Message]:
        """What the model is shown of the environment's messages."""
        return messages

    def act(self, text: str) -> str:
        """What the environment is given of the model's reply."""
        return text

    @property
    def done(self) -> bool:
        return self.status is not None

    @property
    def failed(self) -> bool:
        return self.status is not None and self.status.failed

    @property
    def last_messages(self) -> tuple[Message, ...]:
        """What the environment said last."""
        return self.turns[-1].messages if self.turns else ()

    async def reset(self) -> None:
        """Starts the episode. A failing environment ends it, with a Status."""
        try:
            opening = await self.handle.reset(self.plan.task, self.plan.noise_seed)
        except Exception as error:
            self.fail_env(error)
            return
        messages = tuple(self.observe(opening.messages))
        self.opening = opening if messages is opening.messages else replace(opening, messages=messages)
        self._state_key = opening.state_key or _text(messages)

    async def step(self, env_input: EnvInput) -> None:
        """Plays one reply. A failing environment ends the episode, with a Status."""
        started = time.perf_counter()
        try:
            result = await self.handle.step(Message(role="assistant", content=self.act(env_input.text)))
            ending = self._ending(result, env_input)
            if ending is not None and not result.done:
                result = _with_finish(result, await self.handle.finish())
        except Exception as error:
            self.fail_env(error)
            return
        messages = tuple(self.observe(result.messages))
        self.turns.append(
            Turn(
                prompt_ids=env_input.prompt_ids,
                completion=env_input.completion,
                text=env_input.text,
                restart=env_input.restart,
                action=result.action,
                messages=messages,
                reward=result.reward,
                reward_parts=result.reward_parts,
                state_key=self._state_key,
                info=result.info,
                generate_seconds=env_input.seconds,
                env_seconds=time.perf_counter() - started,
            )
        )
        self._state_key = result.state_key or _text(messages)
        self.status = ending

    async def cut(self, status: Status) -> None:
        """Ends the episode before its next turn, because no further token fits."""
        try:
            if self.turns:
                last = self.turns[-1]
                result = StepResult(messages=(), reward=last.reward, reward_parts=last.reward_parts, info=last.info)
                result = _with_finish(result, await self.handle.finish())
                self.turns[-1] = replace(last, reward=result.reward, reward_parts=result.reward_parts, info=result.info)
        except Exception as error:
            self.fail_env(error)
            return
        self.status = status

    def fail_env(self, error: Exception) -> None:
        """Ends the episode because its environment failed."""
        timed_out = isinstance(error, EnvTimeoutError)
        self.fail(Status.ENV_TIMEOUT if timed_out else Status.ENV_ERROR, error)

    def fail(self, status: Status, error: Exception) -> None:
        self.status = status
        self.cause = error
        self.error = str(error) if isinstance(error, EnvError) else f"{type(error).__name__}: {error}"

    def env_output(self) -> EnvOutput:
        """The agent's state as a plain dictionary."""
        history: list[HistoryEntry] = []
        opening = self.opening.messages if self.opening is not None else ()
        states = [opening, *(turn.messages for turn in self.turns)]
        for index, messages in enumerate(states):
            entry: HistoryEntry = {
                "state": _text(messages),
                "messages": [message.to_json() for message in messages],
                "actions_left": self.plan.max_turn - index,
            }
            if index < len(self.turns):
                turn = self.turns[index]
                entry["llm_response"] = turn.text
                entry["actions"] = [] if turn.action is None else [turn.action]
                entry["reward"] = turn.reward
                entry["info"] = dict(turn.info)
            history.append(entry)
        return {
            "env_id": self.plan.env_id,
            "group_id": self.plan.group_id,
            "tag": self.plan.tag,
            "history": history,
            "penalty": sum(turn.reward_parts.get("format", 0.0) for turn in self.turns),
            "done": self.done,
            "status": None if self.status is None else self.status.value,
        }

    def episode(self) -> Episode:
        """The finished episode."""
        if self.status is None:
            raise ValueError(f"episode {self.plan.episode_id} is still being played")
        return Episode(
            id=self.plan.episode_id,
            task=self.plan.task,
            group_id=self.plan.group_id,
            index=self.plan.index,
            tag=self.plan.tag,
            seed=self.plan.seed,
            noise_seed=self.plan.noise_seed,
            prompt=self.opening.messages if self.opening is not None else (),
            tools=self.opening.tools if self.opening is not None else (),
            turns=tuple(self.turns),
            status=self.status,
            final_ids=self.final_ids,
            error=self.error,
            attempts=self.attempts,
        )

    def _ending(self, result: StepResult, env_input: EnvInput) -> Status | None:
        if result.terminated:
            return Status.COMPLETED
        if env_input.context_full:
            return Status.TRUNCATED_LENGTH
        if result.truncated or len(self.turns) + 1 >= self.plan.max_turn:
            return Status.TRUNCATED_TURNS
        return None


def _with_finish(result: StepResult, finish: StepResult) -> StepResult:
    parts = dict(result.reward_parts)
    for name, value in finish.reward_parts.items():
        parts[name] = parts.get(name, 0.0) + value
    return replace(
        result,
        reward=result.reward + finish.reward,
        reward_parts=parts,
        info={**result.info, **finish.info},
    )


def _text(messages: Sequence[Message]) -> str:
    return "\n".join(message.content for message in messages if message.role != "system")
