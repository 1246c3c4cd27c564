"""A served environment among strangers and clients that die: bounded in what it reads and holds,
and nothing is lost."""

import asyncio
import http.client
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from turnwise.config.schema import EnvConfig, RolloutConfig
from turnwise.envs.base import EnvError
from turnwise.isolation.processes import ProcessPool
from turnwise.serve import http as limits
from turnwise.serve.client import RemoteEnv, ServerFullError
from turnwise.serve.server import CONNECTIONS, CONNECTIONS_PER_SESSION, EnvServer
from turnwise.types import Task

BANDIT, INLINE = EnvConfig(name="bandit"), RolloutConfig(isolation="inline")
TASK = {"seed": 1, "split": "train"}


def wait_for(condition: Callable[[], bool], seconds: float = 600.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


@pytest.fixture
def server() -> Iterator[EnvServer]:
    with EnvServer(BANDIT, INLINE, max_sessions=2, idle_timeout=60.0) as server:
        yield server


def connect(server: EnvServer) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", urlsplit(server.url).port, timeout=60)


def answer(connection: http.client.HTTPConnection) -> tuple[int, Any]:
    response = connection.getresponse()
    return response.status, json.loads(response.read())


def num_connections(server: EnvServer) -> int:
    return len(server._server._server.server_state.connections)  # pyright: ignore


def test_a_place_survives_a_close_while_a_reset_waits_for_it() -> None:
    async def play() -> None:
        pool = ProcessPool({"e": BANDIT}, RolloutConfig(num_workers=1, worker_envs=1))
        task = Task(id="t", seed=1)
        first, second, third = (pool.open("e") for _ in range(3))
        await first.reset(task, 0)
        waits = asyncio.create_task(second.reset(task, 0))
        await asyncio.sleep(0)
        await second.close()
        await first.close()
        with pytest.raises(EnvError, match="closed while it waited"):
            await waits
        await asyncio.wait_for(third.reset(task, 0), 60)
        await pool.close()

    asyncio.run(play())


def test_there_are_no_more_sessions_than_the_workers_have_places() -> None:
    rollout = RolloutConfig(isolation="process", num_workers=1, worker_envs=2)
    with EnvServer(BANDIT, rollout, max_sessions=5) as server:
        assert server.sessions.health()["max_sessions"] == 2
        envs = [RemoteEnv(server.url, wait=0.0) for _ in range(3)]
        for env in envs[:2]:
            env.reset(env.make_task(0, "train"))
        with pytest.raises(ServerFullError, match="all 2 sessions are taken"):
            envs[2].reset(envs[2].make_task(0, "train"))
        envs[0].close()
        envs[2].reset(envs[2].make_task(0, "train"))


def test_a_body_is_not_waited_for_without_the_token() -> None:
    with EnvServer(BANDIT, INLINE, token="secret") as server:
        connection = connect(server)
        connection.putrequest("POST", "/v1/task")
        connection.putheader("Content-Length", "1000000")
        connection.endheaders()
        status, refused = answer(connection)
        assert (status, "TURNWISE_TOKEN" in refused["error"]["message"]) == (401, True)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 403),
        ({"Host": "localhost.evil.example:80"}, 403),
        ({"Host": ""}, 403),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": ""}, 403),
        ({"Host": "[nothing"}, 400),
        ({"Host": "localhost:1234"}, 200),
        ({"Host": "[::1]:8765"}, 200),
        ({"Origin": "http://127.0.0.1:3000"}, 200),
    ],
)
def test_pages_of_other_sites_are_refused_on_loopback(
    server: EnvServer, headers: dict[str, str], status: int
) -> None:
    connection = connect(server)
    connection.request("POST", "/v1/task", json.dumps(TASK), headers)
    assert answer(connection)[0] == status


def test_the_token_is_enough_under_any_name() -> None:
    with EnvServer(BANDIT, INLINE, token="secret") as server:
        connection = connect(server)
        headers = {"Host": "envs.example", "Authorization": "Bearer secret"}
        connection.request("POST", "/v1/task", json.dumps(TASK), headers)
        assert answer(connection)[0] == 200


