"""Episodes played by several processes, tokens drawn in this one: the host's work no longer waits in one line."""

import asyncio
import logging
import pickle
import time
from collections import deque
from dataclasses import replace
from functools import partial

from turnwise.config.schema import Config
from turnwise.generate.base import ContextOverflowError, Session, Submitting
from turnwise.rollout.channel import Channel, start_beside
from turnwise.rollout.plan import Share
from turnwise.rollout.player import Begin, Event, Play
from turnwise.rollout.proxy import RolloutError
from turnwise.rollout.render import Tokenizer
from turnwise.types import Completion, Episode, Turn

logger = logging.getLogger(__name__)
HEARING_SECONDS = 0.001
"""How long players are listened to at a time."""
_ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",  # the device is not theirs
    "TRANSFORMERS_VERBOSITY": "error",  # what there is to say about a tokenizer was said here
}


class _Player:
    """One process with its share of the episodes.

    Args:
        begin: a Begin, pickled.
        queue: where what it says waits to be heard, with None at its end.
    """

    def __init__(self, part: int, begin: bytes, generator: Submitting, queue: "_Queue") -> None:
        self.part = part
        self.episodes: dict[int, Episode] = {}
        """Of the running rollout, by env_id."""
        self.lost: str | None = None
        """Why it is no longer there."""
        self._over: asyncio.Future[str | None] | None = None
        self._generator = generator
        self._sessions: set[str] = set()
        self._turns: dict[int, dict[int, Turn]] = {}
        self._answers: list[Event] = []
        self._process, sock = start_beside("turnwise.rollout.player", environment=_ENVIRONMENT)
        self._channel = Channel(
            sock, received=lambda frame: queue.put(self, frame), ended=lambda: queue.put(self, None)
        )
        self._channel.send_frame(begin)

    @property
    def pid(self) -> int:
        return self._process.pid

    def play(self, step: int, *, played: dict[int, Episode]) -> "asyncio.Future[str | None]":
        """Plays what is left of its share of a rollout. The result is what kept it from doing so, None where nothing
        did, or where it died: then `lost` says so."""
        loop = asyncio.get_running_loop()
        self.episodes, self._turns = played, {}
        self._over = loop.create_future()
        self._channel.send(Play(step=step, without=frozenset(played)))
        self._channel.attach(loop)
        return self._over

    def rest(self) -> None:
        """Nothing is heard until the next rollout."""
        self._channel.detach()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._channel.close()
        self._release_all()

    def hear(self, frame: bytes | None) -> None:
        """Does what the player asks for."""
        if frame is None:
            self._process.kill()
            self.lost = f"a process that plays episodes died (exit {self._process.wait()})"
            self._release_all()
            self._finish(None)
            return
        for event in pickle.loads(frame):
            match event:
                case ("ask", number, key, seed, new_ids, sampling):
                    self._sessions.add(key)
                    try:
                        future = self._generator.submit(Session(key=key, seed=seed), new_ids, sampling)
                    except Exception as error:  # told to the caller, who is in the other process
                        self._answer((number, str(error), isinstance(error, ContextOverflowError)))
                    else:
                        future.add_done_callback(partial(self._answered, number))
                case ("release", key):
                    self._sessions.discard(key)
                    self._generator.forget(Session(key=key, seed=0))
                case ("turn", env_id, number, turn):
                    self._turns.setdefault(env_id, {})[number] = turn
                case ("episode", env_id, kept, episode):
                    told = self._turns.pop(env_id, {})
                    turns = (*(told[number] for number in range(kept)), *episode.turns)
                    self.episodes[env_id] = replace(episode, turns=turns)
                case ("over", error):
                    self._finish(error)
                case _:
                    raise RolloutError(f"it said {event!r}")

    def fail(self, error: Exception) -> None:
        """Ends the rollout, because what the player said could not be done."""
        if self._over is not None and not self._over.done():
            self._over.set_exception(error)

    def _answered(self, number: int, future: "asyncio.Future[Completion]") -> None:
        error = None if future.cancelled() else future.exception()
        if future.cancelled() or error is not None:
            self._answer((number, str(error or "cancelled"), isinstance(error, ContextOverflowError)))
            return
        done = future.result()
        self._answer((number, done.ids, done.logprobs, done.finish_reason, done.policy_version))

    def _answer(self, answer: Event) -> None:
        if not self._answers:
            asyncio.get_running_loop().call_soon(self._flush)
        self._answers.append(answer)

    def _flush(self) -> None:
        answers, self._answers = self._answers, []
        if self.lost is None:
            self._channel.send(answers)

    def _finish(self, error: str | None) -> None:
        if self._over is not None and not self._over.done():
            self._over.set_result(error)

    def _release_all(self) -> None:
        for key in self._sessions:
            self._generator.forget(Session(key=key, seed=0))
        self._sessions = set()


