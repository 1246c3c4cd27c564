"""Players that speak in messages: random, scripted, or behind an endpoint. One loop plays any of them.

A policy that is being trained plays through AgentProxy instead, because its tokens matter; both make Episodes.
"""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Protocol

from turnwise.config.schema import Config, EnvConfig
from turnwise.envs.actions import write_reply
from turnwise.envs.adapt import TextTurns
from turnwise.envs.base import Env
from turnwise.envs.registry import make_env
from turnwise.generate.base import ContextOverflowError, Sampling
from turnwise.generate.openai import ChatClient
from turnwise.rollout.plan import EnvFactory, EpisodePlan, env_configs, plan_rollout
from turnwise.seeding import derive_seed
from turnwise.types import Completion, Episode, Json, Message, Observation, Status, StepResult, Turn

NO_TOKENS = Completion(ids=(), logprobs=(), finish_reason="stop")
"""Of a player that speaks in messages, only the text is known."""


class PlayerError(ValueError):
    """This player cannot play this environment."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Situation:
    """Where a player has to say something."""

    messages: tuple[Message, ...]
    """The conversation so far."""
    tools: tuple[Mapping[str, Json], ...]
    env: Env
    """The environment itself: a scripted player may look at what a model cannot see."""
    rng: Random
    """The episode's own; the same at every evaluation."""
    turn: int


class Player(Protocol):
    """Says something in a situation. One player plays many episodes at once, so it keeps nothing between calls."""

    @property
    def name(self) -> str: ...

    async def reply(self, situation: Situation) -> Message: ...


@dataclass(frozen=True, slots=True)
class RandomPlayer:
    """Plays random legal actions, in the asked form.

    Example:
        >>> config = Config(env=EnvConfig(name="bandit"))
        >>> [episode.status.value for episode in play_episodes(config, RandomPlayer(), episodes=2)]
        ['completed', 'completed']
    """

    name: str = "random"

    async def reply(self, situation: Situation) -> Message:
        env = situation.env
        if not isinstance(env, TextTurns):
            raise PlayerError("the random player draws from an environment's legal actions, and this one names none")
        count = situation.rng.randint(1, env.config.format.max_actions_per_turn)
        drawn = [env.env.random_action(situation.rng) for _ in range(count)]
        actions = [action for action in drawn if action is not None]
        if not actions:
            raise PlayerError(f"environment {env.name!r} has no random_action; choose another player")
        return Message(role="assistant", content=write_reply(actions, env.config.format))


@dataclass(frozen=True, slots=True)
class ScriptedPlayer:
    """Says what a function says: the text of a reply, in the form that the environment asks for.

    Example:
        >>> config = Config(env=EnvConfig(name="bandit"))
        >>> player = ScriptedPlayer("says nothing useful", lambda situation: "hm")
        >>> play_episodes(config, player, episodes=1)[0].turns[0].action is None
        True
    """

    name: str
    say: Callable[[Situation], str]

    async def reply(self, situation: Situation) -> Message:
        return Message(role="assistant", content=self.say(situation))


@dataclass(frozen=True, slots=True)
class ChatPlayer:
    """A model behind an OpenAI-compatible endpoint."""

    name: str
    client: ChatClient
    sampling: Sampling

    async def reply(self, situation: Situation) -> Message:
        return await self.client.chat(situation.messages, self.sampling, situation.tools)


def with_episodes(config: Config, episodes: int, *, split: str = "val") -> Config:
    """The config whose rollouts of this split are `episodes` groups of one, dealt evenly among the tags."""
    part = "train" if split == "train" else "val"
    groups = config.rollout.train if part == "train" else config.rollout.val
    groups = groups.model_copy(update={"env_groups": episodes, "group_size": 1, "n_groups": ()})
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={part: groups})})


def play_episodes(
    config: Config,
    player: Player,
    *,
    episodes: int,
    split: str = "val",
    step: int = 0,
    concurrency: int = 16,
    factories: Mapping[str, EnvFactory] | None = None,
    on_episode: Callable[[Episode], None] = lambda _: None,
) -> list[Episode]:
    """The player's episodes, in the order of their plan: the tasks that a policy would be evaluated on.

    Raises:
        PlayerError: the player cannot play this environment at all.
    """
    config = with_episodes(config, episodes, split=split)
    configs = env_configs(config, config.rollout.train if split == "train" else config.rollout.val)
    makers: dict[str, EnvFactory] = {tag: _maker(env) for tag, env in configs.items()} | dict(factories or {})
    probes = {tag: maker() for tag, maker in makers.items()}
    plans = plan_rollout(config, split=split, step=step, probes=probes)
    for probe in probes.values():
        probe.close()

    async def run() -> list[Episode]:
        places = asyncio.Semaphore(concurrency)

        async def one(plan: EpisodePlan) -> Episode:
            async with places:
                episode = await play_episode(plan, makers[plan.tag](), player)
                on_episode(episode)
                return episode

        return await asyncio.gather(*(one(plan) for plan in plans))

    return asyncio.run(run())


