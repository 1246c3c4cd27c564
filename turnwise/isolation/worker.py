"""The process in which environments run when they are slow or dangerous.

It answers one request at a time on a socket, in JSON, and ends when the socket closes. It imports no torch.
"""

import os
import resource
import socket
import traceback

from turnwise.config.schema import EnvConfig
from turnwise.envs.base import Env, hint_of
from turnwise.envs.registry import make_env
from turnwise.envs.wire import decode, encode, observation_to_json, result_to_json
from turnwise.procs.channel import receive_frame, send_frame
from turnwise.types import Json, Message, Task


def handle(envs: dict[int, Env], request: dict[str, Json]) -> dict[str, Json]:
    """The answer to one request: {"ok": ...}, or {"error": text} where the environment failed."""
    handle_id: int = request["id"]
    try:
        match request["op"]:
            case "open":
                envs[handle_id] = make_env(EnvConfig.model_validate(request["config"]))
                return {"ok": None}
            case "reset":
                observation = envs[handle_id].reset(Task.from_json(request["task"]), request["noise_seed"])
                return {"ok": observation_to_json(observation)}
            case "step":
                return {"ok": result_to_json(envs[handle_id].step(Message.from_json(request["message"])))}
            case "finish":
                return {"ok": result_to_json(envs[handle_id].finish())}
            case "hint":
                return {"ok": hint_of(envs[handle_id], request["what"], request["seed"])}
            case "close":
                env = envs.pop(handle_id, None)
                if env is not None:
                    env.close()
                return {"ok": None}
            case other:
                return {"error": f"unknown request {other!r}"}
    except Exception as error:  # the episode's boundary: a failure becomes a Status in the parent
        last = traceback.extract_tb(error.__traceback__)[-1]
        return {"error": f"{type(error).__name__}: {error} ({os.path.basename(last.filename)}:{last.lineno})"}


def serve(sock: socket.socket) -> None:
    envs: dict[int, Env] = {}
    while (data := receive_frame(sock)) is not None:
        answer = handle(envs, decode(data))
        try:
            frame = encode(answer)
        except ValueError as error:
            frame = encode({"error": f"the environment returned something that is not JSON: {error}"})
        send_frame(sock, frame)


def main(arguments: list[str]) -> None:
    descriptor = int(arguments[0])
    memory_mb = int(arguments[1]) if len(arguments) > 1 else 0
    if memory_mb:
        resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
    serve(socket.socket(fileno=descriptor))
