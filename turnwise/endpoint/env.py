"""Programs that call the model, as environments."""

import contextlib
import itertools
import logging
import os
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from random import Random
from typing import Any

from turnwise.endpoint.beside import (
    EndpointProcess,
    shared_endpoint,
)
from turnwise.endpoint.wire import observation_from_json, result_from_json
from turnwise.endpoint.worker import COMMAND, ELSEWHERE, TOKEN, Worker, program_label
from turnwise.envs.base import EnvError, Hint
from turnwise.envs.data_rows import RowSplits, load_rows
from turnwise.envs.tools.sample import random_reply
from turnwise.isolation.processes import WorkerLostError
from turnwise.procs.channel import STOP_SECONDS, child_command, stop
from turnwise.types import Json, Message, Observation, StepResult, Task
from turnwise.user_code import is_only_here, load_object, name_of

logger = logging.getLogger(__name__)
SLOTS = 64
"""Programs that a worker runs at once."""
MEND_PAUSE = 2.0
"""Seconds between two looks whether the workers are alive, while a task waits for one."""
MAX_DEATHS = 20
"""Workers that die right after their start, one after another, before their tasks are given up."""
QUICK = 10.0
"""Seconds after its start within which a worker's death counts as one of those."""
LEASE = 30.0
"""Seconds without a sign of life after which the worker of an episode counts as lost."""
_COUNT, _ENVS = itertools.count(), itertools.count()


class AgentEnv:
    """A program that calls the model through OpenAI's API, as an environment: every call is a turn.

    Args:
        program: FILE.py:FUNCTION or module:function. It gets `task` and `client` by name, may be
            async, and returns its reward: a number, or a dict with reward, success and info. A
            new object of a class is made for every episode, and its `run` is called.
        tasks: rows, or a JSONL file; a row is the payload of a task. None: a task is a seed.
        val_fraction: the share of the rows that is held out.
        workers: processes that run the program. 0: threads of this process. "elsewhere": none; they
            are started with `turnwise work`, on any machine.
        slots: programs that a worker runs at once.
        listen: HOST:PORT of the endpoint, for workers elsewhere. Needs TURNWISE_TOKEN.
        trained_roles: the roles that are trained. None: all.
        ignore: settings of requests that are accepted without effect, such as top_p.
        patience: seconds that a program gets to return its reward when the rollout cuts it.
        unfinished_reward: the reward of a program that was cut and returned none.
    """

    max_turns: int | None = None

    def __init__(
        self,
        program: str,
        *,
        tasks: Any = None,
        val_fraction: float = 0.1,
        workers: int | str | None = None,
        slots: int = SLOTS,
        listen: str | None = None,
        trained_roles: Sequence[str] | None = None,
        ignore: Sequence[str] = (),
        patience: float = 5.0,
        unfinished_reward: float = 0.0,
    ) -> None:
        if not program.startswith(COMMAND) and workers != "elsewhere":
            load_object(program)  # a mistake in its name is told before the run begins
        self._name = program.removeprefix(COMMAND)
        rows = None if tasks is None else load_rows(tasks, name=self._name)
        self._rows = (
            None if rows is None else RowSplits(rows, val_fraction=val_fraction, name=self._name)
        )
        self._roles = None if trained_roles is None else frozenset(trained_roles)
        self._ignore = frozenset(ignore)
        self._patience, self._unfinished = patience, unfinished_reward
        self._staff = _join_staff(program, workers=workers, slots=slots, listen=listen)
        self._id = next(_ENVS)
        self._wants_logprobs = False
        """True if the program wants the log-probs of its next reply."""
        self._offered = False
        """True if this episode's program has offered tools."""
        self._closed = False

    def make_task(self, seed: int, split: str) -> Task:
        payload: dict[str, Json] = {} if self._rows is None else self._rows.draw(seed, split)
        return Task(id=f"{self._name}/{split}/{seed}", seed=seed, payload=payload, split=split)

    def submit_reset(self, task: Task, noise_seed: int) -> Future[None]:
        self._staff.mend()
        self._offered = False
        roles = None if self._roles is None else sorted(self._roles)
        return self._staff.endpoint.call(
            "reset",
            self._id,
            lambda _: None,
            task=task.to_json(),
            roles=roles,
            ignore=sorted(self._ignore),
            queue=self._staff.queue,
            program=self._staff.label,
            lease=LEASE,
        )

    def submit_opening(self) -> Future[Observation]:
        def read(data: Json) -> Observation:
            self._wants_logprobs = data["logprobs"]
            return observation_from_json(data)

        return self._staff.endpoint.call("opening", self._id, read)

    def mend(self) -> None:
        self._staff.mend()

    def submit_step(self, message: Message, said: Any) -> Future[StepResult]:
        known = {} if said is None else _said(said, logprobs=self._wants_logprobs)
        return self._staff.endpoint.call(
            "step", self._id, self._read_result, text=message.content, said=known
        )

    def submit_finish(self, why: str = "turns") -> Future[StepResult]:
        return self._staff.endpoint.call(
            "finish",
            self._id,
            self._read_result,
            why=why,
            patience=self._patience,
            otherwise=self._unfinished,
        )

    def submit_end(self) -> Future[None]:
        return self._staff.endpoint.call("end", self._id, lambda _: None)

    def reset(self, task: Task, noise_seed: int = 0) -> Observation:
        taken = self.submit_reset(task, noise_seed)
        while True:
            try:
                taken.result(MEND_PAUSE)
            except TimeoutError:
                self.mend()
            else:
                return self.submit_opening().result()

    def step(self, message: Message) -> StepResult:
        return self.submit_step(message, None).result()

    def finish(self) -> StepResult:
        return self.submit_finish().result()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            # An endpoint that is dead, or does not answer, has no episode that could go on.
            with contextlib.suppress(WorkerLostError, TimeoutError):
                self.submit_end().result(STOP_SECONDS)
            self._staff.leave()

    def hint(self, what: Hint, seed: int) -> Json:
        """A random call of the tools that the program offers, for the random player and warm
        starts. A program that offered tools before and asks without them wants plain words. None
        where it never offered any: it is unknown what the program understands."""
        if what != "random":
            return None
        asked = self._staff.endpoint.call("look", self._id, lambda data: data).result()
        if asked is None:
            return None
        tools, messages = asked
        self._offered = self._offered or bool(tools)
        if not tools:
            return "done" if self._offered else None
        return random_reply(tools, messages, Random(seed))

    def _read_result(self, data: Json) -> StepResult:
        self._wants_logprobs = data["logprobs"]
        return result_from_json(data)


