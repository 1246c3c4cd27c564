"""Foreign code that fails: environments, agents, tools, servers and workers that raise, exit, lie
or are interrupted end no run; Ctrl-C does."""

import asyncio
import json
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from draws import examples
from gate_parts import TEXTS, assert_sound, cycle
from hostile_env import Liars
from hypothesis import given
from hypothesis import strategies as st
from rollout_parts import CountEnv, config_for, says

from turnwise.config.schema import Config, EnvConfig, FormatConfig, ShapingConfig
from turnwise.envs.base import EnvError
from turnwise.envs.gate import (
    admit_observation,
    admit_result,
    ask,
)
from turnwise.envs.messages import MultiTurnEnv
from turnwise.envs.registry import make_env
from turnwise.envs.rubric import Rubric
from turnwise.envs.tools.calls import make_tool, parse_tool_calls, run_tool
from turnwise.evaluate.baselines import find_baselines
from turnwise.evaluate.players import RandomPlayer
from turnwise.isolation.worker import handle
from turnwise.procs.coroutines import run_sync
from turnwise.procs.interrupts import (
    count_interrupt,
    from_the_user,
    interrupts,
    watching_interrupts,
)
from turnwise.rollout.agents import Agent
from turnwise.rollout.plan import turn_limit
from turnwise.rollout.proxy import AgentProxy
from turnwise.rollout.sync import SyncMultiTurnRollout
from turnwise.serve.client import RemoteEnv
from turnwise.testing.tiny import tiny_tokenizer
from turnwise.train.setup import choose_setting
from turnwise.train.sources import play_tasks
from turnwise.types import (
    Completion,
    Episode,
    Message,
    Observation,
    StepResult,
    Task,
)
from turnwise.user_code import name_of


class Interrupted(CountEnv):
    """Gets a Ctrl-C in its second step, and does something about it."""

    def __init__(self, then: Callable[[], Any]) -> None:
        super().__init__()
        self.then = then

    def step(self, message: Message) -> StepResult:
        if self.count == 1:
            self.then()
        return super().step(message)


def press_and_swallow() -> None:
    try:
        press()
    except BaseException:
        return


def press_and_translate() -> None:
    try:
        press()
    except BaseException as error:
        raise ValueError("something happened") from error


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(1000):  # the signal arrives between two of these
        pass


def pretend() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("then", [press, press_and_swallow, press_and_translate])
def test_a_real_interrupt_ends_the_run(then: Callable[[], Any]) -> None:
    config = config_for(groups=1, size=2, isolation="inline")
    proxy = AgentProxy(
        config, says(), tiny_tokenizer(), factories={"count": lambda: Interrupted(then)}
    )
    with pytest.raises(KeyboardInterrupt):
        proxy.play(0)
    proxy.close()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_that_an_environment_raised_is_a_status() -> None:
    config = config_for(groups=1, size=2, isolation="inline", retries=0)
    proxy = AgentProxy(
        config, says(), tiny_tokenizer(), factories={"count": lambda: Interrupted(pretend)}
    )
    episodes = proxy.play_all(0)
    proxy.close()
    assert len(episodes) == 2
    assert all(str(e.error).startswith("step raised KeyboardInterrupt") for e in episodes)


class RudeAgent(Agent):
    """A user's agent that fails in every way."""

    def observe(self, messages: Any) -> Any:
        if self.plan.index == 0:
            raise SystemExit("observe")
        return [*messages[:-1], Message(role="user", content="half \ud83c")]

    def act(self, text: str) -> str:
        return cast(str, 7) if self.plan.index == 2 else text


def test_an_agent_of_the_users_ends_no_run() -> None:
    config = config_for(groups=1, size=3, isolation="inline", retries=0)
    proxy = AgentProxy(
        config, says(), tiny_tokenizer(), factories={"count": CountEnv}, agent_cls=RudeAgent
    )
    episodes = proxy.play_all(0)
    proxy.close()
    assert [e.status.value for e in episodes] == ["env_error", "completed", "env_error"]
    assert episodes[1].prompt[-1].content == "half \ufffd"
    for episode in episodes:
        assert_sound(episode)


class Leaving:
    """Ends the process wherever it is looked at."""

    def _leave(self) -> Any:
        raise SystemExit("looked at")

    __class__ = property(_leave)  # type: ignore[assignment]
    __float__ = __iter__ = __len__ = _leave


