"""Where programs run: worker processes, other machines, and what their deaths cost."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
import warm
from agent_parts import agent_config, check_tokens, scripted

import turnwise
from turnwise.endpoint import env
from turnwise.endpoint.beside import EndpointProcess
from turnwise.endpoint.worker import Gone, Worker
from turnwise.isolation import local
from turnwise.isolation.processes import WorkerLostError
from turnwise.log.store import RunReader
from turnwise.rollout.proxy import AgentProxy
from turnwise.testing.tiny import tiny_model, tiny_tokenizer
from turnwise.types import Episode, Status, Task

SOLVE = '''
import os
import time
from pathlib import Path

HERE = Path(__file__).parent


def solve(task, client):
    messages = [{"role": "user", "content": f"Task {task.seed % 1000}"}]
    for _ in range(2):
        answer = client.chat.completions.create(model="policy", messages=messages)
        messages += [answer.choices[0].message, {"role": "user", "content": "And?"}]
    return float(os.getpid())


def dies_once(task, client):
    """The first episode takes its whole worker down."""
    mark = HERE / "died"
    client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "Hi"}])
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return 1.0
    os._exit(9)
'''


@pytest.fixture
def program(tmp_path: Path) -> str:
    (tmp_path / "solve.py").write_text(SOLVE)
    return f"agent:{tmp_path}/solve.py"


def play(name: str, **settings: Any) -> list[Episode]:
    recorder = scripted("fine")
    config = agent_config(name, step_timeout=600.0, reset_timeout=600.0, **settings)
    proxy = AgentProxy(config, recorder, tiny_tokenizer())
    try:
        episodes = proxy.play_all(0)
    finally:
        proxy.close()
    if not settings.get("retries"):
        check_tokens(episodes, recorder)
    return episodes


def workers() -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process().children(recursive=True)
        if "turnwise.endpoint.worker" in " ".join(child.cmdline())
    ]


def endpoint_processes() -> list[psutil.Process]:
    """Each is the child of a process that guards it."""
    guards = [
        child
        for child in psutil.Process().children()
        if "turnwise.endpoint.process" in child.cmdline()
    ]
    return [one for guard in guards for one in guard.children()]


def test_worker_processes_run_programs_and_end_with_their_environments(program: str) -> None:
    episodes = play(f"{program}:solve", groups=6, options={"workers": 2})
    assert {episode.status for episode in episodes} == {Status.COMPLETED}
    pids = {int(episode.reward) for episode in episodes}
    assert os.getpid() not in pids
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    assert workers() == []


def test_a_worker_that_dies_costs_nothing_but_time(
    program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(env, "LEASE", 6.0)
    episodes = play(f"{program}:dies_once", groups=3, options={"workers": 1})
    assert [episode.error for episode in episodes] == [None] * 3
    assert [episode.reward for episode in episodes] == [1.0] * 3


def test_an_endpoint_that_dies_costs_nothing_but_time(tmp_path: Path) -> None:
    """Another takes its place at the same address, and the episodes are played again."""
    mark = tmp_path / "died"

    def kills_it_once(task: Task, client: Any) -> float:
        question = {"role": "user", "content": "Hi"}
        client.chat.completions.create(model="policy", messages=[question])
        try:
            mark.touch(exist_ok=False)
        except FileExistsError:
            return 1.0
        for process in endpoint_processes():
            process.kill()
        return 0.0

    episodes = play(turnwise.agent(kills_it_once), groups=3)
    assert [episode.error for episode in episodes] == [None] * 3
    assert [episode.reward for episode in episodes] == [1.0] * 3


def test_an_endpoint_that_dies_with_a_request_unread_is_noticed() -> None:
    """Then reading from it is an error (ECONNRESET), not the end of a file."""
    endpoint = EndpointProcess()
    early = endpoint.call("step", 0, lambda data: data, text="", said={})
    assert "before its reset" in str(early.exception(timeout=600))
    for process in endpoint_processes():
        process.suspend()
        while process.status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
    waiting = endpoint.call("step", 0, lambda data: data, text="", said={})
    for process in endpoint_processes():
        process.kill()
    lost = waiting.exception(timeout=600)
    assert isinstance(lost, WorkerLostError)
    assert "died" in str(lost)
    again = endpoint.call("step", 0, lambda data: data, text="", said={})
    assert "before its reset" in str(again.exception(timeout=600))


def test_workers_in_this_process_that_gave_up_are_replaced() -> None:
    """They end when no endpoint answers for a while, as between two rollouts in which it died."""

    def answers(client: Any) -> float:
        client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "?"}])
        return 1.0

    config = agent_config(turnwise.agent(answers), groups=2)
    others = set(env._STAFFS)
    proxy = AgentProxy(config, scripted("fine"), tiny_tokenizer())
    try:
        assert [episode.reward for episode in proxy.play_all(0)] == [1.0, 1.0]
        (staff,) = [staff for key, staff in env._STAFFS.items() if key not in others]
        assert staff._threads is not None
        staff._threads._give_up(Gone("no answer"))
        assert [episode.reward for episode in proxy.play_all(1)] == [1.0, 1.0]
    finally:
        proxy.close()


def test_a_program_of_this_process_alone_is_refused_in_workers() -> None:
    def here(client: Any) -> float:
        return 1.0

    config = agent_config(here, options={"workers": 2})
    with pytest.raises(ValueError, match="known to this process alone"):
        AgentProxy(config, scripted("fine"), tiny_tokenizer())


@pytest.fixture
def elsewhere(program: str, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv("TURNWISE_TOKEN", "a secret")
    return f"{program}:solve", f"127.0.0.1:{port}"


def start_worker(where: str, program: str, token: str = "a secret") -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "turnwise", "work", f"http://{where}", program, "--slots", "4"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TURNWISE_TOKEN": token},
    )


def test_programs_run_on_other_machines(elsewhere: tuple[str, str]) -> None:
    name, where = elsewhere
    options = {"workers": "elsewhere", "listen": where}
    found: list[Episode] = []
    playing = threading.Thread(
        target=lambda: found.extend(play(name, groups=8, options=options)), daemon=True
    )
    playing.start()
    first = start_worker(where, name)
    stranger = start_worker(where, name, token="a guess")
    try:
        playing.join(600)
        assert [episode.status for episode in found] == [Status.COMPLETED] * 8
        assert {int(episode.reward) for episode in found} == {first.pid}
        assert stranger.wait(600) == 1
        assert "does not know this worker's token" in (stranger.communicate()[1] or "")
    finally:
        first.send_signal(signal.SIGTERM)
        first.communicate()


class OneJob(BaseHTTPRequestHandler):
    """An endpoint that has a single task."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        jobs: list[dict[str, Any]] = self.server.jobs  # pyright: ignore[reportAttributeAccessIssue]
        answer = json.dumps(jobs.pop() if self.path.endswith("/next") and jobs else {}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        """Nothing is said."""


def test_a_worker_that_is_stopped_takes_its_commands_with_it(tmp_path: Path) -> None:
    task = Task(id="t", seed=1).to_json()
    server = ThreadingHTTPServer(("127.0.0.1", 0), OneJob)
    server.jobs = [{"token": "t", "task": task, "base_url": "http://127.0.0.1:1"}]  # pyright: ignore[reportAttributeAccessIssue]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url, program = f"http://127.0.0.1:{server.server_port}", "command:sleep 1000; true"
    working = subprocess.Popen(
        [sys.executable, "-m", "turnwise", "work", url, program, "--slots", "1"],
        cwd=tmp_path,
        env={**os.environ, "TURNWISE_TOKEN": "a secret"},
    )
    family: list[psutil.Process] = []
    try:
        while not family:
            time.sleep(0.05)
            family = psutil.Process(working.pid).children(recursive=True)
    finally:
        working.send_signal(signal.SIGTERM)
        working.wait()
        server.shutdown()
        server.server_close()
    left = [process for process in family if is_alive(process)]
    for process in left:
        process.kill()
    assert left == []


def is_alive(process: psutil.Process) -> bool:
    """Whether it still does anything: a process that was killed may not have been waited for."""
    with contextlib.suppress(psutil.NoSuchProcess, psutil.TimeoutExpired):
        process.wait(5)
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def test_serve_policy_trains_for_workers(elsewhere: tuple[str, str], tmp_path: Path) -> None:
    name, where = elsewhere
    model = tmp_path / "model"
    tiny_model().save_pretrained(model)
    tiny_tokenizer().save_pretrained(model)
    words = [
        *(f"model.path={model}", "train.device=cpu", "train.steps=1", "algo.name=grpo"),
        *("rollout.train.env_groups=2", "rollout.train.group_size=2", "rollout.slots=4"),
        *("rollout.max_response_tokens=4", "rollout.max_context=512", "rollout.step_timeout=600"),
        *("eval.before=false", "eval.after=false", "eval.baselines=false", "log.report=false"),
        *(f"log.dir={tmp_path}", "log.name=served"),
    ]
    line = [sys.executable, "-m", "turnwise", "serve-policy", name, "--listen", where, *words]
    trainer = subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path
    )
    worker = start_worker(where, name)
    try:
        said, _ = trainer.communicate(timeout=600)
        assert trainer.returncode == 0, said
        (row,) = RunReader(tmp_path / "served").metrics()
        assert row["rollout/episodes"] == 4
        assert row["rollout/reward"] == pytest.approx(worker.pid)
    finally:
        trainer.kill()
        worker.send_signal(signal.SIGTERM)
        worker.communicate()


