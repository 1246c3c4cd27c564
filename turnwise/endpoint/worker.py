# pyright: reportUnknownVariableType=false
"""Workers run programs: a function, a class or a command line, many at once, in this process, in
processes beside it, or on other machines."""

import asyncio
import contextlib
import http.client
import inspect
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from turnwise.endpoint.client import make_client
from turnwise.envs.base import EnvError
from turnwise.envs.gate import json_safe, raised_at, words
from turnwise.types import Json, Task
from turnwise.user_code import load_object, wanted_arguments

logger = logging.getLogger(__name__)
COMMAND = "$ "
"""Prefix of a program that is a command line."""
ALIVE = 2.0
"""Seconds between two signs of life."""
GRACE = 5.0
"""Seconds that a program may go on when its episode is over."""
PATIENCE = 30.0
"""Seconds without an answer of the endpoint after which a worker ends."""
FIRST_PATIENCE = 600.0
"""The same before its first answer: the run may still be loading its model."""
MAX_OUTPUT = 1 << 20
"""Characters of a command's output that are kept."""
TOKEN = "TURNWISE_TOKEN"


class Gone(Exception):
    """The endpoint does not answer any more."""


class Refused(Gone):
    """The endpoint wants nothing of this worker."""


ELSEWHERE = "agents"
"""The queue of workers on other machines. They say which program they have."""


def program_label(program: str) -> str:
    """The name by which the run and its workers elsewhere know a program, wherever its file lies.

    Example:
        >>> program_label("/opt/solve.py:solve"), program_label("team.solve:solve")
        ('solve.py:solve', 'team.solve:solve')
    """
    file, _, name = program.rpartition(":")
    plain = program.startswith(COMMAND) or not file.endswith(".py")
    return program if plain else f"{Path(file).name}:{name}"