class LateAgent(Agent):
    """Returns what fails once it is read."""

    def observe(self, messages: Any) -> Any:
        return Leaving() if self.plan.index == 0 else messages

    def act(self, text: str) -> str:
        return cast(str, Leaving()) if self.plan.index == 1 else text


def leaving(text: str) -> float:
    return cast(float, Leaving())


@pytest.mark.parametrize("shaper", [None, name_of(leaving)], ids=["agent", "shaper"])
def test_what_fails_when_it_is_read_ends_no_run_either(shaper: str | None) -> None:
    config = config_for(groups=1, size=3, isolation="inline", retries=0)
    env = EnvConfig(name="count", shaping=ShapingConfig(function=shaper))
    proxy = AgentProxy(
        config.model_copy(update={"envs": {"count": env}}),
        says(),
        tiny_tokenizer(),
        factories={"count": CountEnv},
        agent_cls=LateAgent,
    )
    episodes = proxy.play_all(0)
    proxy.close()
    last = "completed" if shaper is None else "env_error"
    assert [e.status.value for e in episodes] == ["env_error", "env_error", last]
    assert all("looked at" in str(e.error) for e in episodes if e.status.failed)


@pytest.mark.parametrize(
    "completion",
    [
        Completion(ids=(5, 2), logprobs=(-1.0, math.nan), finish_reason="stop"),
        Completion(ids=(5, 2), logprobs=(-1.0, -math.inf), finish_reason="stop"),
        Completion(ids=(-5, 2), logprobs=(-1.0, -1.0), finish_reason="stop"),
        Completion(ids=(), logprobs=(), finish_reason="stop"),
        Completion(ids=(5,), logprobs=(-1.0,), finish_reason=cast(Any, "tired")),
    ],
)
def test_a_completion_that_is_none_is_the_generators_error(completion: Completion) -> None:
    generator = says()
    sound = generator.generate

    async def generate(session: Any, new_ids: Any, sampling: Any) -> Completion:
        found = await sound(session, new_ids, sampling)
        return completion if "g1" in session.key else found

    generator.generate = generate
    config = config_for(groups=2, size=2, isolation="inline", retries=0)
    proxy = AgentProxy(config, generator, tiny_tokenizer(), factories={"count": CountEnv})
    episodes = proxy.play_all(0)
    proxy.close()
    assert [e.status.value for e in episodes] == ["completed"] * 2 + ["generator_error"] * 2
    for episode in episodes:
        assert_sound(episode)


class OddError(BaseException):
    """No Exception, as those of trio and greenlet."""


def failing(generate: Callable[[Completion], Any], close: Callable[[], Any]) -> Any:
    """A generator whose replies and releases fail in group 1."""
    generator = says()
    sound, release = generator.generate, generator.release

    async def replies(session: Any, new_ids: Any, sampling: Any) -> Any:
        found = await sound(session, new_ids, sampling)
        return generate(found) if "g1" in session.key else found

    async def closes(session: Any) -> None:
        await release(session)
        if "g1" in session.key:
            close()

    generator.generate, generator.release = replies, closes
    return generator


def played_by(generator: Any, lockstep: bool) -> list[Episode]:
    config = config_for(groups=2, size=2, isolation="inline", retries=0)
    factories = {"count": CountEnv}
    if not lockstep:
        proxy = AgentProxy(config, generator, tiny_tokenizer(), factories=factories)
        with closing(proxy):
            return proxy.play_all(0)
    rollout = SyncMultiTurnRollout(generator, config, tiny_tokenizer(), factories=factories)
    with closing(rollout):
        rollout.rollout()
        return rollout.env_state.episodes()


@pytest.mark.parametrize("lockstep", [False, True])
@pytest.mark.parametrize(
    "kind",
    [ValueError, SystemExit, GeneratorExit, asyncio.CancelledError, KeyboardInterrupt, OddError],
)
def test_no_error_of_a_generator_ends_a_run(kind: type[BaseException], lockstep: bool) -> None:
    def fail(*_: Any) -> Any:
        raise kind("why")

    episodes = played_by(failing(fail, fail), lockstep)
    assert [e.status.value for e in episodes] == ["completed"] * 2 + ["generator_error"] * 2
    assert all(kind.__name__ in str(e.error) for e in episodes[2:])
    episodes = played_by(failing(lambda found: found, fail), lockstep)
    assert [e.status.value for e in episodes] == ["completed"] * 4, "the release failed"