class _Queue:
    """What players say, heard a little at a time: the generator has its turn in between, because the device must not
    wait until a thousand requests have been read."""

    def __init__(self) -> None:
        self._frames: deque[tuple[_Player, bytes | None]] = deque()

    def put(self, player: _Player, frame: bytes | None) -> None:
        if not self._frames:
            asyncio.get_running_loop().call_soon(self._hear)
        self._frames.append((player, frame))

    def clear(self) -> None:
        self._frames.clear()

    def _hear(self) -> None:
        until = time.perf_counter() + HEARING_SECONDS
        while self._frames and time.perf_counter() < until:
            player, frame = self._frames.popleft()
            try:
                player.hear(frame)
            except Exception as error:  # a callback has nobody to raise to: whoever waits for the rollout is told
                player.fail(error)
        if self._frames:
            asyncio.get_running_loop().call_soon(self._hear)


class Players:
    """Processes that play the episodes of rollouts, each of them whole groups.

    What an episode is, tokens included, does not depend on who plays it. When a player dies another takes its place,
    and plays what it had not handed over; where that one dies too (`rollout.retries`), these episodes have failed.

    Args:
        generator: draws, in this process.
        count: processes.
    """

    def __init__(self, config: Config, generator: Submitting, tokenizer: Tokenizer, *, count: int) -> None:
        rollout = config.rollout.model_copy(update={"players": 0})
        self._config = config.model_copy(update={"rollout": rollout})
        self._generator = generator
        self._tokenizer = tokenizer
        self._queue = _Queue()
        self._count = count
        self._players: list[_Player] = []
        self._start_all()

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes."""
        return tuple(player.pid for player in self._players)

    async def rollout(self, step: int) -> tuple[dict[int, Episode], list[tuple[Share, str]]]:
        """(the episodes of one rollout by env_id, the shares of which some are missing and why).

        Raises:
            RolloutError: a player could not begin, or stopped for a reason of its own.
        """
        self._start_all()
        try:
            losses = await asyncio.gather(*[self._play(part, step) for part in range(self._count)])
        except BaseException:
            self.close()  # whatever they are doing, nobody waits for it any more
            raise
        episodes: dict[int, Episode] = {}
        for player in self._players:
            episodes |= player.episodes
        return episodes, [(self._share(part), loss) for part, loss in enumerate(losses) if loss is not None]

    async def _play(self, part: int, step: int) -> str | None:
        """Has a share of a rollout played. One that dies is followed by others; the result is why the last one died."""
        played: dict[int, Episode] = {}
        for left in reversed(range(1 + self._config.rollout.retries)):
            if self._players[part].lost is not None:
                self._players[part] = self._start(part)
            player = self._players[part]
            error = await player.play(step, played=played)
            player.rest()
            if error is not None:
                raise RolloutError(f"a process that plays episodes stopped: {error}")
            if player.lost is None:
                break
            played = player.episodes
            logger.warning("step %d: %s; %s", step, player.lost, "another goes on" if left else "its episodes are lost")
        return self._players[part].lost

    def close(self) -> None:
        """Ends the processes. The next rollout starts others."""
        for player in self._players:
            player.kill()
        self._players = []
        self._queue.clear()

    def _start_all(self) -> None:
        if not self._players:
            self._players = [self._start(part) for part in range(self._count)]

    def _share(self, part: int) -> Share:
        return Share(part=part, of=self._count)

    def _start(self, part: int) -> _Player:
        begin = Begin(
            config=self._config,
            tokenizer=self._tokenizer,
            max_context=self._generator.max_context,
            share=self._share(part),
        )
        try:
            data = pickle.dumps(begin, protocol=5)
        except Exception as error:  # whatever a tokenizer's parts raise
            raise ValueError(
                f"rollout.players needs a tokenizer that can be sent to another process: {error!r}; set it to 0"
            ) from error
        return _Player(part, data, self._generator, self._queue)