class Worker:
    """Takes tasks of a queue from an endpoint and runs the program on each, `slots` at a time.

    A program that does not end when its episode is over keeps its thread; another takes its place.
    """

    def __init__(self, url: str, queue: str, token: str, program: str, *, slots: int) -> None:
        self._url, self._queue, self._token = url, queue, token
        self._program, self._slots = program, slots
        self._stopping = threading.Event()
        self._active: dict[str, float | None] = {}  # token -> since when it is over
        self._commands: set[subprocess.Popen[str]] = set()
        self._lock = threading.Lock()
        self._threads = 0
        self._told = threading.Lock()
        """Taken by the one who says that the endpoint does not answer yet."""
        self.refused = False
        """True if it ended because the endpoint wants nothing of it."""
        self.ended: str | None = None
        """Why it ended, where that was not asked for."""

    def start(self) -> None:
        """Starts the threads, and returns."""
        _reach_directly(self._url)
        for _ in range(self._slots):
            self._start_thread()
        threading.Thread(target=self._stay_alive, name="turnwise-alive", daemon=True).start()

    def run(self) -> None:
        """Works until the endpoint is gone or `stop` was called."""
        self.start()
        self._stopping.wait()

    def stop(self) -> None:
        """Takes no more tasks, and ends the commands that run."""
        with self._lock:
            for process in self._commands:
                _kill_group(process)
            self._stopping.set()

    def _give_up(self, error: Gone) -> None:
        self.refused = self.refused or isinstance(error, Refused)
        self.ended = self.ended or (
            str(error) if self.refused else f"the endpoint is gone: {error}"
        )
        self.stop()

    def _start_thread(self) -> None:
        self._threads += 1
        name = f"turnwise-agent-{self._threads}"
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def _work(self) -> None:
        call = _Caller(self._url, self._token, told=self._told)
        whose = {"program": program_label(self._program)} if self._queue == ELSEWHERE else {}
        while not self._stopping.is_set():
            try:
                job = call.post(f"/work/{self._queue}/next", whose)
            except Gone as error:
                self._give_up(error)
                return
            if not job.get("token"):
                continue
            token = str(job["token"])
            with self._lock:
                self._active[token] = None
            try:
                outcome = self._play(job)
            finally:
                with self._lock:
                    given_up = token not in self._active
                    self._active.pop(token, None)
            with contextlib.suppress(Gone):
                call.post(f"/e/{token}/v1/done", outcome)
            if given_up:  # another thread has this one's place
                return

    def _play(self, job: Mapping[str, Any]) -> dict[str, Json]:
        """The program's result on a task, or its error, as JSON."""
        try:
            task = Task.from_json(job["task"])
            if self._program.startswith(COMMAND):
                return self._run_command(self._program.removeprefix(COMMAND), task, job)
            found = run_function(load_object(self._program), task, str(job["base_url"]))
            return _outcome(found)
        except BaseException as error:
            if isinstance(error, EnvError):
                return {"error": words(error)}
            return {"error": f"the program raised {raised_at(error)}"}

    def _run_command(self, command: str, task: Task, job: Mapping[str, Any]) -> dict[str, Json]:
        url, token = str(job["base_url"]), str(job["token"])
        environment = {
            **os.environ,
            "OPENAI_BASE_URL": url,
            "OPENAI_API_BASE": url,
            "OPENAI_API_KEY": token,
            "TURNWISE_BASE_URL": url,
            "TURNWISE_TASK": json.dumps(task.to_json()),
        }
        environment.pop(TOKEN, None)
        with self._lock:
            if self._stopping.is_set():
                return {"error": "the worker has ended"}
            process = subprocess.Popen(
                ["/bin/sh", "-c", command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
                start_new_session=True,
                text=True,
                errors="replace",
            )
            self._commands.add(process)
        kept: list[str] = ["", ""]

        def drain(place: int, stream: Any) -> None:
            while text := stream.read(4096):
                kept[place] = (kept[place] + text)[-MAX_OUTPUT:]

        readers = [
            threading.Thread(target=drain, args=(place, stream), daemon=True)
            for place, stream in enumerate((process.stdout, process.stderr))
        ]
        for reader in readers:
            reader.start()
        try:
            while process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.1)
                with self._lock:
                    since = self._active.get(token)
                if since is not None and time.monotonic() - since > GRACE:
                    return {"error": "the command went on when its episode was over"}
        finally:
            with self._lock:
                self._commands.remove(process)
                _kill_group(process)
            process.wait()
            for reader in readers:
                reader.join(1.0)
        if process.returncode:
            tail = kept[1].strip()[-500:] or kept[0].strip()[-500:]
            return {"error": f"the command ended with exit code {process.returncode}: {tail}"}
        return _outcome(_last_line(kept[0]))

    def _stay_alive(self) -> None:
        call = _Caller(self._url, self._token, told=self._told)
        while not self._stopping.wait(ALIVE):
            with self._lock:
                tokens = list(self._active)
            try:
                over = call.post(f"/work/{self._queue}/alive", {"tokens": tokens}).get("over")
            except Gone as error:
                self._give_up(error)
                return
            now = time.monotonic()
            for token in over if isinstance(over, list) else ():
                with self._lock:
                    if token not in self._active:
                        continue
                    since = self._active[token] = self._active[token] or now
                    stuck = now - since > GRACE + 2 * ALIVE
                    if stuck:
                        del self._active[token]
                if stuck:
                    logger.warning(
                        "a program goes on though its episode is over; its thread is lost"
                    )
                    self._start_thread()


def _kill_group(process: "subprocess.Popen[str]") -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _reach_directly(url: str) -> None:
    """Excepts the endpoint from the proxies of this process, whose programs inherit that: what a
    proxy is for is not in reach of the endpoint, and a program's client would ask the proxy."""
    host = urlsplit(url).hostname or ""
    for name in ("NO_PROXY", "no_proxy"):
        hosts = [one.strip() for one in os.environ.get(name, "").split(",") if one.strip()]
        if host and host not in hosts:
            os.environ[name] = ",".join([*hosts, host])


