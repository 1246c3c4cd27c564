"""check_env: plays an environment in every way a rollout might and reports what breaks the
contract."""

import json
import os
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Generator
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from random import Random
from typing import IO, Literal, TypeVar

import numpy as np

from turnwise.config.schema import EnvConfig, RolloutConfig
from turnwise.envs.actions import write_reply
from turnwise.envs.adapters import as_env
from turnwise.envs.base import Env, EnvError, EnvTimeoutError, Hint, hint_of
from turnwise.envs.gate import raised_at
from turnwise.envs.registry import (
    EnvNotMadeError,
    EnvOptionsError,
    UnknownEnvError,
    find_env,
    make_env,
)
from turnwise.envs.text_turns import TextTurns
from turnwise.procs.channel import receive_frame, send_frame, start_beside, stop
from turnwise.procs.progress import Progress
from turnwise.procs.threads import DaemonThreads
from turnwise.seeding import derive_seed
from turnwise.types import Json, Message, Observation, StepResult, Task

Replies = Callable[[Env, Random], str]
T = TypeVar("T")
MAX_TURNS = 100
RELAY_SECONDS = 5.0
"""For the last words of a process that has ended."""
GARBAGE = (
    "",
    " \n\t ",
    "up and away",
    "<answer>",
    "</answer><answer>",
    "<think><answer></think></answer>",
    "<answer>" * 1000,
    "\x00\x1b[2J\u202e\ud83c\udf0a",
    "<tool_call>{broken</tool_call>",
    "x" * 100_000,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that is wrong ("error") or questionable ("warning")."""

    check: str
    severity: Literal["error", "warning"]
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvReport:
    """The findings of check_env. `str(report)` is made for people.

    Example:
        >>> print(check_env("bandit", seeds=5))
        bandit: ok (5 seeds, 10 episodes, noisy)
    """

    name: str
    seeds: int
    episodes: int
    noisy: bool
    """Another noise seed led the same replies elsewhere."""
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """True without errors; warnings do not count."""
        return not any(finding.severity == "error" for finding in self.findings)

    def __str__(self) -> str:
        noise = "noisy" if self.noisy else "no noise"
        verdict = "ok" if self.ok else "NOT ok"
        lines = [f"{self.name}: {verdict} ({self.seeds} seeds, {self.episodes} episodes, {noise})"]
        lines += [
            f"  {finding.severity}: {finding.check}: {finding.message}" for finding in self.findings
        ]
        return "\n".join(lines)


def check_env(
    env_or_name: str | object,
    *,
    seeds: int = 10,
    config: EnvConfig | None = None,
    player: Replies | None = None,
    limits: RolloutConfig | None = None,
) -> EnvReport:
    """The report on an environment: a registered name, module:Class, a class, or an object.

    Checked are determinism under the seed, that noise leaves the initial state alone, that splits
    differ, texts, rewards, ends and infos, that garbage is survived, that a step after the end is
    refused, and that reset and close can be repeated. `player` writes the replies; by default they
    are random legal ones. A call that takes longer than `limits` allow (rollout.reset_timeout,
    rollout.step_timeout) is an error, and the check ends there.

    Raises:
        UnknownEnvError, EnvOptionsError: there is nothing to check.
    """
    config = config if config is not None else EnvConfig()
    if isinstance(env_or_name, str):
        config = config.model_copy(update={"name": env_or_name})
        name = find_env(env_or_name).name

        def fresh() -> Env:
            return make_env(config)
    else:
        kind = env_or_name if isinstance(env_or_name, type) else type(env_or_name)
        name = kind.__name__

        def fresh() -> Env:
            return as_env(
                env_or_name() if isinstance(env_or_name, type) else env_or_name,
                config=config,
                name=name,
            )

    shared = not isinstance(env_or_name, str | type)
    threads = DaemonThreads(1, "turnwise-check")
    limited = limits or RolloutConfig()
    try:
        return _Checker(
            name,
            lambda: LimitedEnv(
                call_in_time(threads, "making it", fresh, limited.reset_timeout), limited, threads
            ),
            seeds=seeds,
            player=player or random_player,
            shared=shared,
        ).run()
    finally:
        threads.shutdown()


class LimitedEnv:
    """An environment whose calls end in time: in a thread of their own, which is left behind where
    one does not."""

    def __init__(self, env: Env, limits: RolloutConfig, threads: DaemonThreads) -> None:
        self.inner = env
        self._limits, self._threads = limits, threads

    @property
    def max_turns(self) -> int | None:
        return self.inner.max_turns

    def make_task(self, seed: int, split: str) -> Task:
        return self._call(
            "make_task", lambda: self.inner.make_task(seed, split), self._limits.reset_timeout
        )

    def reset(self, task: Task, noise_seed: int = 0) -> Observation:
        return self._call(
            "reset", lambda: self.inner.reset(task, noise_seed), self._limits.reset_timeout
        )

    def step(self, message: Message) -> StepResult:
        return self._call(
            "step", lambda: self.inner.step(message), self._limits.step_timeout, "step_timeout"
        )

    def finish(self) -> StepResult:
        return self._call("finish", self.inner.finish, self._limits.step_timeout, "step_timeout")

    def hint(self, what: Hint, seed: int) -> Json:
        return self._call(
            "hint",
            lambda: hint_of(self.inner, what, seed),
            self._limits.step_timeout,
            "step_timeout",
        )

    def close(self) -> None:
        self._call("close", self.inner.close, self._limits.step_timeout, "step_timeout")

    def _call(
        self, what: str, function: Callable[[], T], limit: float, key: str = "reset_timeout"
    ) -> T:
        try:
            return call_in_time(self._threads, what, function, limit)
        except EnvTimeoutError as error:
            raise EnvTimeoutError(f"{error}; where it needs longer, raise rollout.{key}") from None


def call_in_time(threads: DaemonThreads, what: str, function: Callable[[], T], limit: float) -> T:
    """The result of the function.

    Raises:
        EnvTimeoutError: it took longer than `limit` seconds; its thread is left behind.
    """
    job = threads.submit(function)
    try:
        return job.result(limit)
    except FutureTimeout:
        if job.done():  # the function's own
            raise
        threads.replace(job)
        raise EnvTimeoutError(f"{what} took longer than {limit:g} s") from None


def random_player(env: Env, rng: Random) -> str:
    """A random reply: well-formed with legal actions where the environment knows any, a few words
    otherwise."""
    if (reply := hint_of(env, "random", rng.getrandbits(32))) is not None:
        return reply
    return " ".join(
        rng.choice(("yes", "no", "maybe", "42", "blue")) for _ in range(rng.randint(1, 4))
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Played:
    """One episode: what was said, and what came back."""

    opening: Observation
    replies: tuple[str, ...]
    results: tuple[StepResult, ...]


class _Checker:
    def __init__(
        self, name: str, fresh: Callable[[], Env], *, seeds: int, player: Replies, shared: bool
    ) -> None:
        self._name, self._fresh, self._seeds, self._player = name, fresh, seeds, player
        self._shared = (
            shared  # `fresh` gives the same object again, so it is closed once, at the end
        )
        self._findings: dict[tuple[str, str], Finding] = {}
        self._episodes = 0
        self._noisy = False
        self._progress = Progress(f"checking {name}, seed", total=seeds)

    def run(self) -> EnvReport:
        env: Env | None = None
        with self._watch_global_random(), self._progress:
            try:
                env = self._fresh()
                self._check_seeds(env)
                self._check_garbage(env)
            except EnvTimeoutError as error:
                self._error("time", str(error))
                env = None  # it may hang in its close, too
            except EnvError as error:
                self._error("contract", str(error))
            except (UnknownEnvError, EnvOptionsError):  # there is nothing to check
                raise
            except EnvNotMadeError as error:
                self._error("raises", str(error))
            except Exception as error:
                self._error("raises", raised_at(error))
            if env is not None:
                self._check_close(env)
        return EnvReport(
            name=self._name,
            seeds=self._seeds,
            episodes=self._episodes,
            noisy=self._noisy,
            findings=tuple(self._findings.values()),
        )

    def _check_seeds(self, env: Env) -> None:
        openings: dict[str, dict[str, list[tuple[int, _Played]]]] = {"train": {}, "val": {}}
        """Split -> opening -> the seeds that open so, as they were played."""
        first: _Played | None = None
        for seed in range(self._seeds):
            self._progress.advance()
            for split, seen in openings.items():
                played = self._play(env, seed, split, noise_seed=1)
                opening = _text(played.opening.messages) + (played.opening.state_key or "")
                seen.setdefault(opening, []).append((seed, played))
                if split == "train":
                    self._check_repeat(seed, played)
                    first = first or played
        if self._seeds > 3 and len(openings["train"]) == 1 and first is not None:
            if any(self._hides_something(env, seed, first) for seed in range(1, self._seeds)):
                return  # the seeds differ in what the opening does not show
            self._warn(
                "seed", f"all of {self._seeds} seeds open and go alike; does reset use its seed?"
            )
        train, val = openings["train"], openings["val"]
        shared = [
            opening
            for opening in train.keys() & val.keys()
            if not any(
                self._hides_something(env, seed, played, split="val")
                for _, played in train[opening]
                for seed, _ in val[opening]
            )
        ]
        if shared:
            message = (
                f"{len(shared)} openings appear in train and val; let reset (or make_row) take "
                "`split`, and keep them apart"
            )
            self._warn("splits", message)

    def _hides_something(
        self, env: Env, seed: int, first: _Played, *, split: str = "train"
    ) -> bool:
        """Whether the replies of the first seed lead elsewhere under this one."""
        again = self._replay(env, seed, first.replies, noise_seed=1, split=split)
        return _facts(again) != _facts(first)

    def _check_repeat(self, seed: int, played: _Played) -> None:
        """Plays the same replies again in another object: alike under the same noise, begun alike
        under other noise."""
        other = self._fresh()
        task = other.make_task(seed, "train")
        other.reset(
            task, noise_seed=7
        )  # leaves an episode behind that the next reset must clear away
        again = self._replay(other, seed, played.replies, noise_seed=1)
        if _facts(again) != _facts(played):
            self._error(
                "determinism",
                f"seed {seed}: the same seed and replies led to {_difference(played, again)}",
            )
        noisy = self._replay(other, seed, played.replies, noise_seed=2)
        if not self._shared:
            other.close()
        if noisy.opening.messages != played.opening.messages:
            self._error(
                "noise",
                f"seed {seed}: noise_seed changes the initial state, which a group must share",
            )
        elif _facts(noisy) != _facts(played):
            self._noisy = True

    def _check_garbage(self, env: Env) -> None:
        inner = env.inner if isinstance(env, LimitedEnv) else env
        config = inner.config.format if isinstance(inner, TextTurns) else EnvConfig().format
        for text in GARBAGE:
            for reply in (text, write_reply([text], config)):
                env.reset(env.make_task(0, "train"), noise_seed=1)
                try:
                    self._check_result(
                        env.step(Message(role="assistant", content=reply)), f"reply {reply[:20]!r}"
                    )
                except EnvTimeoutError:
                    raise
                except Exception as error:
                    self._error("garbage", f"reply {reply[:40]!r} raised {raised_at(error)}")

    def _check_close(self, env: Env) -> None:
        try:
            env.close()
            env.close()
        except Exception as error:
            self._error("close", f"closing twice raised {type(error).__name__}: {error}")

    def _play(self, env: Env, seed: int, split: str, *, noise_seed: int) -> _Played:
        task = env.make_task(seed, split)
        if task != env.make_task(seed, split):
            self._error("task", f"seed {seed}: make_task gives another task each time")
        opening = env.reset(task, noise_seed=noise_seed)
        self._check_opening(opening, seed)
        rng = Random(derive_seed(seed, "check-env"))
        replies: list[str] = []
        results: list[StepResult] = []
        limit = min(MAX_TURNS, env.max_turns or MAX_TURNS)
        while len(results) < limit and not (results and results[-1].done):
            replies.append(self._player(env, rng))
            results.append(env.step(Message(role="assistant", content=replies[-1])))
            self._check_result(results[-1], f"seed {seed}, turn {len(results)}")
        self._check_end(env, results)
        self._episodes += 1
        return _Played(opening=opening, replies=tuple(replies), results=tuple(results))

    def _replay(
        self,
        env: Env,
        seed: int,
        replies: tuple[str, ...],
        *,
        noise_seed: int,
        split: str = "train",
    ) -> _Played:
        opening = env.reset(env.make_task(seed, split), noise_seed=noise_seed)
        results: list[StepResult] = []
        for reply in replies:
            results.append(env.step(Message(role="assistant", content=reply)))
            if results[-1].done:
                break
        return _Played(opening=opening, replies=replies, results=tuple(results))

    def _check_opening(self, opening: Observation, seed: int) -> None:
        if not opening.messages or not opening.messages[-1].content.strip():
            self._error("text", f"seed {seed}: the opening observation is empty")
        self._check_json(opening.info, f"seed {seed}, reset")

    def _check_result(self, result: StepResult, where: str) -> None:
        if not result.done and not any(message.content.strip() for message in result.messages):
            self._error("text", f"{where}: the observation is empty and the episode goes on")
        if result.terminated and result.truncated:
            self._error(
                "end", f"{where}: terminated and truncated at once; an end is one or the other"
            )
        if result.reward != result.reward or abs(result.reward) == float("inf"):
            self._error("reward", f"{where}: the reward is {result.reward}")
        if result.reward_parts and abs(sum(result.reward_parts.values()) - result.reward) > 1e-6:
            self._error(
                "reward",
                f"{where}: the parts {dict(result.reward_parts)} do not add up to {result.reward}",
            )
        self._check_json(result.info, where)

    def _check_end(self, env: Env, results: list[StepResult]) -> None:
        if not results[-1].done:
            if env.max_turns is None:
                self._warn(
                    "end",
                    f"random play did not end within {len(results)} turns, and there is no "
                    "max_turns",
                )
            return
        try:
            env.step(Message(role="assistant", content="again"))
        except EnvError:
            return
        except Exception as error:
            self._error(
                "step after done", f"raised {type(error).__name__} where EnvError belongs: {error}"
            )
            return
        self._error("step after done", "a step after the end was answered; it must raise EnvError")

    def _check_json(self, info: object, where: str) -> None:
        try:
            json.dumps(info, allow_nan=False)
        except (TypeError, ValueError) as error:
            self._error("info", f"{where}: info is not JSON: {error}")

    @contextmanager
    def _watch_global_random(self) -> Generator[None]:
        """Warns where the environment draws from a global random generator."""
        python, numpy = random.getstate(), _numpy_state()
        yield
        if random.getstate() != python:
            self._warn(
                "global random",
                "draws from Python's global random generator; use random.Random(seed)",
            )
        if _numpy_state() != numpy:
            self._warn(
                "global random",
                "draws from numpy's global generator; use numpy.random.default_rng(seed)",
            )

    def _error(self, check: str, message: str) -> None:
        self._add(Finding(check=check, severity="error", message=message))

    def _warn(self, check: str, message: str) -> None:
        self._add(Finding(check=check, severity="warning", message=message))

    def _add(self, finding: Finding) -> None:
        """Keeps the first finding of each kind: the others say the same of other seeds."""
        self._findings.setdefault((finding.check, finding.severity), finding)


def _numpy_state() -> tuple[bytes, int]:
    state = np.random.get_state(legacy=False)["state"]
    return state["key"].tobytes(), int(state["pos"])


def _text(messages: tuple[Message, ...]) -> str:
    return "\n".join(message.content for message in messages)


def _facts(played: _Played) -> tuple[object, ...]:
    steps = [
        (
            _text(r.messages),
            r.reward,
            r.terminated,
            r.truncated,
            r.state_key,
            json.dumps(dict(r.info), default=repr),
        )
        for r in played.results
    ]
    return (played.opening.messages, played.opening.state_key, *steps)


def _difference(first: _Played, second: _Played) -> str:
    if first.opening.messages != second.opening.messages:
        return "another opening"
    for turn, (a, b) in enumerate(zip(first.results, second.results, strict=False), start=1):
        if _text(a.messages) != _text(b.messages):
            return f"another observation in turn {turn}"
        if (a.reward, a.terminated, a.truncated) != (b.reward, b.terminated, b.truncated):
            return f"another reward or end in turn {turn}"
    return "another info, state key or number of turns"


def check_beside(name: str, *, seeds: int, config: EnvConfig, limits: RolloutConfig) -> EnvReport:
    """`check_env` in a process of its own: an environment that ends its process is a finding like
    any other.

    Raises:
        ValueError: there is no such environment, or the options are not its own.
    """
    process, sock = start_beside("turnwise.evaluate.check_env", stderr=subprocess.PIPE)
    said: list[str] = []
    assert process.stderr is not None
    relay = threading.Thread(target=_relay, args=(process.stderr, said), daemon=True)
    relay.start()
    settings = {"config": config.model_dump(mode="json"), "limits": limits.model_dump(mode="json")}
    try:
        send_frame(sock, json.dumps({"name": name, "seeds": seeds, **settings}).encode())
        answer = receive_frame(sock)
        sock.close()
        code = process.wait()
    finally:
        stop(process)
    relay.join(RELAY_SECONDS)
    if answer is None:
        found = Finding(
            check="process",
            severity="error",
            message=f"the environment ended its process (exit {code})" + "".join(said[-1:]),
        )
        return EnvReport(name=name, seeds=seeds, episodes=0, noisy=False, findings=(found,))
    data = json.loads(answer)
    if "refused" in data:
        raise ValueError(data["refused"])
    return EnvReport(findings=tuple(Finding(**finding) for finding in data.pop("findings")), **data)


def _relay(pipe: IO[bytes], said: list[str]) -> None:
    """Prints what the process writes to its standard error, and keeps its last words."""
    for raw in pipe:
        line = raw.decode(errors="replace")
        print(line, end="", file=sys.stderr, flush=True)
        if line.strip() and not line.startswith("... "):  # a line of Progress
            said[:] = [f": {line.strip()}"]


def main(arguments: list[str]) -> None:
    """The process of `check_beside`."""
    sock = socket.socket(fileno=int(arguments[0]))
    asked = json.loads(receive_frame(sock) or b"{}")
    try:
        report = check_env(
            asked["name"],
            seeds=asked["seeds"],
            config=EnvConfig.model_validate(asked["config"]),
            limits=RolloutConfig.model_validate(asked["limits"]),
        )
        answer = asdict(report)
    except (ValueError, ImportError) as error:
        answer = {"refused": str(error)}
    send_frame(sock, json.dumps(answer).encode())
    os._exit(0)  # a call that hangs in a thread is not waited for
