"""What TRL's side asks of an environment before training: errors that name it, never a hang or an
exit. No TRL is needed for this."""

import threading
from pathlib import Path
from typing import Any

import pytest

from turnwise.envs.base import EnvError, EnvTimeoutError
from turnwise.integrations.trl.detect import examine
from turnwise.integrations.trl.rewards import EnvironmentRewardAdapter
from turnwise.integrations.trl.sources import ROW, EnvSource, make_source
from turnwise.types import Message, Observation, StepResult, Task


def misbehave(how: str) -> None:
    if how == "exits":
        raise SystemExit("enough")
    if how == "raises":
        raise KeyError("side")
    threading.Event().wait()


class Hostile:
    """One method exits, raises or hangs."""

    def __init__(self, method: str = "", how: str = "") -> None:
        self._method, self._how = method, how

    def _maybe(self, method: str) -> None:
        if method == self._method:
            misbehave(self._how)

    @property
    def max_turns(self) -> int | None:
        self._maybe("max_turns")
        return None

    def make_task(self, seed: int, split: str) -> Task:
        self._maybe("make_task")
        return Task(id="t", seed=seed, split=split)

    def reset(self, task: Task, noise_seed: int = 0) -> Observation:
        self._maybe("reset")
        return Observation(messages=(Message(role="user", content="Go."),))

    def step(self, message: Message) -> StepResult:
        self._maybe("step")
        return StepResult(messages=(), reward=1.0, terminated=True)

    def finish(self) -> StepResult:
        return StepResult(messages=(), reward=0.0)

    def close(self) -> None:
        self._maybe("close")


def source_of(method: str, how: str) -> EnvSource:
    source = make_source(Hostile(method, how))
    source.timeout = 0.3
    return source


TOLD = {
    "exits": "raised SystemExit: enough",
    "raises": "raised KeyError: 'side'",
    "hangs": "took longer than 0.3 s",
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("how", TOLD)
@pytest.mark.parametrize("method", ["make_task", "reset", "close"])
def test_the_first_prompts_name_the_environment_that_fails(method: str, how: str) -> None:
    source = source_of(method, how)
    with pytest.raises(EnvError) as caught:
        list(source.openings("train", limit=2))
    assert str(caught.value).startswith(f"Hostile: {method} {TOLD[how]}")
    assert isinstance(caught.value, EnvTimeoutError) == (how == "hangs")


@pytest.mark.parametrize("how", ["exits", "raises"])
def test_an_environment_that_cannot_be_looked_at_is_named(how: str) -> None:
    with pytest.raises(EnvError, match=f"Hostile: reading it {TOLD[how]}"):
        make_source(Hostile("max_turns", how))


@pytest.mark.timeout(30)
@pytest.mark.parametrize("how", TOLD)
@pytest.mark.parametrize("method", ["make_task", "reset", "step"])
def test_a_reward_names_the_environment_that_fails(method: str, how: str) -> None:
    score = EnvironmentRewardAdapter(source_of(method, how))
    columns: dict[str, Any] = {ROW: [0]}
    with pytest.raises(EnvError, match=f"first error: Hostile: {method} "):
        score([[]], [[{"role": "assistant", "content": "up"}]], **columns)


NAMED = """
from turnwise.types import Task

class Named:
    max_turns = None

    def make_task(self, seed, split):
        return Task(id="t", seed=seed, split=split)

    def reset(self, task, noise_seed=0):
        raise NotImplementedError

    step = finish = reset

    def close(self):
        raise SystemExit("enough")
"""


def test_the_verdict_on_a_name_survives_an_exit(tmp_path: Path) -> None:
    (tmp_path / "named.py").write_text(NAMED)
    with pytest.raises(EnvError, match="Named: close raised SystemExit: enough"):
        examine(f"{tmp_path / 'named.py'}:Named")


def test_an_attribute_that_exits_is_not_there() -> None:
    class Leaves:
        @property
        def multi_turn(self) -> bool:
            raise SystemExit("enough")

    assert not examine(Leaves()).multi_turn
