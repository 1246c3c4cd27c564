"""Players that work with messages instead of tokens: random, scripted, behind an endpoint.
AgentProxy plays them like a policy."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Protocol, cast

from turnwise.config.schema import Config
from turnwise.envs.base import Env, EnvError, EnvFactory, Hint
from turnwise.generate.base import Sampling
from turnwise.generate.openai import ChatClient
from turnwise.procs.threads import DaemonThreads
from turnwise.rollout.agents import Agent
from turnwise.rollout.outputs import EnvInput
from turnwise.rollout.proxy import AgentProxy, sampling_for
from turnwise.rollout.speakers import PlayerError
from turnwise.seeding import derive_seed
from turnwise.types import Completion, Episode, Json, Message, Turn

NO_TOKENS = Completion(ids=(), logprobs=(), finish_reason="stop")
"""Placeholder ids: of such a player only the text is known."""
CONCURRENCY = 16
"""Maximum number of concurrent replies of one player."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Situation:
    """The state in which a player must reply."""

    messages: tuple[Message, ...]
    """The conversation so far."""
    tools: tuple[Mapping[str, Json], ...]
    tag: str
    """Which environment."""
    turn: int
    rng: Random
    """The episode's own; the same at every evaluation."""
    hint: Callable[[Hint], Awaitable[Json]]
    """Asks the environment for an action; None if it has none to offer."""
    last: Turn | None
    """The result of the last reply."""
    env: Env | None
    """The environment itself, where it is in this process: a scripted player may look at what a
    model cannot see."""


class Player(Protocol):
    """Replies to a situation. One player plays many episodes at once, so it must keep no state
    between calls."""

    @property
    def name(self) -> str: ...

    async def reply(self, situation: Situation) -> Message: ...


@dataclass(frozen=True, slots=True)
class RandomPlayer:
    """Plays random legal actions, in the asked form.

    Example:
        >>> config = Config.model_validate({"env": {"name": "bandit"}})
        >>> [episode.status.value for episode in play_episodes(config, RandomPlayer(), episodes=2)]
        ['completed', 'completed']
    """

    name: str = "random"

    async def reply(self, situation: Situation) -> Message:
        said = await situation.hint("random")
        if said is None and situation.turn:
            raise EnvError(f"{situation.tag!r} named legal actions before, and now none")
        if said is None:
            raise PlayerError(
                "the random player draws from an environment's legal actions, and "
                f"{situation.tag!r} names none; give "
                "it random_action (of a message environment, random_reply), or choose another "
                "player"
            )
        return Message(role="assistant", content=said)


@dataclass(frozen=True, slots=True)
class ScriptedPlayer:
    """Says what a function says: the text of a reply, in the form that the environment asks for.

    Example:
        >>> config = Config.model_validate({"env": {"name": "bandit"}})
        >>> player = ScriptedPlayer("says nothing useful", lambda situation: "hm")
        >>> play_episodes(config, player, episodes=1)[0].turns[0].action is None
        True
    """

    name: str
    say: Callable[[Situation], str]
    _threads: DaemonThreads = field(
        default_factory=lambda: DaemonThreads(1, "turnwise-script"), init=False, repr=False
    )
    """One thread, so that a function that hangs is given up in time and calls never overlap."""

    async def reply(self, situation: Situation) -> Message:
        job = self._threads.submit(self.say, situation)
        try:
            said = cast(object, await asyncio.wrap_future(job))  # it is the user's function
        except asyncio.CancelledError:
            self._threads.replace(job)
            raise
        if not isinstance(said, str):
            raise PlayerError(f"{self.name} returned {type(said).__name__}; a reply is a text")
        return Message(role="assistant", content=said)


@dataclass(frozen=True, slots=True)
class ChatPlayer:
    """A model behind an OpenAI-compatible endpoint."""

    name: str
    client: ChatClient
    sampling: Sampling

    async def reply(self, situation: Situation) -> Message:
        return await self.client.chat(situation.messages, self.sampling, situation.tools)


def chat_player(where: str, config: Config, *, api_key: str | None) -> ChatPlayer:
    """The player behind URL#MODEL.

    Raises:
        PlayerError: that is no such address.
    """
    url, _, model = where.partition("#")
    if not model:
        raise PlayerError(
            f"openai:{where} names no model; write openai:URL#MODEL, as in openai:{url}#qwen3"
        )
    try:
        timeout = config.rollout.generate_timeout
        client = ChatClient(url, model=model, api_key=api_key, timeout=timeout)
    except ValueError as error:
        raise PlayerError(str(error)) from error
    return ChatPlayer(model, client, sampling_for(config.rollout, "val"))


@dataclass(kw_only=True, slots=True)
class _Talk:
    """An episode as its player sees it."""

    messages: list[Message]
    tools: tuple[Mapping[str, Json], ...]
    rng: Random
    said: Message | None = None
    after: list[list[Message]] = field(default_factory=list[list[Message]])
    """The conversation after every turn, where the environment decides which one goes on."""


