"""A campaign: thousands of episodes with faults of more than thirty kinds, wherever environments
run. What was played equals the run without faults, and nothing is left behind."""

import ctypes
import gc
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from turnwise.config.schema import Config, EnvConfig, FormatConfig, GroupsConfig, RolloutConfig
from turnwise.generate.base import Session
from turnwise.generate.scripted import ScriptedGenerator
from turnwise.rollout.proxy import AgentProxy
from turnwise.serve.server import EnvServer
from turnwise.testing.faulty import DEADLY, EVERY_FAULT
from turnwise.testing.tiny import tiny_tokenizer
from turnwise.types import Episode

SHARE = 0.15
LIMITS: dict[str, Any] = {"step_timeout": 1.0, "reset_timeout": 2.0, "retries": 5}
"""A busy machine may take a sound step for a hang; it is played again."""
HARMLESS = tuple(kind for kind in EVERY_FAULT if kind not in (*DEADLY, "hang"))
WHERE = {
    "inline": HARMLESS,  # nothing can be done there about the others
    "thread": (*HARMLESS, "hang"),
    "process": EVERY_FAULT,
    "remote": EVERY_FAULT,
}
EPISODES_PER_STEP = 1000
Fingerprint = dict[str, list[tuple[Any, ...]]]


def env_config(share: float, marks: Path | None, faults: tuple[str, ...]) -> EnvConfig:
    options: dict[str, Any] = {"share": share, "faults": list(faults), "hang_seconds": 5.0}
    return EnvConfig(
        name="turnwise.testing.faulty:FaultyEnv",
        options=options | {"marks": str(marks) if marks else None},
        format=FormatConfig(style="raw"),
    )


@contextmanager
def placed(where: str, env: EnvConfig, episodes: int) -> Iterator[Config]:
    """The config of a rollout whose environments run in that place."""
    groups = GroupsConfig(env_groups=episodes // 4, group_size=4)
    if where != "remote":
        settings = {"isolation": where, "num_workers": 4, **LIMITS}
        yield Config(env=env, rollout=RolloutConfig(train=groups, **settings))
        return
    served = RolloutConfig(isolation="process", num_workers=4, **LIMITS)
    with EnvServer(env, served, max_sessions=64) as server:
        limits = LIMITS | {"step_timeout": 60.0, "reset_timeout": 60.0}  # the server has its own
        settings = {"isolation": "thread", "num_workers": 16, **limits}
        remote = EnvConfig(name=server.url)
        yield Config(env=remote, rollout=RolloutConfig(train=groups, **settings))


def open_proxy(config: Config) -> tuple[AgentProxy, ScriptedGenerator]:
    tokenizer = tiny_tokenizer()

    def script(session: Session, ids: tuple[int, ...], call: int) -> str:
        return ("go", "stop")[session.seed >> call & 1]

    generator = ScriptedGenerator(script, tokenizer=tokenizer, end_id=tokenizer.eos_token_id)
    return AgentProxy(config, generator, tokenizer), generator


def fingerprint(episodes: list[Episode]) -> Fingerprint:
    assert [e.error for e in episodes if e.status.failed] == []
    return {
        e.id: [(t.prompt_ids, t.completion.ids, t.reward, t.messages) for t in e.turns]
        for e in episodes
    }


def wait_for(condition: Callable[[], bool], seconds: float = 600.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def threads() -> set[threading.Thread]:
    return {one for one in threading.enumerate() if one.name.startswith("turnwise-env")}


def descriptors() -> Counter[str]:
    """What the open descriptors are, without their numbers."""
    gc.collect()
    found: Counter[str] = Counter()
    for number in os.listdir("/proc/self/fd"):
        try:
            found[os.readlink(f"/proc/self/fd/{number}").partition(":")[0]] += 1
        except OSError:
            continue  # the one that reads the directory
    return found


def megabytes() -> float:
    """Resident memory, less what the allocator keeps for later."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_info().rss / 2**20


def campaign(where: str, marks: Path, *, steps: int, episodes: int) -> None:
    marks.mkdir()
    with placed("inline", env_config(0.0, None, ("slow",)), episodes) as config:
        proxy, _ = open_proxy(config)
        sound = [fingerprint(proxy.play_all(step)) for step in range(steps)]
        proxy.close()
    others = threads()  # of other tests, whose environments hang
    children = {child.pid for child in psutil.Process().children(recursive=True)}
    with placed(where, env_config(SHARE, marks, WHERE[where]), episodes) as config:
        proxy, _ = open_proxy(config)  # what is imported once stays
        proxy.close()
    before, sizes = descriptors(), list[float]()
    with placed(where, env_config(SHARE, marks, WHERE[where]), episodes) as config:
        proxy, generator = open_proxy(config)
        for step in range(steps):
            played = proxy.play_all(step)
            assert fingerprint(played) == sound[step]
            assert sum(episode.attempts for episode in played) > len(played)
            assert generator.open_sessions == ()
            del played
            sizes.append(megabytes())
        for step in range(steps, steps + 3 if steps > 1 else steps):
            # What fills once is no leak, and what hangs frees its memory later.
            if sizes[-1] - sizes[-2] < 4.0:
                break
            proxy.play_all(step)
            sizes.append(megabytes())
        assert steps == 1 or sizes[-1] - sizes[-2] < 4.0, f"megabytes after each step: {sizes}"
        proxy.close()
    faults = Counter(mark.read_text() for mark in marks.iterdir())
    assert faults.total() > 0.6 * SHARE * steps * episodes, "too few faults to show anything"
    if steps > 1:
        assert set(faults) == set(WHERE[where])
    left = {child.pid for child in psutil.Process().children(recursive=True)} - children
    assert left == set(), "processes are left"
    assert wait_for(lambda: threads() <= others), threads() - others
    assert wait_for(lambda: descriptors() <= before), descriptors() - before


@pytest.mark.parametrize("where", WHERE)
def test_faults_change_nothing_but_attempts(where: str, tmp_path: Path) -> None:
    campaign(where, tmp_path / "marks", steps=1, episodes=120)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("where", WHERE)
def test_three_thousand_episodes(where: str, tmp_path: Path) -> None:
    campaign(where, tmp_path / "marks", steps=3, episodes=EPISODES_PER_STEP)
