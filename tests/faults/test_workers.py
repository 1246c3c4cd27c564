"""Worker processes: episodes survive environments that die, hang, raise or return garbage, and nothing is left over."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from turnwise.config.schema import Config, EnvConfig, FormatConfig, GroupsConfig, RolloutConfig
from turnwise.generate.base import Session
from turnwise.generate.scripted import ScriptedGenerator
from turnwise.rollout.proxy import AgentProxy, RolloutResult
from turnwise.testing.tiny import tiny_tokenizer


def play(*, share: float, marks: Path | None, groups: int = 8, size: int = 4, **rollout: Any) -> RolloutResult:
    options: dict[str, Any] = {"share": share, "marks": str(marks) if marks else None}
    if "faults" in rollout:
        options["faults"] = rollout.pop("faults")
    env = EnvConfig(name="turnwise.testing.faulty:FaultyEnv", options=options, format=FormatConfig(style="raw"))
    settings = {
        "isolation": "process",
        "num_workers": 4,
        "step_timeout": 1.0,
        "reset_timeout": 2.0,
        "retries": 2,
        **rollout,
    }
    config = Config(env=env, rollout=RolloutConfig(train=GroupsConfig(env_groups=groups, group_size=size), **settings))
    tokenizer = tiny_tokenizer()

    def script(session: Session, ids: tuple[int, ...], call: int) -> str:
        return ("go", "stop")[session.seed >> call & 1]

    generator = ScriptedGenerator(script, tokenizer=tokenizer, end_id=tokenizer.eos_token_id)
    proxy = AgentProxy(config, generator, tokenizer)
    try:
        result = proxy.play(0)
    finally:
        proxy.close()
    assert generator.open_sessions == ()
    assert workers_of(os.getpid()) == []
    return result


def workers_of(pid: int) -> list[int]:
    found = psutil.Process(pid).children(recursive=True)
    return [child.pid for child in found if "turnwise.rollout.worker" in " ".join(child.cmdline())]


def fingerprint(result: RolloutResult) -> dict[str, Any]:
    return {e.id: [(t.prompt_ids, t.completion.ids, t.reward, t.messages) for t in e.turns] for e in result.episodes}


def test_faults_at_random_moments_change_nothing_but_attempts(tmp_path: Path) -> None:
    clean = play(share=0.0, marks=None, groups=15)
    faulty = play(share=0.15, marks=tmp_path, groups=15)
    assert len(clean.episodes) == len(faulty.episodes) + len(faulty.dropped) == 60
    assert len(list(tmp_path.iterdir())) >= 3, "no fault happened: the test shows nothing"
    expected = fingerprint(clean)
    assert fingerprint(faulty) == expected
    assert sum(e.attempts for e in faulty.episodes) > 60


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_thousand_episodes_with_ten_percent_faults(tmp_path: Path) -> None:
    clean = play(share=0.0, marks=None, groups=125, size=8)
    faulty = play(share=0.1, marks=tmp_path, groups=125, size=8)
    assert len({e.id for e in faulty.episodes}) == len(faulty.episodes) == 1000
    assert faulty.dropped == ()
    assert len(list(tmp_path.iterdir())) > 60
    assert fingerprint(faulty) == fingerprint(clean)


@pytest.mark.parametrize(
    ("fault", "status"),
    [
        ("kill", "env_error"),
        ("hang", "env_timeout"),
        ("raise", "env_error"),
        ("garbage", "env_error"),
        ("nan", "env_error"),
    ],
)
def test_a_fault_that_stays_is_a_status(fault: str, status: str) -> None:
    result = play(
        share=0.3, marks=None, groups=2, size=4, faults=[fault], retries=0, step_timeout=0.4, reset_timeout=0.4
    )
    counts = Counter(e.status.value for e in result.dropped)
    assert set(counts) <= {status, "completed"}
    assert counts[status] >= 1
    assert len(result.episodes) + len(result.dropped) == 8
    assert all(e.error for e in result.dropped if e.status.failed)


def test_workers_die_with_a_parent_that_was_killed(tmp_path: Path) -> None:
    code = (
        "import asyncio, os, sys, time\n"
        "from turnwise.config.schema import EnvConfig, RolloutConfig\n"
        "from turnwise.rollout.workers import ProcessPool\n"
        "env = EnvConfig(name='turnwise.testing.faulty:FaultyEnv', options={'share': 1.0, 'faults': ['hang']})\n"
        "async def main():\n"
        "    pool = ProcessPool({'e': env}, RolloutConfig(num_workers=1, reset_timeout=60))\n"
        "    handle = pool.open('e')\n"
        "    from turnwise.types import Task\n"
        "    print('ready', flush=True)\n"
        "    for seed in range(100):\n"
        "        await handle.reset(Task(id='t', seed=seed), seed)\n"
        "asyncio.run(main())\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "ready\n"
    workers = workers_of(parent.pid)
    assert len(workers) == 1
    time.sleep(1.5)  # the worker is inside an environment that hangs
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 5
    while psutil.pid_exists(workers[0]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not psutil.pid_exists(workers[0])


def test_objects_cannot_move_to_processes() -> None:
    config = Config(rollout=RolloutConfig(isolation="process"))
    tokenizer = tiny_tokenizer()
    generator = ScriptedGenerator(lambda session, ids, call: [1], end_id=1)
    from turnwise.envs.registry import make_env

    with pytest.raises(ValueError, match="cannot run in worker processes"):
        AgentProxy(config, generator, tokenizer, factories={"frozen_lake": lambda: make_env(EnvConfig())})