def run_function(program: Any, task: Task, base_url: str) -> Any:
    """The result of the function (or of the `run` of a class) for a task. It gets the arguments
    that it names: task, client, base_url.

    Raises:
        EnvError: it is nothing that can be called with these.
    """
    target = program() if isinstance(program, type) else program
    function: Callable[..., Any] = getattr(target, "run", target)
    if not callable(function):
        raise EnvError("an agent is a function, or a class with a method `run`")
    names = inspect.signature(function).parameters
    known: dict[str, Any] = {"task": task, "client": None, "base_url": base_url}
    wanted = wanted_arguments(function, known) if names else frozenset[str]()
    client = None
    if "client" in wanted:
        waits = inspect.iscoroutinefunction(inspect.unwrap(function))
        client = known["client"] = make_client(base_url, waits=waits)
    given = {name: known[name] for name in wanted}
    try:
        found = function(**given)
        return asyncio.run(_awaited(found, client)) if inspect.isawaitable(found) else found
    finally:
        if client is not None and not hasattr(client, "__aenter__"):
            client.close()


async def _awaited(found: Awaitable[Any], client: Any) -> Any:
    try:
        return await found
    finally:
        if client is not None and hasattr(client, "__aenter__"):
            await client.close()


def _outcome(value: Any) -> dict[str, Json]:
    """The result of a program, as JSON for the endpoint."""
    if isinstance(value, Mapping):
        known = cast(Mapping[str, Any], value)
        return {key: json_safe(known.get(key)) for key in ("reward", "success", "info")}
    if value is not None and hasattr(value, "reward"):
        return {
            "reward": json_safe(value.reward),
            "success": json_safe(getattr(value, "success", None)),
        }
    return {"reward": json_safe(value)}


def _last_line(output: str) -> Any:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    if not lines:
        return None
    try:
        return json.loads(lines[-1])
    except ValueError:
        return None


class _Caller:
    """Sends JSON to the endpoint over one connection, and connects again where it broke."""

    def __init__(self, url: str, token: str, *, told: threading.Lock) -> None:
        self._url, self._told = url, told
        parts = urlsplit(url)
        secure = parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        self._connection = kind(parts.hostname or "", parts.port, timeout=60)
        self._answered = False
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}

    def post(self, path: str, body: Mapping[str, Json]) -> dict[str, Any]:
        """The answer. {} where the endpoint refused the request.

        Raises:
            Gone: there was no answer for PATIENCE seconds, or FIRST_PATIENCE at first.
        """
        data = json.dumps(body, allow_nan=False).encode()
        deadline = time.monotonic() + (PATIENCE if self._answered else FIRST_PATIENCE)
        while True:
            try:
                self._connection.request("POST", path, data, self._headers)
                response = self._connection.getresponse()
                answer = json.loads(response.read() or b"{}")
                self._answered = True
                if response.status in (401, 409):
                    raise Refused(_message(answer))
                if response.status != 200:
                    # That an episode is over is nothing to tell: programs end a little after it.
                    level = logging.DEBUG if response.status == 410 else logging.WARNING
                    logger.log(level, "the endpoint answered %d: %s", response.status, answer)
                    return {}
                return answer if isinstance(answer, dict) else {}
            except (OSError, http.client.HTTPException, ValueError) as error:
                self._connection.close()
                if time.monotonic() > deadline:
                    raise Gone(str(error)) from error
                if not self._answered and self._told.acquire(blocking=False):  # once for all slots
                    logger.warning("waiting for %s: %s", self._url, error)
                time.sleep(0.2)


def _message(answer: Any) -> str:
    """The words of an error of the endpoint."""
    try:
        return str(answer["error"]["message"])
    except (TypeError, KeyError):
        return str(answer)


def main(arguments: list[str]) -> None:
    """Works for an endpoint until it is gone: URL QUEUE PROGRAM SLOTS, its token in the
    environment."""
    url, queue, program, slots = arguments
    # Commands and programs do not see it.
    token = os.environ.pop(TOKEN, "")
    sys.path.insert(0, os.getcwd())
    Worker(url, queue, token, program, slots=int(slots)).run()