def test_a_worker_waits_for_a_run_that_is_still_loading(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("turnwise.endpoint.worker.PATIENCE", 0.0)

    class Answers(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(401)
            self.end_headers()

    with socket.create_server(("127.0.0.1", 0)) as free:
        address = free.getsockname()
    worker = Worker(f"http://{address[0]}:{address[1]}", "agents", "a secret", "a.py:a", slots=2)
    working = threading.Thread(target=worker.run, daemon=True)
    working.start()
    while "waiting for http" not in caplog.text:
        time.sleep(0.05)
    with HTTPServer(address, Answers) as late:
        threading.Thread(target=late.serve_forever, daemon=True).start()
        working.join()  # it ends when it is refused
        late.shutdown()
    assert worker.refused
    assert caplog.text.count("waiting for http") == 1


def test_workers_with_another_program_are_refused_and_the_trainer_needs_none(
    elsewhere: tuple[str, str], tmp_path: Path
) -> None:
    """The file lies on the worker's machine, in a folder of its own."""
    name, where = elsewhere
    options = {"workers": "elsewhere", "listen": where}
    program = name.removeprefix("agent:")
    config = agent_config("agent:solve.py:solve", step_timeout=600.0, options=options)
    proxy = AgentProxy(config, scripted("fine"), tiny_tokenizer())
    other = Worker(f"http://{where}", "agents", "a secret", f"{tmp_path}/b.py:b", slots=1)
    right = Worker(f"http://{where}", "agents", "a secret", program, slots=1)
    try:
        other.run()
        assert other.refused
        assert other.ended == (
            "this run has no program 'b.py:b', but 'solve.py:solve'; start the worker with that one"
        )
        playing = ThreadPoolExecutor(1).submit(proxy.play_all, 0)
        right.start()
        (episode,) = playing.result(600)
        assert episode.status is Status.COMPLETED, episode.error
    finally:
        right.stop()
        proxy.close()


def test_the_endpoint_beyond_this_machine_needs_a_token(program: str) -> None:
    config = agent_config(
        f"{program}:solve", options={"workers": "elsewhere", "listen": "0.0.0.0:0"}
    )
    with pytest.raises(ValueError, match="TURNWISE_TOKEN"):
        AgentProxy(config, scripted("fine"), tiny_tokenizer())


def test_a_run_waits_for_workers_and_says_so(
    elsewhere: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """`rollout.reset_timeout` counts from the moment a worker has the task."""
    name, where = elsewhere
    config = agent_config(
        name,
        reset_timeout=30.0,
        step_timeout=600.0,
        stall_timeout=0.2,
        options={"workers": "elsewhere", "listen": where},
    )
    proxy = AgentProxy(config, scripted("fine"), tiny_tokenizer())
    worker = Worker(f"http://{where}", "agents", "a secret", name.removeprefix("agent:"), slots=1)
    try:
        playing = ThreadPoolExecutor(1).submit(proxy.play_all, 0)
        while "nothing has moved" not in caplog.text:
            assert not playing.done()
            time.sleep(0.1)
        worker.start()
        (episode,) = playing.result(600)
        assert episode.status is Status.COMPLETED, episode.error
    finally:
        worker.stop()
        proxy.close()


def test_workers_that_die_at_their_start_are_an_error(
    program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(env, "MAX_DEATHS", 3)
    monkeypatch.setattr(env, "child_command", lambda *_: ["/bin/sh", "-c", "exit 7"])
    monkeypatch.setattr(local, "MEND_PAUSE", 0.1)
    (episode,) = play(f"{program}:solve", options={"workers": 1})
    assert episode.status is Status.ENV_ERROR
    assert "3 workers died one after another" in (episode.error or "")
    assert "exit code 7" in (episode.error or "")


def test_serve_answers_openai_clients(tmp_path: Path) -> None:
    from turnwise.testing.tiny import tiny_model

    tokenizer = tiny_tokenizer()
    tiny_model().save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    server = subprocess.Popen(
        [*warm.turnwise(), "serve", str(tmp_path / "model"), "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        url = server.stdout.readline().split()[-1]
        client = openai.OpenAI(base_url=url, api_key="x", max_retries=0)
        messages: list[Any] = [{"role": "user", "content": "Hello"}]

        def ask(**options: Any) -> Any:
            return client.chat.completions.create(
                model="m", messages=messages, max_tokens=20, temperature=0, **options
            )

        whole = ask(logprobs=True)
        assert whole.usage.completion_tokens <= 20
        assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens
        pieces: list[int] = []
        for word in ("Hello", "a", "What now?", "left", "0 1 2", "zzz"):
            messages[0]["content"] = word
            streamed = [
                chunk.choices[0].delta.content or "" for chunk in ask(stream=True) if chunk.choices
            ]
            text = ask().choices[0].message.content
            assert "".join(streamed).strip() == text.strip()
            pieces.append(len([text for text in streamed if text]))
        assert max(pieces) > 1
        assert client.responses.create(model="m", input="Hello", max_output_tokens=4).output
        with pytest.raises(openai.BadRequestError, match="frequency_penalty"):
            ask(frequency_penalty=1.0)
        messages[0]["content"] = "long " * 100_000
        with pytest.raises(openai.BadRequestError) as caught:
            ask()
        assert caught.value.code == "context_length_exceeded"
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(600) == 0