@pytest.mark.parametrize("lockstep", [False, True])
def test_a_real_interrupt_in_a_generator_ends_the_run(lockstep: bool) -> None:
    with pytest.raises(KeyboardInterrupt):
        played_by(failing(lambda found: press(), lambda: None), lockstep)


@pytest.mark.parametrize("lockstep", [False, True])
@pytest.mark.parametrize(
    ("fields", "sound"),
    [
        ({"logprobs": (np.float32(-1.0), np.float64(-0.5))}, True),
        ({"ids": (np.int64(5), True), "logprobs": [-1.0, -0.5]}, True),
        ({"policy_version": np.int64(3)}, True),
        ({"logprobs": (-1e300, -1.0)}, False),
        ({"logprobs": ("-1", "x")}, False),
        ({"ids": (10**12, 2)}, False),
        ({"ids": None}, False),
        ({"policy_version": "new"}, False),
        (None, False),
    ],
)
def test_a_completion_is_plain_numbers_or_the_generators_error(
    fields: dict[str, Any] | None, sound: bool, lockstep: bool
) -> None:
    base: dict[str, Any] = {"ids": (5, 2), "logprobs": (-1.0, -0.5), "policy_version": 0}
    told = None if fields is None else SimpleNamespace(finish_reason="stop", **{**base, **fields})
    episodes = played_by(failing(lambda found: told, lambda: None), lockstep)
    status = "completed" if sound else "generator_error"
    assert [e.status.value for e in episodes] == ["completed"] * 2 + [status] * 2
    for episode in episodes:
        assert_sound(episode)


def bad_tool(kind: str) -> Any:
    """Fails.

    Args:
        kind: how
    """
    match kind:
        case "text":
            return "half \ud83c"
        case "json":
            return {"half \ud83c": 10**5000, "loop": cycle()}
        case "exit":
            raise SystemExit("half \ud83c")
        case "generator":
            raise GeneratorExit
        case _:
            raise KeyboardInterrupt


@pytest.mark.parametrize("kind", ["text", "json", "exit", "generator", "interrupt"])
def test_what_tools_return_and_raise_is_text(kind: str) -> None:
    tool = make_tool(bad_tool)
    text = run_tool(tool, json.dumps({"kind": kind}), timeout=5.0)
    text.encode()
    assert text
    (call,) = parse_tool_calls('<tool_call>{"name": "x\\ud83c", "arguments": {}}</tool_call>')
    assert call.name == "x\ufffd"


def test_async_user_code_that_exits_leaves_the_shared_loop_alive() -> None:
    async def leave() -> None:
        raise SystemExit(1)

    left: list[asyncio.Task[None]] = []

    async def leave_behind() -> None:
        left.append(asyncio.get_running_loop().create_task(leave()))
        await asyncio.sleep(0)

    async def answer() -> int:
        return 42

    with pytest.raises(SystemExit):
        run_sync(leave())
    run_sync(leave_behind())
    assert run_sync(answer(), timeout=30.0) == 42
    assert isinstance(left[0].exception(), SystemExit)


class Chat(MultiTurnEnv):
    """Speaks as the model, which an environment must not."""

    def is_completed(self, messages: Any, state: Any, **kwargs: Any) -> bool:
        return False

    def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        return [{"role": "assistant", "content": "I am the model."}], state


def test_an_environment_does_not_speak_as_the_assistant() -> None:
    from turnwise.envs.adapters import as_env

    config = config_for(groups=1, size=1, isolation="inline", retries=0)
    shots = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    rows = [{"prompt": [*shots, {"role": "user", "content": f"{n}+1?"}]} for n in range(4)]
    chat = Chat(rows, Rubric([]), max_turns=3)
    factory = lambda: as_env(chat, config=EnvConfig(), name="chat")  # noqa: E731
    proxy = AgentProxy(config, says(), tiny_tokenizer(), factories={"count": factory})
    (episode,) = proxy.play_all(0)
    proxy.close()
    assert len(episode.prompt) == 3, "examples in the opening are allowed"
    assert "a message of the assistant" in (episode.error or "")
    with pytest.raises(EnvError, match="that the model can answer"):
        admit_observation(Observation(messages=(Message(role="assistant", content="x"),)), name="e")