async def play_episode(plan: EpisodePlan, env: Env, player: Player) -> Episode:
    """One episode. What fails ends it with a Status, except a PlayerError: this player cannot play at all."""
    opening = Observation(messages=())
    turns: list[Turn] = []
    status, error = Status.COMPLETED, None
    rng = Random(derive_seed(plan.seed, "player"))
    try:
        opening = env.reset(plan.task, plan.noise_seed)
        messages = list(opening.messages)
        state = opening.state_key or _text(opening.messages)
        while True:
            situation = Situation(messages=tuple(messages), tools=opening.tools, env=env, rng=rng, turn=len(turns))
            try:
                said = await player.reply(situation)
            except PlayerError:
                raise
            except ContextOverflowError:
                status = Status.TRUNCATED_LENGTH
                turns = _scored(turns, env.finish())
                break
            except Exception as problem:
                status, error = Status.GENERATOR_ERROR, f"{type(problem).__name__}: {problem}"
                break
            text = reply_text(said)
            result = env.step(Message(role="assistant", content=text))
            cut = not result.done and len(turns) + 1 >= plan.max_turn
            if cut:
                result = _with_finish(result, env.finish())
            turns.append(_turn(text, result, state, first=not turns))
            messages += _exchange(said, text, result.messages)
            state = result.state_key or _text(result.messages)
            if result.terminated or result.truncated or cut:
                status = Status.COMPLETED if result.terminated else Status.TRUNCATED_TURNS
                break
    except PlayerError:
        raise
    except Exception as problem:
        status, error = Status.ENV_ERROR, f"{type(problem).__name__}: {problem}"
    finally:
        env.close()
    return Episode(
        id=plan.episode_id,
        task=plan.task,
        group_id=plan.group_id,
        index=plan.index,
        tag=plan.tag,
        seed=plan.seed,
        noise_seed=plan.noise_seed,
        prompt=opening.messages,
        tools=opening.tools,
        turns=tuple(turns),
        status=status,
        error=error,
    )


def reply_text(message: Message) -> str:
    """What the message says, calls of tools written out: an episode keeps text, and a replay needs nothing else.

    Example:
        >>> from turnwise.types import ToolCall
        >>> call = ToolCall(id="0", name="add", arguments='{"a": 1}')
        >>> print(reply_text(Message(role="assistant", content="", tool_calls=(call,))))
        <tool_call>
        {"name": "add", "arguments": {"a": 1}}
        </tool_call>
    """
    lines = [message.content] if message.content else []
    for call in message.tool_calls:
        try:
            arguments: Json = json.loads(call.arguments)
        except ValueError:
            arguments = call.arguments
        lines.append(f"<tool_call>\n{json.dumps({'name': call.name, 'arguments': arguments})}\n</tool_call>")
    return "\n".join(lines)


def _turn(text: str, result: StepResult, state: str, *, first: bool) -> Turn:
    return Turn(
        prompt_ids=(),
        completion=NO_TOKENS,
        text=text,
        restart=first,
        action=result.action,
        messages=result.messages,
        reward=result.reward,
        reward_parts=result.reward_parts,
        state_key=state,
        info=result.info,
    )


def _exchange(said: Message, text: str, answer: Sequence[Message]) -> list[Message]:
    """What the player is shown of its own words and the answer. Where it called tools natively, the answers refer to
    its own calls: the environment read the calls from the text and named them itself."""
    if not said.tool_calls:
        return [Message(role="assistant", content=text), *answer]
    ids = iter(call.id for call in said.tool_calls)
    named = [replace(one, tool_call_id=next(ids, one.tool_call_id)) if one.role == "tool" else one for one in answer]
    return [said, *named]


def _scored(turns: list[Turn], finish: StepResult) -> list[Turn]:
    """The turns, with what is only known at the end on the last of them."""
    if not turns:
        return turns
    last = turns[-1]
    result = StepResult(messages=(), reward=last.reward, reward_parts=last.reward_parts, info=last.info)
    result = _with_finish(result, finish)
    return [*turns[:-1], replace(last, reward=result.reward, reward_parts=result.reward_parts, info=result.info)]


def _with_finish(result: StepResult, finish: StepResult) -> StepResult:
    parts = dict(result.reward_parts)
    for name, value in finish.reward_parts.items():
        parts[name] = parts.get(name, 0.0) + value
    info = {**result.info, **finish.info}
    return replace(result, reward=result.reward + finish.reward, reward_parts=parts, info=info)


def _text(messages: Sequence[Message]) -> str:
    return "\n".join(message.content for message in messages if message.role != "system")


def _maker(config: EnvConfig) -> EnvFactory:
    return lambda: make_env(config)
