"""check_env finds what is wrong with an environment: one planted fault each."""

import itertools
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from turnwise.config.schema import EnvConfig, RolloutConfig
from turnwise.envs.base import BaseEnv
from turnwise.evaluate.check_env import check_beside, check_env
from turnwise.types import Message, Observation, StepResult, Task

COUNTER = itertools.count()


class Good(BaseEnv):
    """Three steps of "go"; every fault below changes one thing."""

    actions = ("go", "stay")

    def __init__(self) -> None:
        self.seed = 0
        self.left = 3

    def reset(self, seed: int | None = None, **kwargs: Any) -> Any:
        self.seed, self.left = seed or 0, 3
        return f"start {self.seed}"

    def step(self, action: str) -> Any:
        self.left -= action == "go"
        return f"left {self.left}", 0.5, self.left == 0, {}


class Forgetful(Good):
    def step(self, action: str) -> Any:
        return f"{next(COUNTER)}", 0.0, True, {}


class Silent(Good):
    def step(self, action: str) -> Any:
        return "", 0.0, False, {}


class SilentStart(Good):
    def reset(self, seed: int | None = None, **kwargs: Any) -> Any:
        return " "


class Raises(Good):
    def step(self, action: str) -> Any:
        raise RuntimeError("planted")


class NaN(Good):
    def step(self, action: str) -> Any:
        return "x", float("nan"), True, {}


class BothEnds(Good):
    def step(self, action: str) -> Any:
        return "x", 0.0, True, True, {}


class NoiseAtStart(Good):
    def reset(self, seed: int | None = None, *, noise_seed: int = 0, **kwargs: Any) -> Any:
        return f"start {seed} {noise_seed}"


class Leftover(Good):
    def reset(self, seed: int | None = None, **kwargs: Any) -> Any:
        self.seed = seed or 0
        return f"start {self.seed}"


class ClosesOnce(Good):
    def close(self) -> None:
        raise OSError("planted")


class Fragile(BaseEnv):
    """Any text is an action, and some break it."""

    def reset(self, seed: int | None = None, **kwargs: Any) -> Any:
        return f"start {seed}"

    def step(self, action: str) -> Any:
        return str(int(action)), 0.0, True, {}

    def random_action(self, rng: random.Random) -> str:
        return str(rng.randrange(10))


@pytest.mark.parametrize(
    ("env", "check"),
    [
        (Forgetful, "determinism"),
        (Leftover, "determinism"),
        (Silent, "text"),
        (SilentStart, "text"),
        (Raises, "contract"),
        (NaN, "contract"),
        (BothEnds, "end"),
        (NoiseAtStart, "noise"),
        (ClosesOnce, "close"),
        (Fragile, "garbage"),
    ],
)
def test_planted_errors_are_found(env: type[BaseEnv], check: str) -> None:
    report = check_env(env, seeds=5)
    assert not report.ok
    assert check in {finding.check for finding in report.findings if finding.severity == "error"}
    assert f"error: {check}: " in str(report)


def test_a_good_environment_has_no_findings() -> None:
    report = check_env(Good, seeds=5)
    assert report.findings == ()
    assert (report.ok, report.noisy, report.episodes) == (True, False, 10)
    assert check_env(Good(), seeds=5).findings == ()


class Endless(Good):
    def step(self, action: str) -> Any:
        return "on", 0.0, False, {}


class Seedless(Good):
    def reset(self, seed: int | None = None, **kwargs: Any) -> Any:
        self.left = 3
        return "start"


class GlobalPython(Good):
    def step(self, action: str) -> Any:
        random.random()
        return super().step(action)


class GlobalNumpy(Good):
    def step(self, action: str) -> Any:
        np.random.random()
        return super().step(action)


@pytest.mark.parametrize(
    ("env", "checks"),
    [
        (Endless, {"end"}),
        (Seedless, {"seed", "splits"}),
        (GlobalPython, {"global random"}),
        (GlobalNumpy, {"global random"}),
    ],
)
def test_planted_oddities_are_warned_of(env: type[BaseEnv], checks: set[str]) -> None:
    report = check_env(env, seeds=5)
    assert report.ok, str(report)
    assert {finding.check for finding in report.findings} == checks


class Lax:
    """Speaks the protocol itself, and answers after the end, with parts that do not add up."""

    max_turns = None

    def make_task(self, seed: int, split: str) -> Task:
        return Task(id=f"{split}/{seed}", seed=seed, split=split)

    def reset(self, task: Task, noise_seed: int = 0) -> Observation:
        return Observation(messages=(Message(role="user", content=task.id),))

    def step(self, message: Message) -> StepResult:
        return StepResult(
            messages=(),
            reward=1.0,
            terminated=True,
            reward_parts={"env": 0.5},
            info={"bad": float("nan")},
        )

    def finish(self) -> StepResult:
        return StepResult(messages=(), reward=0.0)

    def close(self) -> None: ...


def test_objects_that_speak_the_protocol_are_checked_too() -> None:
    found = {finding.check for finding in check_env(Lax(), seeds=2).findings}
    assert {"step after done", "reward", "info"} <= found


def test_a_player_of_ones_own_and_a_config() -> None:
    said: list[str] = []

    def player(env: Any, rng: random.Random) -> str:
        said.append("<answer>go</answer>")
        return said[-1]

    config = EnvConfig.model_validate({"format": {"think": False}})
    assert check_env(Good, seeds=2, config=config, player=player).ok
    assert len(said) == 4 * 3


def test_a_constructor_that_hangs_is_told() -> None:
    class Stuck(Good):
        def __init__(self) -> None:
            super().__init__()
            threading.Event().wait(60)

    report = check_env(Stuck, seeds=1, limits=RolloutConfig(reset_timeout=0.1))
    assert [(found.check, found.message) for found in report.findings] == [
        ("time", "making it took longer than 0.1 s")
    ]


def test_the_last_words_of_a_process_that_ended_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "random.py").write_text("raise SystemError('shadows')\n")
    monkeypatch.chdir(tmp_path)
    report = check_beside("bandit", seeds=1, config=EnvConfig(), limits=RolloutConfig())
    assert [found.message for found in report.findings] == [
        "the environment ended its process (exit 1): SystemError: shadows"
    ]
