"""One game: an episode that AgentProxy plays in a thread, a turn whenever the page asks for it."""

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from turnwise.config.schema import Config, FormatConfig
from turnwise.envs.base import EnvError
from turnwise.evaluate.evaluation import PolicyPlayer
from turnwise.evaluate.person import write_actions, written_call
from turnwise.evaluate.players import ChatPlayer, Player, PlayerSpeaker, Situation
from turnwise.generate.openai import SaidToken
from turnwise.inspect.boards import shown_state
from turnwise.inspect.episode import message_json, turn_json
from turnwise.inspect.episode_rows import number
from turnwise.inspect.folder import InspectError
from turnwise.rollout.agents import Agent
from turnwise.rollout.context import ContextManager
from turnwise.rollout.outputs import EnvInput
from turnwise.rollout.plan import EpisodePlan, turn_limit
from turnwise.rollout.proxy import AgentProxy, RolloutError, sampling_for
from turnwise.rollout.speakers import PlayerError, PolicySpeaker, Speaker
from turnwise.types import Json, Message, Turn

SPLIT = "val"
MOST_ACTIONS = 500
MOST_ALTERNATIVES = 5
Shown = tuple[list[dict[str, Json]], list[Json]]
"""(tokens, alternatives) of a turn."""


class Game:
    """An episode in progress.

    Args:
        player: its name, for the page.
        speaker: makes the one who speaks for the agent, given this game.
        tokens: what is shown of a turn's tokens.
    """

    def __init__(
        self,
        name: str,
        config: Config,
        *,
        seed: int,
        player: str,
        speaker: "Callable[[Game], Speaker]",
        tokens: Callable[[Sequence[Turn]], Shown] | None = None,
    ) -> None:
        self.name, self.config, self.seed, self.player = name, config, seed, player
        self.touched = time.monotonic()
        """Time of the last request."""
        self.actions: Sequence[str] | None = None
        self.state: Literal["busy", "waiting", "over"] = "busy"
        self.agent: Agent | None = None
        self.error: str | None = None
        self.rendered = ""
        """The state as the environment draws it."""
        self._speaker = speaker(self)
        self._tokens = tokens
        self._shown: list[Shown] = []
        self._asked: tuple[asyncio.AbstractEventLoop, asyncio.Future[str]] | None = None
        self._left = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="turnwise-game", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def go(self, action: str) -> None:
        """Lets the next turn be played.

        Raises:
            InspectError: the game is over, or a turn is being played.
        """
        with self._lock:
            self.touched = time.monotonic()
            if self.state != "waiting" or self._asked is None:
                what = "is over" if self.state == "over" else "still plays the last turn"
                raise InspectError(f"this game {what}", status=409)
            self.state = "busy"
            loop, asked = self._asked
            self._asked = None
            loop.call_soon_threadsafe(_answer, asked, action)

    def leave(self) -> None:
        """Ends the game. A turn that is being played is finished in the background."""
        with self._lock:
            self._left = True
            if self._asked is not None:
                loop, asked = self._asked
                self._asked = None
                loop.call_soon_threadsafe(_give_up, asked)

    def join(self, seconds: float) -> None:
        """Waits for the game's end."""
        if self._thread.ident is not None:
            self._thread.join(seconds)

    async def wait_for_page(self) -> str:
        """The text of the page's next request for a turn. Called on the game's own loop."""
        asked: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        with self._lock:
            if self._left:
                raise PlayerError("the game was left")
            self._asked = asyncio.get_running_loop(), asked
            self.state = "waiting"
        return await asked

    def view(self) -> dict[str, Json]:
        """The game as the page shows it."""
        agent = self.agent
        turns = list(agent.turns)[: len(self._shown)] if agent else []
        opening = agent.opening if agent else None
        messages = list(opening.messages) if opening else []
        tools = opening.tools if opening else ()
        rows: list[dict[str, Json]] = []
        for index, turn in enumerate(turns):
            messages += [Message(role="assistant", content=turn.text), *turn.messages]
            if turn.rewritten is not None:
                messages, tools = list(turn.rewritten.messages), turn.rewritten.tools
            tokens, alternatives = self._shown[index]
            row = turn_json(turn, index, tokens=tokens)
            rows.append(row | ({"alternatives": alternatives} if alternatives else {}))
        success = next((t.info["success"] for t in reversed(turns) if "success" in t.info), None)
        status = agent.status if agent else None
        return {
            "session": self.name,
            "env": self.config.env.name,
            "seed": self.seed,
            "player": self.player,
            "messages": [message_json(message) for message in messages],
            "board": shown_state(self.rendered, [message.content for message in messages]),
            "actions": None if self.actions is None else list(self.actions)[:MOST_ACTIONS],
            "tools": [dict(tool) for tool in tools],
            "turns": rows,
            "waiting": self.state == "waiting",
            "done": self.state == "over",
            "status": status.value if status else None,
            "reward": number(sum(turn.reward for turn in turns)),
            "success": None if success is None else bool(success),
            "error": self.error or (agent.error if agent else None),
        }

    def _run(self) -> None:
        proxy = None
        try:
            proxy = AgentProxy(
                self.config, split=SPLIT, speaker=self._speaker, on_turn=self._after_turn
            )
            proxy.play_these([self._plan(proxy)], progress=False)
        except (PlayerError, EnvError, RolloutError, ValueError, ImportError, OSError) as error:
            self.error = None if self._left else str(error) or type(error).__name__
        except Exception as error:  # the page has to hear of it, whatever it was
            self.error = f"{type(error).__name__}: {error}"
        finally:
            with self._lock:
                self.state = "over"
            if proxy is not None:
                proxy.close()

    def _plan(self, proxy: AgentProxy) -> EpisodePlan:
        ((tag, probe),) = proxy.env_state.probes.items()
        task, error = proxy.env_state.task(tag, self.seed, step=0)
        if error is not None:
            raise EnvError(error)
        return EpisodePlan(
            env_id=0,
            group_id=0,
            index=0,
            tag=tag,
            task=task,
            seed=self.seed,
            noise_seed=self.seed,
            episode_id=self.name,
            max_turn=turn_limit(self.config, self.config.env, probe),
        )

    def _after_turn(self, agent: Agent) -> None:
        self._shown.append(self._tokens(agent.turns) if self._tokens else ([], []))