def _said(known: Any, *, logprobs: bool) -> dict[str, Json]:
    """The fields of `Said`, from the rollout's record of a reply."""
    completion = known.completion
    texts: list[tuple[str, float]] = []
    if logprobs and known.decode is not None:
        texts = [
            (known.decode([token]), logprob)
            for token, logprob in zip(completion.ids, completion.logprobs, strict=True)
        ]
    return {
        "prompt": len(known.prompt_ids),
        "restart": known.restart,
        "completion": len(completion.ids),
        "finish_reason": completion.finish_reason,
        "logprobs": texts,
    }


def agent(program: Callable[..., Any]) -> str:
    """The name of the environment that a program is, for `turnwise.train(env=...)` and for a
    config.

    Args:
        program: a function of `task` and `client`, or a class with such a `run`.

    Example:
        >>> def solve(task, client):
        ...     return 1.0
        >>> agent(solve)
        'agent:python:solve'
    """
    return f"agent:{name_of(program)}"


class CommandEnv(AgentEnv):
    """A command line that calls the model through OpenAI's API. The shell runs it with
    OPENAI_BASE_URL, OPENAI_API_KEY and TURNWISE_TASK (JSON) set. The last line of its output is its
    reward as JSON: a number, or an object with reward, success and info.

    Args:
        command: for the shell. The other options are those of AgentEnv.
    """

    def __init__(self, command: str, **options: Any) -> None:
        super().__init__(COMMAND + command, **options)