@dataclass(slots=True)
class PlayerSpeaker:
    """A player as a Speaker: reads and writes messages.

    Args:
        timeout: seconds for one reply. None: no limit, for a person.
        slips: share of the turns in which a random legal action is played in the player's place.
            Such a turn is marked as not trained.
    """

    player: Player
    timeout: float | None = None
    concurrency: int = CONCURRENCY
    slips: float = 0.0
    _talks: dict[int, _Talk] = field(default_factory=dict[int, _Talk], init=False)
    _places: asyncio.Semaphore | None = field(default=None, init=False)

    def open(self, agent: Agent) -> None:
        assert agent.opening is not None
        rng = Random(derive_seed(agent.plan.seed, "player"))
        self._talks[agent.plan.env_id] = _Talk(
            messages=list(agent.opening.messages), tools=agent.opening.tools, rng=rng
        )

    async def reply(self, agent: Agent) -> EnvInput:
        talk = self._talks[agent.plan.env_id]
        if talk.said is not None and agent.call is None:
            talk.messages += _exchange(talk.said, agent.last_messages)
        elif talk.said is not None and agent.call is not None:
            talk.after.append([*talk.messages, *_exchange(talk.said, ())])
            parent = agent.call.parent
            before = talk.after[-1 if parent is None else parent]
            talk.messages = [*before, *agent.last_messages]
        if agent.last_rewritten is not None:
            talk.messages, talk.tools = (
                list(agent.last_rewritten.messages),
                agent.last_rewritten.tools,
            )
        self._places = self._places or asyncio.Semaphore(self.concurrency)
        slipped = bool(self.slips) and talk.rng.random() < self.slips
        player = RandomPlayer() if slipped else self.player
        async with self._places:
            start, started = time.time(), time.perf_counter()
            async with asyncio.timeout(self.timeout):
                talk.said = await player.reply(self._situation(agent, talk))
        return EnvInput(
            env_id=agent.plan.env_id,
            text=reply_text(talk.said),
            completion=NO_TOKENS,
            prompt_ids=(),
            restart=not agent.turns,
            context_full=False,
            seconds=time.perf_counter() - started,
            start=start,
            trained=not slipped,
        )

    def final_ids(self, agent: Agent) -> tuple[int, ...]:
        return ()

    async def close(self, agent: Agent) -> None:
        self._talks.pop(agent.plan.env_id, None)

    def _situation(self, agent: Agent, talk: _Talk) -> Situation:
        def hint(what: Hint) -> Awaitable[Json]:
            return agent.handle.hint(what, talk.rng.getrandbits(32))

        return Situation(
            messages=tuple(talk.messages),
            tools=talk.tools,
            tag=agent.plan.tag,
            turn=len(agent.turns),
            rng=talk.rng,
            hint=hint,
            last=agent.turns[-1] if agent.turns else None,
            env=agent.handle.env,
        )


def player_proxy(
    config: Config,
    player: Player,
    *,
    split: str = "val",
    factories: Mapping[str, EnvFactory] | None = None,
    concurrency: int = CONCURRENCY,
    slips: float = 0.0,
) -> AgentProxy:
    """A proxy that plays episodes with this player. The caller must close it."""
    speaker = PlayerSpeaker(player, config.rollout.generate_timeout, concurrency, slips)
    return AgentProxy(config, split=split, factories=factories, speaker=speaker)


def with_episodes(config: Config, episodes: int, *, split: str = "val") -> Config:
    """The config whose rollouts of this split are `episodes` groups of one, dealt evenly among the
    tags."""
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
    concurrency: int = CONCURRENCY,
    factories: Mapping[str, EnvFactory] | None = None,
    on_episode: Callable[[Episode], None] | None = None,
) -> list[Episode]:
    """The player's episodes, in the order of their plan: the tasks that a policy would be evaluated
    on.

    Raises:
        PlayerError: the player cannot play this environment at all.
    """
    config = with_episodes(config, episodes, split=split)
    proxy = player_proxy(config, player, split=split, factories=factories, concurrency=concurrency)
    try:
        return proxy.play_all(step, on_episode=on_episode)
    finally:
        proxy.close()


def reply_text(message: Message) -> str:
    """The text of a message with its tool calls written out: an episode stores text, and a replay
    needs nothing else.

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
        lines.append(
            f"<tool_call>\n{json.dumps({'name': call.name, 'arguments': arguments})}\n</tool_call>"
        )
    return "\n".join(lines)


def _exchange(said: Message, answer: Sequence[Message]) -> list[Message]:
    """The player's reply and the environment's answer, as shown to the player. Where it called
    tools natively, the answers refer to its own calls: the environment read the calls from the text
    and named them itself."""
    if not said.tool_calls:
        return [Message(role="assistant", content=reply_text(said)), *answer]
    ids = iter(call.id for call in said.tool_calls)
    named = [
        replace(one, tool_call_id=next(ids, one.tool_call_id)) if one.role == "tool" else one
        for one in answer
    ]
    return [said, *named]
