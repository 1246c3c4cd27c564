"""Environments over HTTP: the same episodes as at home, and no session outlives the client that
wanted it."""

import asyncio
import contextlib
import gc
import http.client
import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from random import Random
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from starlette.applications import Starlette

from turnwise.config.schema import (
    Config,
    EnvConfig,
    FormatConfig,
    GroupsConfig,
    Isolation,
    RolloutConfig,
    TrainConfig,
)
from turnwise.envs.base import Env, EnvError, EnvTimeoutError, hint_of
from turnwise.envs.registry import make_env
from turnwise.envs.text_turns import TextTurns
from turnwise.evaluate.check_env import check_env
from turnwise.generate.scripted import ScriptedGenerator
from turnwise.isolation import measure
from turnwise.procs.event_loop import EventLoop
from turnwise.rollout.env_state import EnvStateManager
from turnwise.rollout.proxy import AgentProxy
from turnwise.serve.client import RemoteEnv, ServerFullError, SessionGoneError
from turnwise.serve.http import MAX_BODY, HttpServer, listen
from turnwise.serve.server import EnvServer
from turnwise.testing.tiny import tiny_tokenizer
from turnwise.types import Message, Status

LAKE = EnvConfig(name="frozen_lake", options={"is_slippery": True})
INLINE = RolloutConfig(isolation="inline")
FAULTY = "turnwise.testing.faulty:FaultyEnv"


