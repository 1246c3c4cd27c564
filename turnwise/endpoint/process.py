"""The process of the endpoint, beside the trainer. It speaks HTTP with the programs; the trainer
hears of turns alone (turnwise/endpoint/beside.py has its side)."""

import asyncio
import logging
import socket
from collections.abc import Mapping
from typing import Any

from turnwise.endpoint.episode import AgentEpisode, Said
from turnwise.endpoint.server import Endpoint
from turnwise.endpoint.wire import observation_to_json, result_to_json
from turnwise.envs.base import EnvError
from turnwise.envs.gate import describe, words
from turnwise.envs.wire import decode, encode
from turnwise.isolation.processes import WorkerLostError
from turnwise.procs.channel import HEADER, frame, receive_frame
from turnwise.types import Json, Task

logger = logging.getLogger(__name__)
_CUTS = {
    "turns": ("the limit of turns is reached", "turn_limit"),
    "length": (
        "this conversation does not fit into the context of the policy",
        "context_length_exceeded",
    ),
}


def main(arguments: list[str]) -> None:
    """Serves until the trainer closes its end. ARGUMENTS: the descriptors of the socket to the
    trainer and of the socket that listens. The first frame is the token of workers."""
    channel, listener = (socket.socket(fileno=int(number)) for number in arguments)
    token = receive_frame(channel)
    if token is None:
        return
    endpoint = Endpoint(listener, work_token=token.decode())
    desk = asyncio.run_coroutine_threadsafe(_listen(channel, endpoint), endpoint.loop)
    desk.result()
    endpoint.close()


async def _listen(channel: socket.socket, endpoint: Endpoint) -> None:
    reader, writer = await asyncio.open_connection(sock=channel)
    desk = _Desk(endpoint, writer)
    try:
        while True:
            (size,) = HEADER.unpack(await reader.readexactly(HEADER.size))
            desk.take(decode(await reader.readexactly(size)))
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()  # the trainer has ended


class _Desk:
    """Plays the requests of the trainer, those of one environment one after another."""

    def __init__(self, endpoint: Endpoint, writer: asyncio.StreamWriter) -> None:
        self._endpoint, self._writer = endpoint, writer
        self._episodes: dict[int, AgentEpisode] = {}
        self._jobs: dict[int, asyncio.Task[None]] = {}

    def take(self, request: Mapping[str, Any]) -> None:
        env, op = request["env"], request["op"]
        if op in ("reset", "end"):  # what the environment did before is over
            job = self._jobs.pop(env, None)
            if job is not None:
                job.cancel()
            episode = self._episodes.pop(env, None)
            if episode is not None:
                self._endpoint.forget(episode)
        if op == "end":
            self._send({"id": request["id"], "ok": None})
        else:
            self._jobs[env] = asyncio.create_task(self._answer(request))

    async def _answer(self, request: Mapping[str, Any]) -> None:
        answer: dict[str, Json] = {"id": request["id"]}
        try:
            answer["ok"] = await self._play(request)
        except EnvError as error:
            answer |= {"error": words(error), "lost": isinstance(error, WorkerLostError)}
        except Exception as error:  # the episode's boundary: the trainer gives it a status
            logger.exception("%s failed", request["op"])
            answer |= {"error": f"the endpoint failed: {describe(error)}", "lost": False}
        self._send(answer)

    def _send(self, answer: Mapping[str, Json]) -> None:
        if not self._writer.is_closing():  # the trainer may have ended
            self._writer.write(frame(encode(answer)))

    async def _play(self, request: Mapping[str, Any]) -> Json:
        env = request["env"]
        if request["op"] == "admit":
            self._endpoint.admit(request["program"])
            return None
        if request["op"] == "reset":
            if request["program"] is not None:
                self._endpoint.admit(request["program"])
            roles = request["roles"]
            episode = self._episodes[env] = AgentEpisode(
                Task.from_json(request["task"]),
                trained_roles=None if roles is None else frozenset(roles),
                ignore=frozenset(request["ignore"]),
                lease=request["lease"],
            )
            self._endpoint.open(episode, queue=request["queue"])
            await episode.taken
            return None
        episode = self._episodes.get(env)
        if episode is None:
            raise WorkerLostError(
                "the agent was stepped before its reset, or the endpoint was started anew"
            )
        match request["op"]:
            case "opening":
                opening = observation_to_json(await episode.opening())
                return {**opening, "logprobs": _wants(episode)}
            case "step":
                said: dict[str, Any] = request["said"]
                said["logprobs"] = tuple((text, one) for text, one in said.get("logprobs", ()))
                episode.answer(request["text"], Said(**said))
                result = result_to_json(await episode.next_turn())
                return {**result, "logprobs": _wants(episode)}
            case "finish":
                why, code = _CUTS[request["why"]]
                result = await episode.cut(
                    why, code=code, patience=request["patience"], otherwise=request["otherwise"]
                )
                return {**result_to_json(result), "logprobs": _wants(episode)}
            case "look":
                ask = episode.current
                if ask is None:
                    return None
                return [list(ask.tools), [message.to_json() for message in ask.messages]]
            case other:
                raise EnvError(f"the endpoint knows no {other!r}")


def _wants(episode: AgentEpisode) -> bool:
    """True if the program wants the log-probs of the tokens of its next reply."""
    return episode.current is not None and episode.current.logprobs