class _Staff:
    """The workers of one program in this process. All its environments share them; they end with
    the last one."""

    def __init__(
        self, program: str, *, endpoint: EndpointProcess, workers: int | str, slots: int
    ) -> None:
        self.endpoint = endpoint
        self.queue = f"q{next(_COUNT)}"
        self.label: str | None = None
        """The name by which workers elsewhere know the program. None: they are started here."""
        self.members = 0
        self._processes: list[subprocess.Popen[bytes]] = []
        self._started: list[float] = []
        self._deaths = 0
        """Workers that died right after their start, since the last one that did not."""
        self._mending = threading.Lock()
        self._threads: Worker | None = None
        if workers == "elsewhere":
            self.label = program_label(program)
            self.queue = f"{ELSEWHERE} {self.label}"
            # Known from the beginning, so that a worker with another program hears of it.
            endpoint.call("admit", -1, lambda _: None, program=self.label)
            return
        self._program, self._slots = program, slots
        if workers == 0:
            self._threads = self._start_here()
        self._processes = [self._start() for _ in range(int(workers))]
        self._started = [time.monotonic() for _ in self._processes]

    def mend(self) -> None:
        """Starts a worker in the place of each one that has died or has given up.

        Raises:
            EnvError: they die as soon as they are started.
        """
        with self._mending:
            self._mend()

    def _mend(self) -> None:
        if self._threads is not None and self._threads.ended is not None:
            logger.warning("%s; other workers take its place", self._threads.ended)
            self._threads = self._start_here()
        for place, process in enumerate(self._processes):
            quick = time.monotonic() - self._started[place] < QUICK
            if process.poll() is None:
                self._deaths = self._deaths if quick else 0
                continue
            self._deaths = self._deaths + 1 if quick else 0
            code = process.returncode
            if self._deaths > MAX_DEATHS:
                raise EnvError(
                    f"{MAX_DEATHS} workers died one after another within {QUICK:g} s of their "
                    f"start, the last with exit code {code}; see what they printed"
                )
            logger.warning("a worker died (exit %d); another takes its place", code)
            self._processes[place] = self._start()
            self._started[place] = time.monotonic()

    def _start_here(self) -> Worker:
        url, token = self.endpoint.url, self.endpoint.work_token
        worker = Worker(url, self.queue, token, self._program, slots=self._slots)
        worker.start()
        return worker

    def _start(self) -> "subprocess.Popen[bytes]":
        url, token = self.endpoint.url, self.endpoint.work_token
        return subprocess.Popen(
            child_command(
                "turnwise.endpoint.worker", url, self.queue, self._program, str(self._slots)
            ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            process_group=0,
            env={**os.environ, TOKEN: token, "OMP_NUM_THREADS": "1"},
        )

    def leave(self) -> None:
        """One environment fewer needs them."""
        with _LOCK:
            self.members -= 1
            if self.members:
                return
            for key in [key for key, staff in _STAFFS.items() if staff is self]:
                del _STAFFS[key]
        if self._threads is not None:
            self._threads.stop()
        for process in self._processes:
            stop(process)


_STAFFS: dict[str, _Staff] = {}
_LOCK = threading.Lock()


def _join_staff(
    program: str, *, workers: int | str | None, slots: int, listen: str | None
) -> _Staff:
    """The workers of the program, started for its first environment."""
    if isinstance(workers, str) and workers != "elsewhere":
        raise ValueError(f"workers is a number or 'elsewhere', got {workers!r}")
    if workers is None:
        workers = 0 if is_only_here(program) else min(2, os.cpu_count() or 1)
    if workers != 0 and is_only_here(program):
        where = "elsewhere" if workers == "elsewhere" else "in worker processes"
        raise ValueError(
            f"{program} is known to this process alone and cannot run {where}; put it into a file, "
            "or set workers to 0"
        )
    host, port, token = "127.0.0.1", 0, None
    if listen is not None:
        host, _, number = listen.rpartition(":")
        host, port, token = host or "127.0.0.1", int(number), os.environ.get(TOKEN)
    file, _, name = program.rpartition(":")
    if not program.startswith(COMMAND) and file.endswith(".py"):
        program = f"{Path(file).resolve()}:{name}"
    with _LOCK:
        key = repr((program, workers, slots, listen))
        staff = _STAFFS.get(key)
        if staff is None:
            endpoint = shared_endpoint(host, port, token)
            staff = _Staff(program, endpoint=endpoint, workers=workers, slots=slots)
            _STAFFS[key] = staff
        staff.members += 1
        return staff