def until(condition: Callable[[], bool], *, seconds: float = 600.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


@pytest.fixture
def lake() -> Iterator[EnvServer]:
    with EnvServer(LAKE, INLINE, max_sessions=2, idle_timeout=1.5) as server:
        yield server


@pytest.fixture
def patient() -> Iterator[EnvServer]:
    with EnvServer(LAKE, INLINE, idle_timeout=30.0) as server:
        yield server


def ask(server: EnvServer, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    """(status, answer) of one request, written by hand."""
    connection = http.client.HTTPConnection("127.0.0.1", urlsplit(server.url).port, timeout=10)
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    connection.request("GET" if body is None else "POST", path, data, headers)
    response = connection.getresponse()
    answer = json.loads(response.read())
    connection.close()
    return response.status, answer


def test_episodes_are_those_that_are_played_at_home(lake: EnvServer) -> None:
    remote, home = make_env(EnvConfig(name=lake.url)), make_env(LAKE)
    assert isinstance(home, TextTurns)
    for seed in range(3):
        task = home.make_task(seed, "val")
        assert remote.make_task(seed, "val") == task
        assert remote.reset(task, 5) == home.reset(task, 5)
        rng = Random(seed)
        while True:
            reply = Message(role="assistant", content=hint_of(home, "random", rng.getrandbits(32)))
            result = home.step(reply)
            assert remote.step(reply) == result
            if result.done:
                break
        with pytest.raises(EnvError, match="call reset first"):
            remote.step(reply)
        assert remote.finish() == home.finish()
    remote.close()
    remote.close()
    assert lake.sessions.health()["sessions"] == 0


def test_it_keeps_the_contract_of_an_environment(patient: EnvServer) -> None:
    home = make_env(LAKE)
    assert isinstance(home, TextTurns)

    def player(env: Env, rng: Random) -> str:
        return hint_of(home, "random", rng.getrandbits(32))

    home.reset(home.make_task(0, "train"))
    report = check_env(patient.url, seeds=3, player=player)
    assert report.ok, report


def play_lake(
    env: EnvConfig, isolation: Isolation, *, num_workers: int = 4, groups: int = 3
) -> list[Any]:
    """What a rollout under the tag "lake" came to, so that ids do not depend on where the
    environment is."""
    tokenizer = tiny_tokenizer()
    train = GroupsConfig(env_groups=groups, group_size=2, tags=("lake",))
    rollout = RolloutConfig(train=train, isolation=isolation, num_workers=num_workers)
    config = Config(envs={"lake": env}, rollout=rollout, train=TrainConfig(max_turn=3))
    words = ("down", "right")
    generator = ScriptedGenerator(
        lambda session, ids, call: f"<answer>{words[session.seed >> call & 1]}</answer>",
        tokenizer=tokenizer,
        end_id=tokenizer.eos_token_id,
    )
    proxy = AgentProxy(config, generator, tokenizer)
    try:
        episodes = proxy.play(0).episodes
    finally:
        proxy.close()
    return [
        (e.id, e.status, [(t.messages, t.reward, t.completion.ids) for t in e.turns])
        for e in episodes
    ]


SHORT = LAKE.model_copy(update={"format": FormatConfig(think=False, max_actions_per_turn=1)})


def test_a_rollout_does_not_notice_where_its_environments_are() -> None:
    with EnvServer(SHORT, INLINE, idle_timeout=5.0) as server:
        assert play_lake(EnvConfig(name=server.url), "thread") == play_lake(SHORT, "inline")
        assert server.sessions.health()["sessions"] == 0
        with pytest.raises(ValueError, match="runs in another process already"):
            play_lake(EnvConfig(name=server.url), "process")


@pytest.mark.parametrize("isolation", ["thread", "inline"])
def test_more_episodes_than_sessions_wait_without_holding_threads(isolation: Isolation) -> None:
    with EnvServer(SHORT, INLINE, max_sessions=3, idle_timeout=30.0) as server:
        played = play_lake(EnvConfig(name=server.url), isolation, num_workers=2, groups=8)
        assert played == play_lake(SHORT, "inline", groups=8)
        assert len(played) == 16
        assert server.sessions.health() == {
            "name": "frozen_lake",
            "sessions": 0,
            "max_sessions": 3,
            "ended_idle": 0,
        }


def test_lockstep_needs_as_many_sessions_as_episodes() -> None:
    train = GroupsConfig(env_groups=2, group_size=2)
    with EnvServer(SHORT, INLINE, max_sessions=3, idle_timeout=30.0) as server:
        config = Config(
            env=EnvConfig(name=server.url), rollout=RolloutConfig(train=train, isolation="inline")
        )
        manager = EnvStateManager(config)
        manager.reset()
        assert {agent.status for agent in manager.agents.values()} == {Status.ENV_ERROR}
        assert "raise its --max-sessions" in (manager.agents[0].error or "")
        manager.close()


def test_a_client_that_is_killed_leaves_no_session(lake: EnvServer) -> None:
    code = (
        "import sys, time\n"
        "from turnwise.serve.client import RemoteEnv\n"
        "env = RemoteEnv(sys.argv[1])\n"
        "env.reset(env.make_task(0, 'train'))\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n"
    )
    client = subprocess.Popen(
        [sys.executable, "-c", code, lake.url], stdout=subprocess.PIPE, text=True
    )
    try:
        assert client.stdout is not None
        assert client.stdout.readline() == "ready\n"
        time.sleep(3.0)
        assert lake.sessions.health()["sessions"] == 1, (
            "heartbeats must keep the session of a client that only thinks"
        )
    finally:
        client.send_signal(signal.SIGKILL)
        client.wait()
    assert until(lambda: lake.sessions.health()["sessions"] == 0)
    assert lake.sessions.health()["ended_idle"] == 1


def test_an_object_that_is_forgotten_leaves_no_session(lake: EnvServer) -> None:
    env = RemoteEnv(lake.url)
    env.reset(env.make_task(0, "train"))
    assert lake.sessions.health()["sessions"] == 1
    del env
    gc.collect()
    assert until(lambda: lake.sessions.health()["sessions"] == 0)


def test_sessions_are_limited_and_a_free_place_is_taken(lake: EnvServer) -> None:
    first, second = RemoteEnv(lake.url), RemoteEnv(lake.url)
    for env in (first, second):
        env.reset(env.make_task(0, "train"))
    hasty = RemoteEnv(lake.url, wait=0.1)
    with pytest.raises(ServerFullError, match="all 2 sessions are taken"):
        hasty.reset(hasty.make_task(0, "train"))
    third = RemoteEnv(lake.url, wait=10.0)
    threading.Timer(0.5, first.close).start()
    third.reset(third.make_task(0, "train"))
    for env in (second, third):
        env.close()


def test_a_call_that_is_repeated_is_played_once(lake: EnvServer) -> None:
    task = make_env(LAKE).make_task(1, "train").to_json()
    assert ask(lake, "/v1/sessions/abc/open", {})[0] == 200
    assert ask(lake, "/v1/sessions/abc/open", {})[0] == 200
    assert lake.sessions.health()["sessions"] == 1
    assert ask(lake, "/v1/sessions/abc/reset", {"task": task, "noise_seed": 0, "call": 1})[0] == 200
    reply = {"role": "assistant", "content": "<think></think><answer>down</answer>"}
    once = ask(lake, "/v1/sessions/abc/step", {"message": reply, "call": 2})
    assert ask(lake, "/v1/sessions/abc/step", {"message": reply, "call": 2}) == once
    status, answer = ask(lake, "/v1/sessions/abc/step", {"message": reply, "call": 9})
    assert (status, answer["error"]["message"]) == (409, "call 9 does not follow call 2")


class Cutter:
    """Stands between client and server, and hangs up on every other connection where it should pass
    an answer on. Of that answer the first `kept` bytes arrive."""

    def __init__(self, port: int, *, kept: int = 0) -> None:
        self._port, self._kept = port, kept
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.connections = 0
        self.cut = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self.connections += 1
                threading.Thread(
                    target=self._forward, args=(client, self.connections), daemon=True
                ).start()

    def _forward(self, client: socket.socket, number: int) -> None:
        with client, socket.create_connection(("127.0.0.1", self._port)) as server:
            for _ in range(2):
                request = client.recv(65536)
                while request and not request.endswith(
                    b"}" if request.startswith(b"POST") else b"\r\n\r\n"
                ):
                    request += client.recv(65536)
                if not request:
                    return
                server.sendall(request)
                answer = server.recv(65536)
                while not answer.endswith(b"}"):
                    answer += server.recv(65536)
                if number % 2 == 0:
                    self.cut += 1
                    client.sendall(answer[: self._kept])
                    return
                client.sendall(answer)

    def close(self) -> None:
        self._listener.close()


class Dripper(http.server.BaseHTTPRequestHandler):
    """A server of one session that answers a heartbeat for as long as the test lasts."""

    over = threading.Event()

    def do_GET(self) -> None:
        self._say(b'{"name": "drip", "max_sessions": 1, "max_turns": null}')

    def do_POST(self) -> None:
        if not self.path.endswith("/heartbeat"):
            return self._say(b'{"idle_timeout": 0.2}')
        self.send_response(200)
        self.send_header("Content-Length", "1000000")
        self.end_headers()
        while not self.over.wait(0.1):
            with contextlib.suppress(OSError):
                self.wfile.write(b" ")

    def _say(self, body: bytes) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("ending", ["dead", "dripping"])
def test_a_server_that_fails_holds_up_no_other_servers_heartbeats(
    ending: str, lake: EnvServer
) -> None:
    if ending == "dead":
        with EnvServer(SHORT, INLINE, idle_timeout=0.4) as server:
            bad = RemoteEnv(server.url)
            bad.reset(bad.make_task(0, "train"))
    else:
        Dripper.over.clear()
        other = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Dripper)
        threading.Thread(target=other.serve_forever, daemon=True).start()
        bad = RemoteEnv(f"http://127.0.0.1:{other.server_port}")
        bad._open()
    try:
        before = bad._beaten
        assert until(lambda: bad._beaten > before), "no heartbeat was tried"
        remote = RemoteEnv(lake.url)
        remote.reset(remote.make_task(0, "train"))
        for _ in range(3):
            last = remote._beaten
            assert until(lambda last=last: remote._beaten > last, seconds=60.0)
        remote.step(Message(role="assistant", content="<answer>Up</answer>"))
        remote.close()
    finally:
        Dripper.over.set()
        if ending == "dripping":
            other.shutdown()
            other.server_close()


@pytest.mark.parametrize("kept", [0, -5])
def test_lost_answers_are_asked_for_again(patient: EnvServer, kept: int) -> None:
    cutter = Cutter(urlsplit(patient.url).port or 0, kept=kept)
    remote, home = RemoteEnv(cutter.url, timeout=10.0), make_env(LAKE)
    assert isinstance(home, TextTurns)
    task = home.make_task(3, "train")
    assert remote.reset(task, 1) == home.reset(task, 1)
    rng = Random(0)
    for _ in range(8):
        reply = Message(role="assistant", content=hint_of(home, "random", rng.getrandbits(32)))
        result = home.step(reply)
        assert remote.step(reply) == result
        if result.done:
            assert remote.reset(task, 1) == home.reset(task, 1)
    assert cutter.cut >= 3
    remote.close()
    cutter.close()


def test_an_ended_session_is_said_to_be_gone(lake: EnvServer) -> None:
    env = RemoteEnv(lake.url)
    task = env.make_task(0, "train")
    env.reset(task)
    for name in list(lake.sessions._sessions):  # pyright: ignore[reportPrivateUsage]
        assert ask(lake, f"/v1/sessions/{name}/close", {})[0] == 200
    with pytest.raises(SessionGoneError, match="closed, or idle for too long"):
        env.step(Message(role="assistant", content="x"))
    env.reset(task)
    env.close()


def reset_often(env: Env) -> None:
    for seed in range(50):
        env.reset(env.make_task(seed, "train"), seed)


def test_a_slow_served_environment_is_asked_by_threads(
    patient: EnvServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "CHEAP_STEP_SECONDS", 0.0)
    kind, measured = measure.choose_isolation(
        {"served": EnvConfig(name=patient.url)}, RolloutConfig(), factories={}
    )
    assert kind == "thread"
    assert measured["served"] > 0


def test_failures_of_the_environment_are_the_episodes() -> None:
    env = EnvConfig(
        name=FAULTY, options={"share": 1.0, "faults": ["raise"]}, format=FormatConfig(style="raw")
    )
    with EnvServer(env, INLINE) as server:
        remote = RemoteEnv(server.url)
        with pytest.raises(EnvError, match="told to break"):
            reset_often(remote)
        assert server.sessions.health()["sessions"] == 1
        remote.close()


def test_a_hanging_environment_is_killed_on_the_server() -> None:
    env = EnvConfig(
        name=FAULTY, options={"share": 1.0, "faults": ["hang"]}, format=FormatConfig(style="raw")
    )
    rollout = RolloutConfig(isolation="process", num_workers=1, step_timeout=0.5, reset_timeout=0.5)
    with EnvServer(env, rollout) as server:
        remote = RemoteEnv(server.url)
        with pytest.raises(EnvTimeoutError, match=r"took longer than 0.5 s"):
            reset_often(remote)
        remote.close()
    assert not any(
        "turnwise.isolation.worker" in " ".join(p.cmdline()) for p in psutil.Process().children()
    )


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/nothing", None, 404),
        ("/v2/spec", None, 404),
        ("/v1/../../etc/passwd", None, 404),
        ("/v1/sessions/..%2f..%2fetc/open", {}, 404),
        ("/v1/sessions/a-b/open", {}, 400),
        ("/v1/sessions/abc/dance", {"call": 1}, 404),
        ("/v1/task", None, 405),
        ("/v1/task", b"[" * 100_000 + b"]" * 100_000, 400),
        ("/v1/task", b'{"seed": ' + b"9" * 5_000 + b', "split": "train"}', 400),
        (f"/v1/sessions/{'x' * 65}/open", {}, 400),
        ("/v1/sessions/nobody/step", {"call": 1, "message": {}}, 410),
        ("/v1/sessions/nobody/step", {}, 400),
        ("/v1/task", {"seed": "x", "split": "train"}, 400),
        ("/v1/task", {}, 400),
        ("/v1/task", b"{broken", 400),
        ("/v1/task", b"[]", 400),
        ("/v1/task", b"\xff\xfe", 400),
    ],
)
def test_bad_requests_are_refused(lake: EnvServer, path: str, body: Any, status: int) -> None:
    found, answer = ask(lake, path, body)
    assert (found, bool(answer["error"]["message"])) == (status, True)
    assert ask(lake, "/v1/health")[0] == 200