GOOD_RESULT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "On."}], "reward": 1.0, "terminated": False,
    "truncated": False, "action": "go", "reward_parts": {}, "state_key": None, "info": {},
}  # fmt: skip
GOOD_OPENING: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Go?"}], "tools": [], "state_key": None, "info": {},
}  # fmt: skip
GOOD_SPEC: dict[str, Any] = {"name": "it", "max_turns": 3, "max_sessions": 4}
ANSWERS: dict[str, Any] = {}


class Liar(BaseHTTPRequestHandler):
    """A server that answers what it is told, as JSON with whatever Python writes there."""

    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # an answer is written at once

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.do_GET()

    def do_GET(self) -> None:
        what = self.path.rpartition("/")[2]
        known = {"open": {"idle_timeout": 60.0}, "close": {}, "heartbeat": {}, "spec": GOOD_SPEC}
        data = json.dumps(ANSWERS.get(what, known.get(what))).encode()
        self.send_response(int(ANSWERS.get("status", 200)) if what == "step" else 200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
        self.wfile.flush()


@contextmanager
def liar() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Liar)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


JSONS = st.recursive(
    st.none()
    | st.booleans()
    | st.floats()
    | st.integers()
    | TEXTS
    | st.just("false")
    | st.just("1.0"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)


def test_remote_answers_are_checked_like_local_ones() -> None:
    wrong: list[tuple[str, Any]] = [
        ("reward", math.nan), ("reward", "1.0"), ("reward", 1e39), ("terminated", "false"),
        ("truncated", 1), ("messages", [{"role": "user", "content": 7}]), ("messages", "On."),
        ("messages", [{"role": "assistant", "content": "I."}]), ("info", []), ("action", 3),
        ("messages", [{"role": "user", "content": "", "tool_calls": [{"id": 1}]}]),
        ("state_key", 7),
    ]  # fmt: skip
    with liar() as url:
        env = RemoteEnv(url)
        ANSWERS.clear()
        ANSWERS.update(reset=GOOD_OPENING, task=Task(id="t", seed=1).to_json())
        task = env.make_task(0, "train")
        for key, value in wrong:
            ANSWERS["step"] = {**GOOD_RESULT, key: value}
            env.reset(task)
            if (key, value) != ("messages", "On."):  # plain text is a user's message, as elsewhere
                with pytest.raises(EnvError):
                    env.step(Message(role="assistant", content="go"))
        ANSWERS["step"] = {**GOOD_RESULT, "info": {"x": math.nan, "n": 10**300, "half": "\ud83c"}}
        env.reset(task)
        info = env.step(Message(role="assistant", content="go")).info
        assert info == {"x": None, "n": "<an integer of 997 bits>", "half": "\ufffd"}
        for spec in (
            {},
            [],
            None,
            {**GOOD_SPEC, "max_sessions": "4"},
            {**GOOD_SPEC, "max_turns": 1.5},
        ):
            ANSWERS["spec"] = spec
            with pytest.raises(EnvError):
                RemoteEnv(url)
        del ANSWERS["spec"]

        @examples(60)
        @given(
            st.sampled_from(sorted(GOOD_RESULT)), JSONS, JSONS | st.just(GOOD_RESULT), st.booleans()
        )
        def search(key: str, value: Any, whole: Any, refused: bool) -> None:
            for answer in ({**GOOD_RESULT, key: value}, whole, {"error": value}):
                ANSWERS.update(step=answer, status=422 if refused else 200)
                env.reset(task)
                try:
                    result = env.step(Message(role="assistant", content="go"))
                except EnvError as error:
                    str(error).encode()
                else:
                    assert admit_result(result, name="it") == result

        search()
        env.close()


def test_a_worker_process_survives_what_its_environments_return_and_raise() -> None:
    from turnwise.config.schema import RolloutConfig
    from turnwise.isolation.processes import ProcessPool

    env = EnvConfig(
        name=f"{Path(__file__).with_name('hostile_env.py')}:Liars", format=FormatConfig(style="raw")
    )

    async def run() -> tuple[list[Any], int]:
        pool = ProcessPool({"e": env}, RolloutConfig(num_workers=1, step_timeout=60.0))
        found: list[Any] = []
        try:
            for kind in range(len(Liars.ANSWERS)):
                handle = pool.open("e")
                await handle.reset(Task(id="t", seed=0, payload={"kind": kind}), 0)
                try:
                    found.append(await handle.step(Message(role="assistant", content="go")))
                except EnvError as error:
                    found.append(str(error))
                await handle.close()
            return found, pool.counts.started
        finally:
            await pool.close()

    found, started = asyncio.run(run())
    assert started == 1, "one of them took the worker down"
    *errors, sound = found
    assert all(isinstance(error, str) for error in errors), errors
    assert "step raised SystemExit: half \ufffd" in errors[5]
    assert sound.info == {"n": "<an integer of 16610 bits>", "half": "\ufffd"}


def test_another_signal_interrupts_where_ctrl_c_is_ignored() -> None:
    """As SIGTERM does to a run in the background of a script."""
    found = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with watching_interrupts():
            before = interrupts()
            assert not from_the_user(KeyboardInterrupt(), before=before)
            count_interrupt()
            assert from_the_user(KeyboardInterrupt(), before=before)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, found)


