"""A client of the inspector, and runs to ask about."""

import http.client
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from run_fixtures import fill_step, make_episode, make_run, make_turn

from turnwise.config.schema import Config
from turnwise.inspect.server import InspectServer
from turnwise.types import Message, Status


class Client:
    """Asks as a page on the same origin would, unless told otherwise."""

    def __init__(self, server: InspectServer) -> None:
        self.address = urlsplit(server.url).netloc

    def ask(
        self, path: str, *, method: str = "GET", body: Any = None, **headers: str
    ) -> tuple[int, Any, http.client.HTTPMessage]:
        """(status, the answer's JSON or bytes, its headers)."""
        connection = http.client.HTTPConnection(self.address, timeout=300)
        try:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, named)
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        plain = "json" in (answer.headers["content-type"] or "")
        return answer.status, json.loads(content) if plain else content, answer.headers

    def get(self, path: str, *, status: int = 200) -> Any:
        found, answer, _ = self.ask(path)
        assert found == status, (path, found, answer)
        return answer

    def post(self, path: str, body: Any = None, *, status: int = 200, method: str = "POST") -> Any:
        kind = {"Content_Type": "application/json", "Origin": f"http://{self.address}"}
        found, answer, _ = self.ask(path, method=method, body=body or {}, **kind)
        assert found == status, (path, found, answer)
        return answer


def wait_for(condition: Callable[[], bool]) -> None:
    """Returns once the condition holds."""
    deadline = time.monotonic() + 600.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def lake_run(folder: Path, name: str = "lake", *, steps: int = 3, episodes: int = 4) -> Path:
    """A run whose episodes have two turns with boards."""
    config = Config.model_validate({"train": {"steps": steps}, "seed": 5})
    board = Message(role="user", content="Now:\nP _ O\n_ _ G")
    with make_run(folder, config=config, name=name) as run:
        for step in range(1, steps + 1):
            played = [
                make_episode(
                    f"s{step}-{index}",
                    group_id=index // 2,
                    index=index % 2,
                    turns=(
                        make_turn("up", restart=True, messages=(board,)),
                        make_turn(f"Word{step} {index}", reward=float(index)),
                    ),
                    prompt=(
                        Message(role="system", content="the rules of lakes"),
                        Message(role="user", content="S _\n_ G"),
                    ),
                    success=None if index else True,
                )
                for index in range(episodes)
            ]
            played.append(
                make_episode(f"s{step}-x", group_id=9, status=Status.ENV_ERROR, error="it broke")
            )
            fill_step(run, step, played, {"rollout/reward": step / 10, "time/step": 1.5})
        run.write_episodes(steps, played[:2], split="eval")
        run.write_pieces(lambda token: chr(token) if token > 2 else "<end>")
        run.write_event("note", "something", step=1)
    return run.path
