"""Agent: one episode in progress, its environment and its history. `@register_agent` registers
subclasses by name."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

from turnwise.envs.base import Cut, EnvError, EnvTimeoutError
from turnwise.envs.gate import (
    ask,
    clean_text,
    raised_at,
    read_messages,
    read_reward,
    read_text,
    words,
)
from turnwise.envs.shaping import Overlong
from turnwise.isolation.pools import EnvHandle
from turnwise.rollout.outputs import EnvInput, EnvOutput, HistoryEntry
from turnwise.rollout.plan import EpisodePlan
from turnwise.types import LATER, Call, Episode, Message, Observation, Status, StepResult, Turn
from turnwise.user_code import find_part, register_part, wanted_arguments


def register_agent(name: str) -> Callable[[type["Agent"]], type["Agent"]]:
    """A decorator that registers an agent class as `name` (config key rollout.agent).

    Example:
        >>> @register_agent("doctest-polite")
        ... class Polite(Agent):
        ...     def observe(self, messages):
        ...         return [replace(message, content="Please: " + message.content)
        ...                 for message in messages]
        >>> agent_class("doctest-polite") is Polite
        True
    """
    return cast("Callable[[type[Agent]], type[Agent]]", register_part("agent", name))


def agent_class(name: str) -> type["Agent"]:
    """The agent class with this name: registered, or `file.py:Class`."""
    found = find_part("agent", name)
    if not (isinstance(found, type) and issubclass(found, Agent)):
        raise ValueError(f"rollout.agent {name!r} must be a subclass of turnwise.Agent")
    return found


SHAPER_ARGUMENTS = ("text", "action", "reward", "reward_parts", "info", "turn", "done")
"""Names of the arguments that a reward shaper may take."""
Shaper = Callable[..., float]


def find_shaper(name: str) -> Shaper:
    """The reward shaper with this name: registered, or `file.py:function`.

    Raises:
        ValueError: it is not a function, or takes an unknown argument.
    """
    found = find_part("shaper", name)
    if not callable(found):
        raise ValueError(f"a reward shaper is a function, and {name!r} is not")
    wanted_arguments(found, dict.fromkeys(SHAPER_ARGUMENTS))
    return cast(Shaper, found)


@register_agent("default")
class Agent:
    """One episode in progress. Each agent manages its own environment and history.

    Subclasses override `observe` (changes the environment's messages for the model) and `act`
    (changes the model's text for the environment). Neither can change the sampled tokens, which are
    stored separately.
    """

    def __init__(self, plan: EpisodePlan, handle: EnvHandle, *, attempts: int = 1) -> None:
        self.plan = plan
        self.handle = handle
        self.attempts = attempts
        self.shaper: Shaper | None = None
        """Adds to the reward of every turn; the config's `env.shaping.function`."""
        self.overlong: Overlong | None = None
        """Punishes long replies; the config's `env.shaping.overlong_tokens`."""
        self.status: Status | None = None
        self.error: str | None = None
        self.cause: BaseException | None = None
        self.opening: Observation | None = None
        self.turns: list[Turn] = []
        self.final_ids: tuple[int, ...] = ()
        self.call: Call | None = None
        """How the next turn is played, where it does not just continue the last one."""
        self._state_key = ""
        self._reset_start: float | None = None
        self._reset_seconds = 0.0

    def observe(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The environment's messages, as the model sees them; the whole conversation, if the
        environment rewrote it."""
        return messages

    def act(self, text: str) -> str:
        """The model's reply, as the environment sees it."""
        return text

    @property
    def done(self) -> bool:
        return self.status is not None

    @property
    def failed(self) -> bool:
        return self.status is not None and self.status.failed

    @property
    def last_messages(self) -> tuple[Message, ...]:
        """The environment's last messages."""
        return self.turns[-1].messages if self.turns else ()

    @property
    def last_rewritten(self) -> Observation | None:
        """The conversation that the environment put in place of the old one in the last turn."""
        return self.turns[-1].rewritten if self.turns else None

    async def reset(self) -> None:
        """Starts the episode. If the environment fails, the episode ends with a Status."""
        self._reset_start, started = time.time(), time.perf_counter()
        try:
            if self.plan.error is not None:
                raise EnvError(self.plan.error)
            opening = await self.handle.reset(self.plan.task, self.plan.noise_seed)
            messages = self._observed(opening.messages)
            _check_parent(opening.call, 0)
        except Exception as error:
            self.fail_env(error)
            return
        finally:
            self._reset_seconds = time.perf_counter() - started
        self.opening = (
            opening if messages is opening.messages else replace(opening, messages=messages)
        )
        self.call = opening.call
        self._state_key = opening.state_key or _text(messages)

    async def step(self, env_input: EnvInput) -> None:
        """Plays one reply. If the environment fails, the episode ends with a Status."""
        start, started = time.time(), time.perf_counter()
        try:
            act = "the agent's act"
            said = ask(
                act, lambda: read_text(self.act(env_input.text), what=f"the result of {act}")
            )
            result = await self.handle.step(Message(role="assistant", content=said), env_input)
            ending = self._ending(result, env_input)
            if ending is not None and not result.done:
                why: Cut = "length" if ending is Status.TRUNCATED_LENGTH else "turns"
                result = _with_finish(result, await self.handle.finish(why))
            if self.overlong is not None:
                result = self.overlong.applied(result, len(env_input.completion.ids))
            if self.shaper is not None:
                result = shaped(
                    result, self.shaper, env_input.text, turn=len(self.turns), over=ending
                )
            messages = self._observed(result.messages)
            rewritten = result.rewritten
            if rewritten is not None:
                rewritten = replace(rewritten, messages=self._observed(rewritten.messages))
            turn = Turn(
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
                rewritten=rewritten,
                generate_seconds=env_input.seconds,
                env_seconds=time.perf_counter() - started,
                generate_start=env_input.start,
                env_start=start,
                parent=env_input.parent,
                role="" if self.call is None else self.call.role,
                trained=result.trained and env_input.trained,
            )
            turns = _with_earlier([*self.turns, turn], result)
            _check_parent(result.call, len(turns))
        except Exception as error:
            self.fail_env(error)
            return
        self.turns = turns
        self.call = result.call
        self._state_key = result.state_key or _text(messages)
        self.status = ending

    async def cut(self, status: Status, reason: str) -> None:
        """Ends the episode before its next turn, because no further token fits. An episode without
        a turn keeps the reason as its error."""
        try:
            if self.turns:
                last = self.turns[-1]
                result = StepResult(
                    messages=(), reward=last.reward, reward_parts=last.reward_parts, info=last.info
                )
                result = _with_finish(result, await self.handle.finish("length"))
                last = replace(
                    last, reward=result.reward, reward_parts=result.reward_parts, info=result.info
                )
                self.turns = _with_earlier([*self.turns[:-1], last], result)
            else:
                self.error = clean_text(reason)
        except Exception as error:
            self.fail_env(error)
            return
        self.status = status

    def fail_env(self, error: Exception) -> None:
        """Ends the episode because its environment failed."""
        timed_out = isinstance(error, EnvTimeoutError)
        self.fail(Status.ENV_TIMEOUT if timed_out else Status.ENV_ERROR, error)

    def fail(self, status: Status, error: BaseException) -> None:
        self.status = status
        self.cause = error
        text = words(error) if isinstance(error, EnvError) else ""
        self.error = text or raised_at(error)

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
            if index and (rewritten := self.turns[index - 1].rewritten) is not None:
                entry["rewritten"] = rewritten.to_json()
            history.append(entry)
        return {
            "env_id": self.plan.env_id,
            "episode_id": self.plan.episode_id,
            "seed": self.plan.seed,
            "tools": [dict(tool) for tool in self.opening.tools] if self.opening else [],
            "group_id": self.plan.group_id,
            "tag": self.plan.tag,
            "history": history,
            "penalty": sum(turn.reward_parts.get("format", 0.0) for turn in self.turns),
            "done": self.done,
            "status": None if self.status is None else self.status.value,
            "episode": None if self.status is None else self.episode(),
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
            reset_start=self._reset_start,
            reset_seconds=self._reset_seconds,
        )

    def _observed(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        """The messages after `observe`, which may be user code."""

        def observe() -> tuple[Message, ...]:
            shown = self.observe(messages)
            if shown is messages:
                return messages
            return read_messages(shown, where="the result of observe")

        return ask("the agent's observe", observe)

    def _ending(self, result: StepResult, env_input: EnvInput) -> Status | None:
        if result.terminated:
            return Status.COMPLETED
        if env_input.context_full:
            return Status.TRUNCATED_LENGTH
        if result.truncated or len(self.turns) + 1 >= self.plan.max_turn:
            return Status.TRUNCATED_TURNS
        return None


def shaped(
    result: StepResult, shaper: Shaper, text: str, *, turn: int, over: Status | None
) -> StepResult:
    """The result, with the user's shaper added to the turn's reward.

    Raises:
        EnvError: the shaper raised, or its result is not a finite number.
    """
    known = {
        "text": text,
        "action": result.action,
        "reward": result.reward,
        "reward_parts": dict(result.reward_parts),
        "info": dict(result.info),
        "turn": turn,
        "done": over is not None,
    }
    given = {name: known[name] for name in wanted_arguments(shaper, known)}
    what = "the reward shaper"
    added = ask(what, lambda: read_reward(shaper(**given), name=what, what="its result"))
    parts = {**(result.reward_parts or {"env": result.reward}), "shaper": added}
    reward = read_reward(result.reward + added, name="a turn", what="the shaped reward")
    return replace(result, reward=reward, reward_parts=parts)


def _with_finish(result: StepResult, finish: StepResult) -> StepResult:
    parts = dict(result.reward_parts)
    for name, value in finish.reward_parts.items():
        parts[name] = parts.get(name, 0.0) + value
    return replace(
        result,
        reward=read_reward(result.reward + finish.reward, name="the last turn"),
        reward_parts=parts,
        info={**result.info, **finish.info},
        earlier={
            turn: result.earlier.get(turn, 0.0) + finish.earlier.get(turn, 0.0)
            for turn in {*result.earlier, *finish.earlier}
        },
        repeated=finish.repeated,
        untrained=(*result.untrained, *finish.untrained),
    )


def _with_earlier(turns: list[Turn], result: StepResult) -> list[Turn]:
    """The turns, with what became known later of them: rewards, and which are not trained on.

    Raises:
        EnvError: something is about no turn, or makes a turn's reward too large.
    """
    for index in (*result.earlier, *result.untrained):
        if not 0 <= index < len(turns):
            raise EnvError(f"a result is about turn {index}; turns: 0 to {len(turns) - 1}")
    for index in result.untrained:
        turns[index] = replace(turns[index], trained=False)
    for index, reward in result.earlier.items():
        turn = turns[index]
        parts = dict(turn.reward_parts or {"env": turn.reward})
        parts[LATER] = parts.get(LATER, 0.0) + reward
        turns[index] = replace(
            turn,
            reward=read_reward(turn.reward + reward, name=f"turn {index}", what="its whole reward"),
            reward_parts=parts,
            repeated=turn.repeated + result.repeated.get(index, 0.0),
        )
    return turns


def _check_parent(call: Call | None, num_turns: int) -> None:
    if call is not None and call.parent is not None and not 0 <= call.parent < num_turns:
        raise EnvError(
            f"the next turn continues turn {call.parent}, and {num_turns} turns were played; the "
            "parent of a Call is the index of one of them"
        )


def _text(messages: Sequence[Message]) -> str:
    return "\n".join(message.content for message in messages if message.role != "system")
