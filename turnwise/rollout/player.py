"""The process that plays a part of a rollout's episodes.

Environments, templates and the tokenizer are here; tokens are drawn in the process that started this one, and asked for
over a socket. It ends when the socket does.
"""

import asyncio
import itertools
import logging
import os
import pickle
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from turnwise.config.schema import Config
from turnwise.generate.base import ContextOverflowError, GeneratorError, Sampling, Session
from turnwise.rollout.channel import Channel
from turnwise.rollout.plan import Share
from turnwise.rollout.proxy import AgentProxy
from turnwise.rollout.render import Tokenizer
from turnwise.types import Completion, Episode, Turn


@dataclass(frozen=True, kw_only=True, slots=True)
class Begin:
    """The first message to a player."""

    config: Config
    tokenizer: Tokenizer
    max_context: int
    share: Share


@dataclass(frozen=True, kw_only=True, slots=True)
class Play:
    """Asks for a player's share of a rollout."""

    step: int
    without: frozenset[int] = frozenset()
    """env_ids of episodes that are there already: another player played them, and died."""


Event = tuple[Any, ...]
"""What a player says, several at a time: ("ask", number, session key, seed, new ids, sampling), ("release", session
key), ("turn", env_id, number, turn) while an episode goes on and ("episode", env_id, number of its turns that were told
before, episode with the others) when it is over, and at the end of a rollout ("over", None or what went wrong).

What it is told: a Begin, then a Play for every rollout, or a list of answers (number, ids, log-probs, finish reason,
policy version), which where there is none are (number, error message, whether it is an overflow)."""


class AskingGenerator:
    """Generates in the process at the other end of a channel. A call that is cancelled leaves a session that can only
    be released, which is what an episode does with it."""

    def __init__(self, say: "Outbox", *, max_context: int) -> None:
        self._say = say
        self.max_context = max_context
        self._waiting: dict[int, asyncio.Future[Completion]] = {}
        self._numbers = itertools.count()
        self.policy_version = 0
        """Of the last answer."""

    async def generate(self, session: Session, new_ids: Sequence[int], sampling: Sampling) -> Completion:
        number = next(self._numbers)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._say(("ask", number, session.key, session.seed, new_ids, sampling))
        try:
            return await future
        finally:
            self._waiting.pop(number, None)

    async def release(self, session: Session) -> None:
        self._say(("release", session.key))

    def answer(self, answers: Sequence[Event]) -> None:
        for number, *answer in answers:
            future = self._waiting.get(number)
            if future is None or future.done():
                continue
            if len(answer) == 2:
                text, overflow = answer
                future.set_exception(ContextOverflowError(text) if overflow else GeneratorError(text))
                continue
            ids, logprobs, finish_reason, self.policy_version = answer
            future.set_result(
                Completion(ids=ids, logprobs=logprobs, finish_reason=finish_reason, policy_version=self.policy_version)
            )


OUTBOX = 32
"""Events that are not kept for the end of a turn of the event loop: the other side can begin with them."""


class Outbox:
    """Collects what is said in one turn of the event loop, and sends it together."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._events: list[Event] = []

    def __call__(self, event: Event) -> None:
        if not self._events:
            asyncio.get_running_loop().call_soon(self._flush)
        self._events.append(event)
        if len(self._events) >= OUTBOX:
            self._flush()

    def _flush(self) -> None:
        events, self._events = self._events, []
        if events:
            self._channel.send(events)


class Player:
    """Plays its share of every rollout that it is told of."""

    def __init__(self, sock: socket.socket) -> None:
        self._gone = asyncio.Event()
        self._channel = Channel(sock, received=self._received, ended=self._gone.set)
        self._say = Outbox(self._channel)
        self._begin: Begin | None = None
        self._broken: str | None = None
        self._proxy: AgentProxy | None = None
        self._generator: AskingGenerator | None = None
        self._job: asyncio.Task[None] | None = None
        self._told: dict[int, dict[int, Turn]] = {}
        """The turns that were told, by env_id and number. Of an episode that was begun anew, or whose end changed its
        last turn, they are others."""

    async def serve(self) -> None:
        """Runs until the other side is gone."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._stop)
        self._channel.attach(loop)
        await self._gone.wait()

    def turn(self, env_id: int, turns: Sequence[Turn]) -> None:
        """Told at once, so that little is left to be told when all episodes end at about the same time."""
        self._told.setdefault(env_id, {})[len(turns) - 1] = turns[-1]
        self._say(("turn", env_id, len(turns) - 1, turns[-1]))

    def ended(self, env_id: int, episode: Episode) -> None:
        told = self._told.pop(env_id, {})
        kept = 0
        while kept < len(episode.turns) and told.get(kept) is episode.turns[kept]:
            kept += 1
        self._say(("episode", env_id, kept, replace(episode, turns=episode.turns[kept:])))

    def _received(self, frame: bytes) -> None:
        if self._begin is None and self._broken is None:
            try:
                self._begin = pickle.loads(frame)
            except Exception as error:  # a tokenizer's class may not be there; told where the rollout is waited for
                self._broken = f"{type(error).__name__}: {error}"
            return
        message = pickle.loads(frame)
        if isinstance(message, Play):
            self._job = asyncio.create_task(self._rollout(message))
        elif self._generator is not None:
            self._generator.answer(message)

    async def _rollout(self, play: Play) -> None:
        error = self._broken
        self._told = {}
        try:
            if self._begin is not None:
                proxy = self._ready(self._begin)
                await proxy.play_share(play.step, share=self._begin.share, without=play.without, listener=self)
        except Exception as failure:  # the process's boundary: told to the other side, which raises it
            error = f"{type(failure).__name__}: {failure}"
        self._say(("over", error))

    def _ready(self, begin: Begin) -> AgentProxy:
        if self._proxy is None:
            self._generator = AskingGenerator(self._say, max_context=begin.max_context)
            self._proxy = AgentProxy(begin.config, self._generator, begin.tokenizer)
        return self._proxy

    def _stop(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A callback raised: nobody would hear of it, so the process ends, which is heard."""
        loop.default_exception_handler(context)
        self._gone.set()


async def _main(descriptor: int) -> None:
    await Player(socket.socket(fileno=descriptor)).serve()


def main(arguments: Sequence[str]) -> None:
    logging.basicConfig(level=logging.WARNING)
    asyncio.run(_main(int(arguments[0])))
    os._exit(0)  # without waiting for threads of environments that hang