def test_a_request_that_is_too_large_is_refused_unread(lake: EnvServer) -> None:
    status, answer = ask(lake, "/v1/task", b"{}", **{"Content-Length": str(MAX_BODY + 1)})
    assert (status, "at most" in answer["error"]["message"]) == (413, True)


def test_a_token_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="needs a token"):
        EnvServer(LAKE, INLINE, host="0.0.0.0")
    with EnvServer(LAKE, INLINE, token="secret") as server:
        with pytest.raises(EnvError, match="TURNWISE_TOKEN"):
            RemoteEnv(server.url)
        monkeypatch.setenv("TURNWISE_TOKEN", "secret")
        assert RemoteEnv(server.url).max_turns is None


def test_errors_of_the_client_say_what_to_do() -> None:
    with pytest.raises(ValueError, match="has a url such as"):
        RemoteEnv("nowhere")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(EnvError, match=r"after 6 tries.*is `turnwise serve-env` running there"):
        RemoteEnv(f"http://127.0.0.1:{port}")


def test_settings_that_only_the_server_can_honour_are_refused(lake: EnvServer) -> None:
    with pytest.raises(ValueError, match=r"env.format has no effect.*serve-env"):
        make_env(EnvConfig(name=lake.url, format=FormatConfig(think=False)))


