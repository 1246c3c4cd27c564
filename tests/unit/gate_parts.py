"""Hostile values for every field, and an environment that returns and raises them."""

import asyncio
import json
import math
import sys
from decimal import Decimal
from typing import Any

import numpy as np
from hypothesis import strategies as st
from rollout_parts import CountEnv, config_for, says

from turnwise.data.batch import collate
from turnwise.data.samples import episode_to_samples
from turnwise.envs.base import EnvError
from turnwise.envs.gate import (
    MAX_INFO,
)
from turnwise.rollout.proxy import AgentProxy
from turnwise.testing.tiny import tiny_tokenizer
from turnwise.types import (
    Episode,
    Message,
    Observation,
    Status,
    StepResult,
    Task,
    ToolCall,
)


class Rude:
    """Raises wherever it is looked at."""

    def __repr__(self) -> str:  # hypothesis and pytest show it too, and must live
        if "turnwise" in sys._getframe(2).f_globals["__name__"] or "reprlib" in str(
            sys._getframe(1)
        ):
            raise SystemExit("no repr")
        return "Rude()"

    def _leave(self) -> Any:
        raise SystemExit(1)

    __str__ = __float__ = __bool__ = __len__ = __iter__ = _leave


def cycle() -> Any:
    loop: dict[str, Any] = {}
    loop["a"], loop["b"], loop["c"] = loop, [loop, loop], "text"
    return loop


TEXTS = st.text(st.characters(categories=["L", "N", "P", "Cs", "Cc"]), max_size=20)
"""Half surrogate pairs included."""
NUMBERS = st.one_of(
    st.floats(),
    st.sampled_from([1e39, -1e300, 10**400, "1.0", b"1", None, True, Decimal("1e999")]),
    st.builds(lambda: 10**5000),  # a literal could not be shown
    st.sampled_from([np.float32(0.5), np.array([1.0, 2.0]), np.bool_(True), 1j, Rude()]),
)
ODD = st.one_of(
    NUMBERS,
    TEXTS,
    st.sampled_from(
        [b"\xff", {1, 2}, {(1, 2): 3, None: 4}, [[[]]], object(), Rude(), "x" * 300_000]
    ),
    st.builds(cycle),
    st.builds(lambda: np.arange(6).reshape(2, 3)),
)
VALUES = st.recursive(
    ODD,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
ROLES = st.sampled_from(["user", "system", "tool", "assistant", "robot", "", None, 7])
CALLS = st.one_of(
    VALUES,
    st.lists(
        st.builds(ToolCall, id=TEXTS | ODD, name=TEXTS | ODD, arguments=TEXTS | ODD), max_size=2
    ),
)


def usually(default: Any, other: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """The default two times in three, so that a value gets past its neighbours."""
    return st.one_of(st.just(default), st.just(default), other)


MESSAGES = st.builds(
    Message,
    role=usually("user", ROLES),
    content=usually("Well?", VALUES),
    tool_calls=usually((), CALLS),
    tool_call_id=usually(None, VALUES),
    name=usually(None, VALUES),
)
SPOKEN = usually(
    (Message(role="user", content="On."),), st.lists(MESSAGES | VALUES, max_size=3) | VALUES
)
OPENINGS = st.one_of(
    st.builds(
        Observation,
        messages=SPOKEN,
        tools=usually((), VALUES),
        state_key=usually(None, VALUES),
        info=usually({}, VALUES),
    ),
    VALUES,
)
RESULTS = st.one_of(
    st.builds(
        StepResult,
        messages=SPOKEN,
        reward=usually(1.0, NUMBERS),
        terminated=usually(False, VALUES),
        truncated=usually(False, VALUES),
        action=usually("go", VALUES),
        reward_parts=usually({}, st.dictionaries(TEXTS, NUMBERS, max_size=2) | VALUES),
        state_key=usually(None, VALUES),
        info=usually({}, VALUES),
    ),
    VALUES,
)
TASKS = st.builds(
    Task,
    id=usually("t", VALUES),
    seed=usually(3, NUMBERS),
    payload=usually({}, VALUES),
    split=usually("train", VALUES),
)
KINDS = (
    BaseException, GeneratorExit, asyncio.CancelledError, SystemExit, StopIteration,
    StopAsyncIteration, KeyboardInterrupt, MemoryError, RecursionError, EnvError, ValueError,
)  # fmt: skip
ERRORS = st.builds(lambda kind, text: kind(text), st.sampled_from(KINDS), TEXTS | ODD)
ACTS = st.fixed_dictionaries(
    {
        "make_task": usually(Task(id="t", seed=3), TASKS | VALUES | ERRORS),
        "reset": usually(
            Observation(messages=(Message(role="user", content="Go?"),)), OPENINGS | ERRORS
        ),
        "step": usually(
            StepResult(messages=(Message(role="user", content="On."),), reward=1.0),
            RESULTS | ERRORS,
        ),
        "finish": usually(StepResult(messages=(), reward=0.25), RESULTS | ERRORS),
        "close": usually(None, ERRORS),
    }
)  # fmt: skip


class Scripted(CountEnv):
    """Returns or raises what it is told, in group 1; group 0 is sound."""

    def __init__(self, acts: dict[str, Any]) -> None:
        super().__init__()
        self._acts = acts
        self._hostile = False

    def make_task(self, seed: int, split: str) -> Task:
        self._hostile = not self._hostile
        if self._hostile:
            return super().make_task(0, split)
        return self._act("make_task")

    def reset(self, task: Task, noise_seed: int = 0) -> Observation:
        self._hostile = task.seed == 3
        return self._act("reset") if self._hostile else super().reset(task, noise_seed)

    def step(self, message: Message) -> StepResult:
        return self._act("step") if self._hostile else super().step(message)

    def finish(self) -> StepResult:
        return self._act("finish") if self._hostile else super().finish()

    def close(self) -> None:
        if self._hostile:
            self._act("close")

    def _act(self, what: str) -> Any:
        value = self._acts[what]
        if isinstance(value, BaseException):
            raise value
        return value


def assert_sound(episode: Episode) -> None:
    """The episode can be stored, read back and trained on."""
    line = episode.to_line()
    assert Episode.from_line(line.encode().decode()) == Episode.from_json(json.loads(line))
    assert all(math.isfinite(np.float32(turn.reward) ** 2) for turn in episode.turns)
    for turn in episode.turns:
        assert len(json.dumps(dict(turn.info))) < 3 * MAX_INFO
    if episode.status.failed:
        assert episode.error
        assert len(episode.error) < 3000
    elif episode.turns:
        collate(list(episode_to_samples(episode)), pad_id=0)


def play(acts: dict[str, Any], isolation: str) -> list[Episode]:
    config = config_for(groups=2, size=2, isolation=isolation, num_workers=2, retries=1)
    proxy = AgentProxy(
        config, says(), tiny_tokenizer(), factories={"count": lambda: Scripted(acts)}
    )
    try:
        return proxy.play_all(0)
    finally:
        proxy.close()


def check_run(acts: dict[str, Any], isolation: str) -> None:
    episodes = play(acts, isolation)
    assert len(episodes) == 4
    for episode in episodes:
        assert_sound(episode)
    assert [e.status for e in episodes[:2]] == [Status.COMPLETED] * 2


OPENING = Observation(messages=(Message(role="user", content="Go?"),))


class LongInt(int):
    def __int__(self) -> int:
        return 10**5000


class Infinite(float):
    def __float__(self) -> float:
        return math.inf


def on(**fields: Any) -> StepResult:
    return StepResult(messages=(Message(role="user", content="On."),), reward=1.0, **fields)
