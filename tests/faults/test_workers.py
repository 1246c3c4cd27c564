"""Worker processes: episodes survive environments that die, hang, raise or return garbage, and
nothing is left over."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from turnwise.config.schema import Config, EnvConfig, FormatConfig, GroupsConfig, RolloutConfig
from turnwise.envs.base import BaseEnv
from turnwise.envs.registry import make_env
from turnwise.generate.base import Session
from turnwise.generate.scripted import ScriptedGenerator
from turnwise.isolation.measure import _drive, _LostError
from turnwise.isolation.pools import open_pool
from turnwise.procs.channel import receive_frame, send_frame, start_beside
from turnwise.rollout.env_state import EnvStateManager
from turnwise.rollout.proxy import AgentProxy, RolloutResult
from turnwise.testing.tiny import tiny_tokenizer


def play(
    *, share: float, marks: Path | None, groups: int = 8, size: int = 4, **rollout: Any
) -> RolloutResult:
    options: dict[str, Any] = {"share": share, "marks": str(marks) if marks else None}
    if "faults" in rollout:
        options["faults"] = rollout.pop("faults")
    env = EnvConfig(
        name="turnwise.testing.faulty:FaultyEnv", options=options, format=FormatConfig(style="raw")
    )
    settings = {
        "isolation": "process",
        "num_workers": 4,
        "step_timeout": 1.0,
        "reset_timeout": 2.0,
        "retries": 2,
        **rollout,
    }
    config = Config(
        env=env,
        rollout=RolloutConfig(train=GroupsConfig(env_groups=groups, group_size=size), **settings),
    )
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
    return [
        child.pid for child in found if "turnwise.isolation.worker" in " ".join(child.cmdline())
    ]


def wait_for(condition: Callable[[], bool], seconds: float = 600.0) -> bool:
    """Whether it came to be true: in a moment, or on a busy machine in a long one."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def fingerprint(result: RolloutResult) -> dict[str, Any]:
    return {
        e.id: [(t.prompt_ids, t.completion.ids, t.reward, t.messages) for t in e.turns]
        for e in result.episodes
    }


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


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_thousand_episodes_with_faults_that_stay() -> None:
    """Every episode ends in a Status, none twice; sound ones equal those of a run without faults,
    in whole groups."""
    clean = fingerprint(play(share=0.0, marks=None, groups=125, size=8))
    faulty = play(share=0.1, marks=None, groups=125, size=8, retries=0)
    every = [*faulty.episodes, *faulty.dropped]
    assert len({episode.id for episode in every}) == len(every) == 1000
    failed = [episode for episode in faulty.dropped if episode.status.failed]
    assert len(failed) > 50
    assert {episode.status.value for episode in failed} == {"env_error", "env_timeout"}
    assert not any(episode.status.failed for episode in faulty.episodes)
    found = fingerprint(faulty)
    assert found == {name: clean[name] for name in found}
    members = Counter(episode.group_id for episode in faulty.episodes)
    assert min(members.values()) >= 2
    assert {episode.group_id for episode in faulty.dropped if not episode.status.failed}.isdisjoint(
        members
    )


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
    seconds = 0.4 if fault == "hang" else 60.0  # on a busy machine a step may take long
    limits = {"step_timeout": seconds, "reset_timeout": seconds}
    result = play(share=0.3, marks=None, groups=2, faults=[fault], retries=0, **limits)
    counts = Counter(e.status.value for e in result.dropped)
    assert set(counts) <= {status, "completed"}
    assert counts[status] >= 1
    assert len(result.episodes) + len(result.dropped) == 8
    assert all(e.error for e in result.dropped if e.status.failed)