@dataclass(slots=True)
class Watched:
    """Speaks as another speaker does, and lets the game see the episode.

    Args:
        gate: waits for the page before every turn. None: the speaker itself does.
        alone: held while a turn is spoken, where games share a model.
    """

    game: Game
    inner: Speaker
    gate: bool
    alone: threading.Lock

    def open(self, agent: Agent) -> None:
        self.game.agent = agent
        self.inner.open(agent)

    async def reply(self, agent: Agent) -> EnvInput:
        await self._look(agent)
        if not self.gate:
            return await self.inner.reply(agent)
        await self.game.wait_for_page()
        # Blocks this game's loop alone: nothing else runs on it.
        with self.alone:
            return await self.inner.reply(agent)

    def final_ids(self, agent: Agent) -> tuple[int, ...]:
        return self.inner.final_ids(agent)

    async def close(self, agent: Agent) -> None:
        await self._look(agent)
        await self.inner.close(agent)

    async def _look(self, agent: Agent) -> None:
        """Keeps what the environment draws. A drawing that fails ends no game."""
        if agent.opening is not None:
            with contextlib.suppress(EnvError):
                self.game.rendered = str(await agent.handle.hint("board", 0) or "")


@dataclass(frozen=True, slots=True)
class BrowserPerson:
    """A person at the page. Types an action, or what a model would have to write."""

    game: Game
    form: FormatConfig
    name: str = "person"

    async def reply(self, situation: Situation) -> Message:
        actions = await situation.hint("actions")
        self.game.actions = actions
        text = await self.game.wait_for_page()
        said = written_call(text, situation.tools)
        if said == text and actions is not None:
            said = write_actions(text, self.form)
        return Message(role="assistant", content=said)


