"""The worker process, for environments that are slow or may crash.

It answers one JSON request at a time on a socket, each answer with its request's number `n`, and
ends when the socket closes. It does not import torch.
"""

import os
import re
import resource
import socket
import traceback

from turnwise.config.schema import EnvConfig
from turnwise.envs.base import Env, EnvError, hint_of
from turnwise.envs.gate import admit_observation, admit_result, ask, read_hint, words
from turnwise.envs.registry import make_env
from turnwise.envs.wire import decode, encode, observation_to_json, result_to_json
from turnwise.procs.channel import receive_frame, send_frame
from turnwise.types import Json, Message, Task

NAMES_A_LINE = re.compile(r", line \d+\)$")
"""A message that names file and line of the user's code already."""


def handle(envs: dict[int, Env], request: dict[str, Json]) -> dict[str, Json]:
    """The answer to one request: {"ok": ...}, or {"error": text} if the environment failed."""
    try:
        return {"ok": ask(request["op"], lambda: _play(envs, request))}
    except EnvError as error:  # the episode's boundary: a failure becomes a Status in the parent
        said = words(error)
        if NAMES_A_LINE.search(said):
            return {"error": said}
        # A cause that was never raised has no frames.
        causes = [cause for cause in (error.__cause__, error) if cause is not None]
        frames = [frame for cause in causes for frame in _last_frame(cause)]
        where = [f" ({os.path.basename(last.filename)}:{last.lineno})" for last in frames[:1]]
        return {"error": said + "".join(where)}


def _last_frame(error: BaseException) -> list[traceback.FrameSummary]:
    try:
        return traceback.extract_tb(error.__traceback__)[-1:]
    except BaseException:  # foreign code: the error's class may define anything
        return []


def _play(envs: dict[int, Env], request: dict[str, Json]) -> Json:
    handle_id: int = request["id"]
    name = f"environment {handle_id}"
    match request["op"]:
        case "open":
            envs[handle_id] = make_env(EnvConfig.model_validate(request["config"]))
        case "reset":
            task = Task.from_json(request["task"])
            observation = envs[handle_id].reset(task, request["noise_seed"])
            return observation_to_json(admit_observation(observation, name=name))
        case "step":
            result = envs[handle_id].step(Message.from_json(request["message"]))
            return result_to_json(admit_result(result, name=name))
        case "finish":
            return result_to_json(admit_result(envs[handle_id].finish(), name=name))
        case "hint":
            what = request["what"]
            return read_hint(hint_of(envs[handle_id], what, request["seed"]), what=what)
        case "close":
            env = envs.pop(handle_id, None)
            if env is not None:
                env.close()
        case other:
            raise EnvError(f"unknown request {other!r}")
    return None


def serve(sock: socket.socket) -> None:
    envs: dict[int, Env] = {}
    while (data := receive_frame(sock)) is not None:
        request = decode(data)
        send_frame(sock, encode({**handle(envs, request), "n": request["n"]}))


def main(arguments: list[str]) -> None:
    descriptor = int(arguments[0])
    memory_mb = int(arguments[1]) if len(arguments) > 1 else 0
    if memory_mb:
        resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
    serve(socket.socket(fileno=descriptor))