def test_workers_die_with_a_parent_that_was_killed(tmp_path: Path) -> None:
    code = (
        "import asyncio, sys\n"
        "from turnwise.config.schema import EnvConfig, RolloutConfig\n"
        "from turnwise.isolation.processes import ProcessPool\n"
        "options = {'share': 1.0, 'faults': ['hang'], 'marks': sys.argv[1]}\n"
        "env = EnvConfig(name='turnwise.testing.faulty:FaultyEnv', options=options)\n"
        "async def main():\n"
        "    pool = ProcessPool({'e': env}, RolloutConfig(num_workers=1, reset_timeout=60))\n"
        "    handle = pool.open('e')\n"
        "    from turnwise.types import Task\n"
        "    for seed in range(100):\n"
        "        await handle.reset(Task(id='t', seed=seed), seed)\n"
        "asyncio.run(main())\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)])
    assert wait_for(lambda: any(tmp_path.iterdir())), "no environment hangs"
    workers = workers_of(parent.pid)
    assert workers
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert wait_for(lambda: not any(psutil.pid_exists(worker) for worker in workers))


def config_for(env: EnvConfig, *, groups: int = 4, size: int = 4, **rollout: Any) -> Config:
    settings = {"isolation": "process", "num_workers": 1, "retries": 0, **rollout}
    return Config(
        env=env,
        rollout=RolloutConfig(train=GroupsConfig(env_groups=groups, group_size=size), **settings),
    )


def rollout(config: Config) -> tuple[RolloutResult, dict[str, Any]]:
    tokenizer = tiny_tokenizer()

    def script(session: Session, ids: tuple[int, ...], call: int) -> str:
        return ("go", "stop")[session.seed >> call & 1]

    generator = ScriptedGenerator(script, tokenizer=tokenizer, end_id=tokenizer.eos_token_id)
    proxy = AgentProxy(config, generator, tokenizer)
    try:
        return proxy.play(0), proxy.env_state._pool.facts()
    finally:
        proxy.close()


def test_a_worker_holds_no_more_environments_than_it_may(tmp_path: Path) -> None:
    def crowd(name: str, **settings: Any) -> tuple[float, dict[str, Any]]:
        marks = tmp_path / name
        marks.mkdir()
        env = EnvConfig(
            name="turnwise.testing.faulty:CrowdEnv",
            options={"marks": str(marks)},
            format=FormatConfig(style="raw"),
        )
        result, facts = rollout(config_for(env, **settings))
        assert len(result.episodes) == 16
        assert not list(marks.iterdir())
        return max(turn.reward for episode in result.episodes for turn in episode.turns), facts[
            "workers"
        ]

    most, counts = crowd("limited", worker_envs=2)
    assert most <= 2
    assert counts["waited"] == 14
    most, counts = crowd("two", worker_envs=3, num_workers=2)
    assert most <= 6
    assert (counts["started"], counts["restarted"]) == (2, 0)
    most, counts = crowd("open")
    assert most > 6
    assert counts["waited"] == 0


def test_a_place_that_its_episode_lost_is_given_to_the_next(tmp_path: Path) -> None:
    """Every environment of these dies or hangs at its first try; all episodes are played
    nevertheless."""
    options = {"share": 1.0, "faults": ["kill", "hang"], "marks": str(tmp_path)}
    env = EnvConfig(
        name="turnwise.testing.faulty:FaultyEnv", options=options, format=FormatConfig(style="raw")
    )
    config = config_for(
        env, groups=2, size=3, worker_envs=1, step_timeout=0.5, reset_timeout=2.0, retries=3
    )
    result, facts = rollout(config)
    counts = facts["workers"]
    assert len(result.episodes) == 6
    assert counts["restarted"] == counts["started"] - 1 == counts["hung"] + counts["died"]
    assert counts["restarted"] >= 4


def test_in_lockstep_all_environments_need_a_place() -> None:
    env = EnvConfig(
        name="turnwise.testing.faulty:FaultyEnv",
        options={"share": 0.0},
        format=FormatConfig(style="raw"),
    )
    small = EnvStateManager(config_for(env, worker_envs=3))
    with pytest.raises(ValueError, match=r"16 environments at once.*raise rollout.worker_envs"):
        small.reset()
    small.close()
    wide = EnvStateManager(config_for(env, groups=20))
    try:
        assert len(wide.reset()) == 80
    finally:
        wide.close()


def test_memory_of_a_worker_is_limited() -> None:
    env = EnvConfig(name="turnwise.testing.faulty:GreedyEnv", format=FormatConfig(style="raw"))
    result, _ = rollout(config_for(env, groups=4, size=4, worker_memory_mb=1024))
    assert {e.turns[0].text for e in result.episodes} == {"go"}
    failed = [e for e in result.dropped if e.status.failed]
    assert failed
    assert all(e.status.value == "env_error" and "MemoryError" in (e.error or "") for e in failed)
    assert len(result.episodes) + len(result.dropped) == 16


class Slow(BaseEnv):
    """Takes 10 ms a step."""

    actions = ("go",)

    def reset(self, seed: int | None = None, **kwargs: Any) -> str:
        return "go?"

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        time.sleep(0.01)
        return "gone", 1.0, False, {}


def test_isolation_is_chosen_by_measurement_and_told(
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow = EnvConfig(name=f"{__file__}:Slow")
    with caplog.at_level("INFO", logger="turnwise.isolation.measure"):
        with monkeypatch.context() as quick:  # on a busy machine a step of the lake may take long
            clock = SimpleNamespace(perf_counter=lambda: 0.0)
            quick.setattr("turnwise.isolation.measure.time", clock)
            cheap = open_pool({"lake": EnvConfig()}, RolloutConfig())
        dear = open_pool({"lake": EnvConfig(), "slow": slow}, RolloutConfig())
        objects = open_pool(
            {"slow": slow}, RolloutConfig(), factories={"slow": lambda: make_env(slow)}
        )
    kinds = [pool.facts()["isolation"] for pool in (cheap, dear, objects)]
    assert kinds == ["inline", "process", "thread"]
    assert cheap.facts()["ms_per_call"]["lake"] < 2.0 < dear.facts()["ms_per_call"]["slow"]
    assert dear.facts()["ms_per_call"]["slow"] < float("inf"), "it was not measured"
    assert "isolation process, measured per call: lake" in caplog.text


def test_an_environment_that_hangs_while_it_is_measured_gets_a_process() -> None:
    options = {"share": 1.0, "faults": ["hang"], "hang_seconds": 20.0}
    env = EnvConfig(
        name="turnwise.testing.faulty:FaultyEnv", options=options, format=FormatConfig(style="raw")
    )
    config = RolloutConfig(reset_timeout=0.2, step_timeout=0.1)
    assert open_pool({"e": env}, config).facts()["isolation"] == "process"


def test_threads_that_hang_neither_block_the_others_nor_the_end() -> None:
    """All threads hang at once, calls wait behind them, and the process ends although the threads
    never return."""
    code = (
        "import asyncio, time\n"
        "from turnwise.config.schema import RolloutConfig\n"
        "from turnwise.envs.base import EnvTimeoutError\n"
        "from turnwise.isolation.local import LocalPool\n"
        "pool = LocalPool({}, RolloutConfig(), threads=2)\n"
        "async def hang():\n"
        "    try:\n"
        "        await pool.call(lambda: time.sleep(1000), 0.3, 'step')\n"
        "    except EnvTimeoutError as error:\n"
        "        return str(error)\n"
        "async def main():\n"
        "    jobs = [hang() for _ in range(4)] + [pool.call(lambda n=n: n, 5.0, 'step') for n in "
        "range(4)]\n"
        "    print(await asyncio.wait_for(asyncio.gather(*jobs), 30))\n"
        "    await pool.close()\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(["step took longer than 0.3 s"] * 4 + [0, 1, 2, 3])


def test_objects_cannot_move_to_processes() -> None:
    config = Config(rollout=RolloutConfig(isolation="process"))
    tokenizer = tiny_tokenizer()
    generator = ScriptedGenerator(lambda session, ids, call: [1], end_id=1)
    with pytest.raises(ValueError, match="cannot run in worker processes"):
        AgentProxy(
            config, generator, tokenizer, factories={"frozen_lake": lambda: make_env(EnvConfig())}
        )


TWICE = """
import os, sys
from pathlib import Path
from turnwise.procs.channel import frame
from turnwise.types import Message, Observation, StepResult, Task

class Twice:
    "The first step of all answers twice: from a fork that comes back, or with a frame of its own."
    max_turns = None

    def __init__(self, how, mark):
        self.how, self.mark = how, Path(mark)

    def make_task(self, seed, split):
        return Task(id=f"twice/{seed}", seed=seed, split=split)

    def reset(self, task, noise_seed=0):
        self.count, self.noise = 0, noise_seed % 1000
        return Observation(messages=(Message(role="user", content="Go."),))

    def step(self, message):
        self.count += 1
        if self.how and not self.mark.exists():
            self.mark.touch()
            if self.how == "frame":
                os.write(int(sys.argv[3]), frame(b'{"ok": null}'))
            elif os.fork() == 0:
                raise (SystemExit if self.how == "exit" else RuntimeError)("in the child")
        reply = Message(role="user", content=f"{self.count} of 3")
        return StepResult(messages=(reply,), reward=self.noise + 0.1 * self.count,
                          terminated=self.count == 3)

    def finish(self):
        return StepResult(messages=(), reward=0.0)

    def close(self):
        pass
"""


@pytest.mark.parametrize("how", ["fork", "exit", "frame"])
def test_an_answer_is_the_answer_to_its_request(tmp_path: Path, how: str) -> None:
    """One worker has all episodes. What one of them answers twice never reaches another."""
    file, mark = tmp_path / "twice.py", tmp_path / "mark"
    file.write_text(TWICE)

    def play(how: str) -> tuple[dict[str, Any], dict[str, Any]]:
        options = {"how": how, "mark": str(mark)}
        env = EnvConfig(name=f"{file}:Twice", options=options, format=FormatConfig(style="raw"))
        limits = {"step_timeout": 60.0, "reset_timeout": 60.0}
        result, facts = rollout(config_for(env, groups=2, size=2, retries=0, **limits))
        assert not result.dropped
        return fingerprint(result), facts["workers"]

    played, counts = play(how)
    assert mark.exists()
    assert counts["started"] == (2 if how == "frame" else 1)
    assert played == play("")[0]


def test_a_process_that_ends_before_it_is_written_to_is_told_by_its_silence() -> None:
    """It may end just before or just after that: both are the answer that does not come."""
    process, sock = start_beside("sys", stderr=subprocess.DEVNULL)  # it has no main
    process.wait()
    send_frame(sock, b"x" * 1_000_000)
    assert receive_frame(sock) is None
    sock.close()
    ours, theirs = socket.socketpair()
    theirs.close()
    with pytest.raises(_LostError):
        _drive(ours, EnvConfig(name="bandit"), RolloutConfig())
    ours.close()