def person_speaker(game: Game) -> Speaker:
    """Speaks what a person types. It has no time limit."""
    person = BrowserPerson(game, game.config.env.format)
    return Watched(game, PlayerSpeaker(person), gate=False, alone=threading.Lock())


def player_speaker(game: Game, player: Player) -> Speaker:
    """Speaks for a player, a turn at a time, within the time limit of any other generator."""
    speaker = PlayerSpeaker(player, game.config.rollout.generate_timeout)
    return Watched(game, speaker, gate=True, alone=threading.Lock())


@dataclass(slots=True)
class ToldPlayer:
    """A model behind an API, whose last reply is kept token by token."""

    player: ChatPlayer
    said: tuple[SaidToken, ...] = ()

    @property
    def name(self) -> str:
        return self.player.name

    async def reply(self, situation: Situation) -> Message:
        asked = situation.messages, self.player.sampling, situation.tools
        message, said = await self.player.client.chat_tokens(*asked, most=MOST_ALTERNATIVES)
        # Calls of tools are no part of a told reply: shown by its tokens, it would lack them.
        self.said = () if message.tool_calls else said
        return message

    def tokens(self, turns: Sequence[Turn]) -> Shown:
        """The last reply's tokens, and what could have been in their place."""
        tokens: list[dict[str, Json]] = []
        others: list[Json] = []
        for one in self.said:
            tokens.append({"text": one.text, "logprob": number(one.logprob)})
            listed = one.others[: 2 * MOST_ALTERNATIVES]
            if all(text != one.text for text, _ in listed):
                listed = (*listed, (one.text, one.logprob))
            others.append([{"text": text, "p": _share(logprob)} for text, logprob in listed])
        return tokens, others


def policy_speaker(game: Game, policy: PolicyPlayer, *, alone: threading.Lock) -> Speaker:
    """Speaks for a policy, a turn at a time, as it is evaluated."""
    rollout = game.config.rollout
    context = ContextManager(policy.tokenizer, rollout, max_context=policy.generator.max_context)
    speaker = PolicySpeaker(
        context, policy.generator, sampling_for(rollout, SPLIT), timeout=rollout.generate_timeout
    )
    return Watched(game, speaker, gate=True, alone=alone)


def policy_tokens(
    policy: PolicyPlayer, temperature: float, *, alone: threading.Lock
) -> Callable[[Sequence[Turn]], Shown]:
    """Shows a policy's turn token by token, with what it could have said instead."""
    from turnwise.data.samples import parent_of, path_ids
    from turnwise.models.alternatives import likeliest

    def piece(token: int) -> str:
        return str(policy.tokenizer.decode([token]))

    def show(turns: Sequence[Turn]) -> Shown:
        turn = turns[-1]
        parent = parent_of(turns, len(turns) - 1)
        before = (*(() if parent is None else path_ids(turns, parent)), *turn.prompt_ids)
        said = turn.completion
        with alone:
            found = likeliest(
                policy.model, before, said.ids, temperature=temperature, most=MOST_ALTERNATIVES
            )
        tokens = [
            {"text": piece(token), "logprob": number(logprob)}
            for token, logprob in zip(said.ids, said.logprobs, strict=True)
        ]
        for row, token, logprob in zip(found, said.ids, said.logprobs, strict=True):
            if all(one != token for one, _ in row):
                row.append((token, math.exp(logprob)))
        others = [[{"text": piece(one), "p": number(share)} for one, share in row] for row in found]
        return tokens, others

    return show


def _share(logprob: float) -> float | None:
    return number(math.exp(min(logprob, 0.0)))


def _answer(asked: "asyncio.Future[str]", action: str) -> None:
    if not asked.done():
        asked.set_result(action)


def _give_up(asked: "asyncio.Future[str]") -> None:
    if not asked.done():
        asked.set_exception(PlayerError("the game was left"))