def test_the_command_serves_and_stops_clean() -> None:
    command = [
        sys.executable,
        "-m",
        "turnwise",
        "serve-env",
        "bandit",
        "--port",
        "0",
        "--rollout.isolation",
        "process",
    ]
    server = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    )
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        env = RemoteEnv(line.split(" at ")[1].split(" ")[0])
        env.reset(env.make_task(0, "train"))
        workers = psutil.Process(server.pid).children()
        assert len(workers) == 1
        server.terminate()
        assert server.wait(timeout=20) == 0
        assert until(lambda: not workers[0].is_running())
    finally:
        server.kill()
        server.wait()


def test_a_server_whose_wait_was_interrupted_is_stopped_before_stop_returns() -> None:
    closed: list[bool] = []

    async def closing() -> None:
        await asyncio.sleep(0.5)
        closed.append(True)

    listener, _ = listen("127.0.0.1", 0, token=None)
    server = HttpServer(Starlette(), listener=listener, max_connections=8, closing=closing)
    server.start()
    with interrupted(), pytest.raises(KeyboardInterrupt):
        server.wait(600)
    server.stop()
    assert closed == [True]


def test_an_interrupted_loop_in_a_thread_has_ended_its_job_before_it_returns() -> None:
    ended: list[bool] = []

    async def job() -> None:
        try:
            await asyncio.sleep(600)
        finally:
            time.sleep(0.5)
            ended.append(True)

    async def within_a_running_loop() -> None:
        with interrupted(), pytest.raises(KeyboardInterrupt):
            EventLoop().run(job())

    asyncio.run(within_a_running_loop())
    assert ended == [True]


@contextlib.contextmanager
def interrupted() -> Iterator[None]:
    """Raises KeyboardInterrupt in this thread, as Ctrl-C does."""
    old = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, old)
