"""Hostile replies, names and files: every one of them is answered or refused at once, and the next
episode is fine."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from turnwise.config import ConfigError, load_config
from turnwise.config.schema import EnvConfig, RolloutConfig
from turnwise.envs.actions import write_reply
from turnwise.envs.base import EnvError
from turnwise.envs.registry import UnknownEnvError, list_envs, make, make_env
from turnwise.isolation.processes import ProcessPool
from turnwise.serve.client import RemoteEnv
from turnwise.serve.server import EnvServer
from turnwise.types import Message

MEGABYTE = 1 << 20
HOSTILE = {
    "power": "9**9**9**9",
    "powers": "(" * 500 + "9" + "**9)" * 500,
    "factorials": "9!!!!!!!!!!",
    "parentheses": "(" * 100_000,
    "minus": "-" * 100_000 + "1",
    "ten megabytes": "x" * (10 * MEGABYTE),
    "ten megabytes of digits": "9" * (10 * MEGABYTE),
    "separators": "a||" * (MEGABYTE // 2),
    "tags": "<answer>" * 100_000,
    "closed tags": "<think></think><answer></answer>" * 20_000,
    "controls": "".join(map(chr, range(32))) + "\x7f\x1b[2J\u202e\ufeff",
    "half a sign": "\ud83c",
    "braces": "[" * 50_000 + "]" * 50_000,
    "latex": "\\boxed{" * 10_000 + "}" * 10_000,
    "markup": "search[" + "a" * MEGABYTE + "]",
    "tool call": '<tool_call>{"name": "x", "arguments": ' + "[" * 10_000 + "}</tool_call>",
    "traversal": "../../../../etc/passwd",
    "code": "__import__('os').system('touch owned')",
}
SECONDS = 10.0  # of processor time, far more than any of them takes; a blow-up takes for ever
NAMES = [spec.name for spec in list_envs() if spec.available and spec.selects is None] + [
    "gymnasium:Taxi"
]


@pytest.mark.parametrize("name", NAMES)
def test_hostile_replies_are_answered(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    env = make_env(EnvConfig(name=name))
    config = EnvConfig().format
    for title, text in HOSTILE.items():
        for reply in (text, write_reply([text], config)):
            env.reset(env.make_task(0, "train"))
            started = time.process_time()
            result = env.step(Message(role="assistant", content=reply))
            assert time.process_time() - started < SECONDS, title
            assert abs(result.reward) < 1e6, title
            assert sum(len(message.content) for message in result.messages) < MEGABYTE, title
    env.close()
    assert not list(tmp_path.iterdir())


def test_hostile_replies_cross_process_and_machine_boundaries() -> None:
    rollout = RolloutConfig(num_workers=1, step_timeout=20.0)
    env = EnvConfig(name="countdown", options={"tries": 2})
    home = make_env(env)

    async def in_worker(pool: ProcessPool, reply: Message) -> Any:
        handle = pool.open("e")
        await handle.reset(home.make_task(0, "train"), 0)
        result = await handle.step(reply)
        await handle.close()
        return result

    async def all_in_worker() -> list[Any]:
        pool = ProcessPool({"e": env}, rollout)
        try:
            return [
                await in_worker(pool, Message(role="assistant", content=text))
                for text in HOSTILE.values()
            ]
        finally:
            await pool.close()

    played = asyncio.run(all_in_worker())
    with EnvServer(env, rollout) as server:
        remote = RemoteEnv(server.url)
        for text, other in zip(HOSTILE.values(), played, strict=True):
            reply = Message(role="assistant", content=text)
            home.reset(home.make_task(0, "train"))
            remote.reset(home.make_task(0, "train"))
            assert remote.step(reply) == other == home.step(reply)
        remote.close()


@pytest.mark.parametrize(
    "name",
    [
        "../../etc/passwd",
        "../../etc/passwd:Env",
        "/etc/passwd:Env",
        "..:Env",
        "os:system",
        "builtins:eval",
        "gymnasium:../../etc",
        "\x00",
        "x" * 100_000,
        "",
        ":",
        "turnwise.envs.games.bandit:",
        "nowhere.py:Env",
    ],
)
def test_hostile_names_are_refused(name: str) -> None:
    with pytest.raises((UnknownEnvError, ValueError, TypeError)) as caught:
        make(name)
    assert str(caught.value)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sokoban", {"levels": "../../../etc/passwd"}),
        ("sokoban", {"levels": "/dev/null"}),
        ("webshop", {"products": "/etc/passwd"}),
        ("math_qa", {"data": "/etc/passwd"}),
        ("alfworld", {"games": "/etc/passwd"}),
    ],
)
def test_files_that_are_something_else_are_refused(name: str, options: dict[str, Any]) -> None:
    with pytest.raises((EnvError, ValueError, OSError)) as caught:
        make(name, options)
    assert "root:" not in str(caught.value), "an error must not show what stands in a foreign file"


def test_a_config_that_is_something_else_is_refused() -> None:
    for source in ("/etc/passwd", "../../../etc/shadow", "/dev/null/x"):
        with pytest.raises((ConfigError, OSError, ValueError)):
            load_config(source)