def test_a_connection_outlives_what_is_wrong_with_a_request(server: EnvServer) -> None:
    connection = connect(server)
    connection.connect()
    sock = connection.sock
    for body, status in (
        (b"[" * 200_000, 400),
        (b"{" + b'"a":{' * 100_000, 400),
        (b"\xff", 400),
        (json.dumps(TASK).encode(), 200),
    ):
        connection.request("POST", "/v1/task", body)
        assert answer(connection)[0] == status
    for body, status in (([b'{"seed": 1, ', b'"split": "train"}'], 200), ([b"{"] * 3, 400)):
        connection.request("POST", "/v1/task", iter(body), encode_chunked=True)
        assert answer(connection)[0] == status
    assert connection.sock is sock


def test_a_body_without_end_is_cut_short(
    server: EnvServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_BODY", 1000)
    connection = connect(server)
    connection.putrequest("POST", "/v1/task")
    connection.putheader("Transfer-Encoding", "chunked")
    connection.endheaders()
    try:  # the server closes while more is coming: its answer may be lost
        for _ in range(20):
            connection.send(b"64\r\n" + b"x" * 100 + b"\r\n")
        assert answer(connection)[0] == 413
    except ConnectionError:
        pass
    assert wait_for(lambda: num_connections(server) == 0)


def test_all_bodies_together_are_bounded(
    server: EnvServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_READ", 2500)
    slow = [connect(server) for _ in range(3)]
    for number, connection in enumerate(slow):
        connection.putrequest("POST", "/v1/task")
        connection.putheader("Content-Length", "1001")
        connection.endheaders()
        connection.send(b" " * 1000)
        if number < 2:
            assert wait_for(lambda n=number: server._server.held == 1000 * (n + 1))  # pyright: ignore
    status, refused = answer(slow[2])
    assert (status, refused["error"]["kind"]) == (503, "full")
    for connection in slow[:2]:
        connection.send(b"x")
        assert answer(connection)[0] == 400
    assert server._server.held == 0  # pyright: ignore


def test_a_request_that_never_ends_is_given_up(
    server: EnvServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "IO_SECONDS", 0.2)
    connection = connect(server)
    connection.putrequest("POST", "/v1/task")
    connection.putheader("Content-Length", "10")
    connection.endheaders()
    assert answer(connection)[0] == 408


def test_connections_are_bounded_and_clients_do_not_notice(server: EnvServer) -> None:
    limit = CONNECTIONS + 2 * CONNECTIONS_PER_SESSION
    env = RemoteEnv(server.url)
    task = env.make_task(0, "train")
    opening = env.reset(task)
    port = urlsplit(server.url).port
    strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(limit + 50)]
    for stranger in strangers[::2]:
        stranger.sendall(b"POST /v1/task HTTP/1.1\r\nHost: local")
    assert wait_for(lambda: num_connections(server) == limit)
    assert env.reset(task) == opening
    assert num_connections(server) <= limit
    for stranger in strangers:
        stranger.close()
    env.close()


def test_a_client_that_reads_no_answer_is_given_up(
    server: EnvServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers pile up until the transport refuses more; the connection is then a busy one for ever,
    unless it is ended."""
    monkeypatch.setattr(limits, "IO_SECONDS", 0.2)
    # Small buffers: the kernel's own take in megabytes before a write waits.
    server._server._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # pyright: ignore
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(("127.0.0.1", urlsplit(server.url).port))
    request = b"GET /v1/spec HTTP/1.1\r\nHost: localhost\r\n\r\n"

    def flood() -> None:
        with sock:
            try:
                while True:
                    sock.sendall(request * 1000)
            except OSError:
                return

    flooding = threading.Thread(target=flood, daemon=True)
    flooding.start()
    flooding.join(600)
    assert not flooding.is_alive()
    assert wait_for(lambda: num_connections(server) == 0)


CLIENT = """
import sys
from turnwise.serve.client import RemoteEnv
from turnwise.types import Message
envs = [RemoteEnv(sys.argv[1], wait=600.0) for _ in range(int(sys.argv[2]))]
for env in envs:
    env.reset(env.make_task(0, "train"))
print("ready", flush=True)
seed = 0
while True:
    for env in envs:
        env.step(Message(role="assistant", content="<think></think><answer>down</answer>"))
        seed += 1
        env.reset(env.make_task(seed, "train"))
"""


def hold_and_kill(*, clients: int, each: int, rounds: int) -> None:
    """Clients hold sessions and die at any moment, again and again. Afterwards nothing of them is
    left."""
    sessions = clients * each
    rollout = RolloutConfig(isolation="process", num_workers=2, worker_envs=sessions // 2)
    env = EnvConfig(name="frozen_lake", options={"is_slippery": False})
    rng = Random(0)
    me = psutil.Process()

    def start(server: EnvServer) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-c", CLIENT, server.url, str(each)]
        return subprocess.Popen(command, stdout=subprocess.PIPE)

    def end(client: "subprocess.Popen[bytes]") -> None:
        client.kill()
        client.wait()
        assert client.stdout is not None
        client.stdout.close()

    before: tuple[int, int] | None = None
    with EnvServer(env, rollout, max_sessions=sessions, idle_timeout=10.0) as server:
        running = [start(server) for _ in range(clients)]
        try:
            for number in range(rounds):
                for client in running:
                    assert client.stdout is not None
                    assert client.stdout.readline() == b"ready\n"
                assert server.sessions.health()["sessions"] == sessions
                for place in rng.sample(range(clients), (clients + 1) // 2):
                    end(running[place])
                    running[place] = start(server)
                    if number % 2:  # not before it has begun, where nothing would be lost
                        time.sleep(rng.random())
                        end(running[place])
                        running[place] = start(server)
                for client in running:
                    end(client)
                assert wait_for(lambda: server.sessions.health()["sessions"] == 0)
                assert wait_for(lambda: num_connections(server) == 0)
                held = (me.num_threads(), me.num_fds())
                before = before or held
                assert held[0] <= before[0]  # threads of a pool may end by themselves
                assert held[1] <= before[1]
                running = [start(server) for _ in range(clients)] if number < rounds - 1 else []
        finally:
            for client in running:
                end(client)
        envs = [RemoteEnv(server.url, wait=0.0) for _ in range(sessions)]
        for remote in envs:  # every place is there for the next
            remote.reset(remote.make_task(0, "train"))
        for remote in envs:
            remote.close()
        assert server.sessions._pool.facts()["workers"]["died"] == 0  # pyright: ignore


def test_clients_that_die_leave_nothing() -> None:
    hold_and_kill(clients=2, each=10, rounds=2)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_hundred_sessions_of_clients_that_die_leave_nothing() -> None:
    hold_and_kill(clients=10, each=20, rounds=8)


def test_answers_are_sent_at_once(server: EnvServer) -> None:
    """Nagle's algorithm would hold every answer back for 40 ms."""
    connection = connect(server)
    connection.request("GET", "/v1/health")
    assert answer(connection)[0] == 200
    (served,) = server._server._server.server_state.connections  # pyright: ignore
    accepted = served.transport.get_extra_info("socket")  # pyright: ignore
    assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    connection.close()


TASKS = """
import threading
from turnwise.types import Message, Observation, StepResult, Task

class Tasks:
    max_turns = None

    def reset(self, task, noise_seed=0):
        return Observation(messages=(Message(role="user", content="Go."),))

    def step(self, message):
        return StepResult(messages=(), reward=1.0, terminated=True)

    def finish(self):
        return StepResult(messages=(), reward=0.0)

    def close(self):
        pass

    def make_task(self, seed, split):
        if seed == 1:
            threading.Event().wait()
        if seed == 2:
            raise SystemExit("no such task")
        return "no task" if seed == 3 else Task(id="t", seed=seed, split=split)
"""


def test_tasks_that_hang_or_fail_are_told_and_the_server_lives(tmp_path: Path) -> None:
    (tmp_path / "tasks.py").write_text(TASKS)
    env = EnvConfig(name=f"{tmp_path / 'tasks.py'}:Tasks")
    rollout = RolloutConfig(isolation="inline", reset_timeout=2.0)
    with EnvServer(env, rollout, max_sessions=2, idle_timeout=60.0) as server:

        def ask(seed: str) -> tuple[int, Any]:
            connection = connect(server)
            connection.request("POST", "/v1/task", f'{{"seed": {seed}, "split": "train"}}')
            return answer(connection)

        hung = connect(server)
        hung.request("POST", "/v1/task", '{"seed": 1, "split": "train"}')
        health = connect(server)
        health.request("GET", "/v1/health")
        assert answer(health)[0] == 200
        assert answer(hung)[0] == 504
        assert [ask(seed)[0] for seed in ("2", "3", "1e999", "4")] == [422, 422, 400, 200]