def test_an_environment_that_exits_when_it_is_closed_ends_no_command() -> None:
    """Environments that are made only to be asked something, then closed."""

    class Leaves(CountEnv):
        def hint(self, what: str, seed: int) -> Any:
            return "go" if what != "actions" else ["go"]

        def close(self) -> None:
            sys.exit(5)

    name = name_of(Leaves)
    config = Config(
        env=EnvConfig(name=name, format=FormatConfig(style="raw")),
        rollout=config_for(tags=()).rollout,
    )
    assert choose_setting(config).config.env.name == name
    assert [found.label for found in find_baselines(config)][:1] == ["random player"]
    tasks: dict[str, Any] = {"count": 2, "purpose": "test", "task_seed": lambda number: number}
    assert len(play_tasks(config, RandomPlayer(), name, config.env, **tasks)) == 2


class NamelessType(type):
    @property
    def __name__(cls) -> str:  # pyright: ignore
        raise SystemExit("no name")


class NamelessError(Exception, metaclass=NamelessType):
    pass


class TracelessError(Exception):
    @property
    def __traceback__(self) -> Any:  # pyright: ignore
        raise SystemExit("no traceback")


@pytest.mark.parametrize(
    ("error", "told"),
    [(NamelessError("why"), "NamelessError: why"), (TracelessError("why"), "TracelessError: why")],
)
def test_the_class_of_an_error_runs_no_code(error: Exception, told: str) -> None:
    def fails() -> None:
        raise error

    with pytest.raises(EnvError, match=f"step raised {told}"):
        ask("step", fails)


def test_an_error_is_told_where_the_folder_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    with pytest.raises(EnvError, match=r"step raised KeyError: 'why' \(.*test_gate_code\.py, line"):
        ask("step", lambda: {}["why"])


def test_a_worker_tells_an_error_with_a_cause_that_was_not_raised() -> None:
    class Chained(CountEnv):
        def step(self, message: Message) -> StepResult:
            raise EnvError("why") from ValueError()

    request = {"op": "step", "id": 0, "message": Message(role="assistant", content="").to_json()}
    assert handle({0: Chained()}, request)["error"].startswith("why (test_gate_code.py:")


@pytest.mark.parametrize("limit", [0, -3, 2.5, "x", math.nan])
def test_an_environments_own_limit_of_turns_is_checked(limit: Any) -> None:
    env = SimpleNamespace(max_turns=limit)
    with pytest.raises(EnvError, match="game: max_turns must be"):
        turn_limit(Config(), EnvConfig(name="game"), cast(Any, env))


def test_a_limit_of_turns_that_raises_is_told() -> None:
    class Raises:
        @property
        def max_turns(self) -> int:
            raise SystemExit(3)

    with pytest.raises(EnvError, match="game: max_turns raised SystemExit"):
        turn_limit(Config(), EnvConfig(name="game"), cast(Any, Raises()))


class LeavesWhenMade:
    def __init__(self) -> None:
        raise SystemExit("no thanks")


class LeavesWhenLookedAt:
    def reset(self, seed: int | None = None) -> str:
        return "go"

    def step(self, action: str) -> tuple[str, float, bool]:
        return "on", 1.0, True

    def __getattr__(self, name: str) -> Any:
        raise KeyboardInterrupt("look away")


@pytest.mark.parametrize(
    ("kind", "told"),
    [(LeavesWhenMade, "SystemExit: no thanks"), (LeavesWhenLookedAt, "KeyboardInterrupt: look")],
)
def test_an_environment_that_exits_when_it_is_made_is_named(kind: type, told: str) -> None:
    with watching_interrupts(), pytest.raises(EnvError, match=f"making it raised {told}"):
        make_env(EnvConfig(name=name_of(kind)))
