"""Objects that lie about what they are: each becomes an error with a status, or a plain value."""

import signal
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from rollout_parts import CountEnv, config_for, says

from turnwise.envs.base import EnvError, EnvTimeoutError
from turnwise.envs.gate import admit_result, admit_task, ask, read_info, read_message, read_text
from turnwise.rollout.proxy import AgentProxy
from turnwise.testing.tiny import tiny_tokenizer
from turnwise.types import Message, Status, StepResult, Task


class ClasslessError(Exception):
    @property
    def __class__(self) -> Any:
        raise SystemExit("no class")


class ClasslessEnvError(EnvError):
    @property
    def __class__(self) -> Any:
        raise SystemExit("no class")


class LyingError(Exception):
    """Says that it is an error of turnwise."""

    @property
    def __class__(self) -> Any:
        return EnvTimeoutError


@pytest.mark.parametrize("kind", [ClasslessError, ClasslessEnvError, LyingError])
def test_the_class_that_an_error_names_runs_no_code(kind: type[Exception]) -> None:
    def fails() -> None:
        raise kind("why")

    with pytest.raises(EnvError) as caught:
        ask("step", fails)
    assert type(caught.value) is EnvError
    assert str(caught.value).startswith(f"step raised {kind.__name__}: why")


@pytest.mark.parametrize("isolation", ["inline", "thread"])
@pytest.mark.parametrize("kind", [ClasslessError, ClasslessEnvError])
def test_such_an_error_is_a_status(kind: type[Exception], isolation: str) -> None:
    class Hostile(CountEnv):
        def step(self, message: Message) -> StepResult:
            raise kind("why")

    config = config_for(isolation=isolation, num_workers=2, retries=0)
    proxy = AgentProxy(config, says(), tiny_tokenizer(), factories={"count": Hostile})
    episodes = proxy.play_all(0)
    proxy.close()
    assert {episode.status for episode in episodes} == {Status.ENV_ERROR}


class Flag:
    """Says that it is a bool, and raises where it is used as one."""

    @property
    def __class__(self) -> Any:
        return bool

    def __bool__(self) -> bool:
        raise SystemExit("no bool")


def test_a_flag_that_is_no_bool_is_refused() -> None:
    flag: Any = Flag()
    with pytest.raises(EnvError, match="must be True or False"):
        admit_result(StepResult(messages=(), reward=0.0, terminated=flag), name="coin")


class Turning(Message):
    """Its content is another one whenever it is read."""

    reads = 0

    def __getattribute__(self, name: str) -> Any:
        if name != "content":
            return super().__getattribute__(name)
        type(self).reads += 1
        return "go" if type(self).reads < 3 else 7


def test_a_message_is_a_plain_one() -> None:
    message = read_message(Turning(role="user", content="go"), where="coin")
    assert type(message) is Message
    assert [message.content for _ in range(3)] == ["go"] * 3


class Text(str):
    def __len__(self) -> int:
        return 1

    def __str__(self) -> str:
        return "assistant"


def test_a_text_cannot_lie_about_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turnwise.envs.gate.values.MAX_TEXT", 100)
    with pytest.raises(EnvError, match="has 1000 characters"):
        read_text(Text("x" * 1000), what="coin")


def test_a_role_cannot_turn_into_another() -> None:
    role: Any = Text("user")
    assert read_message(Message(role=role, content="go"), where="coin").role == "user"


class Seed(int):
    def __int__(self) -> int:
        raise SystemExit("no int")

    def bit_length(self) -> int:
        return 1


def test_the_seed_of_a_task_is_what_it_is() -> None:
    assert type(admit_task(Task(id="t", seed=Seed(7)), name="coin").seed) is int
    with pytest.raises(EnvError, match="the seed of a task is an integer"):
        admit_task(Task(id="t", seed=Seed(1 << 5000)), name="coin")


class Endless(Mapping[str, int]):
    """Has items for ever."""

    def __getitem__(self, key: str) -> int:
        return 0

    def __iter__(self) -> Iterator[str]:
        number = 0
        while True:
            number += 1
            yield f"key {number}"

    def __len__(self) -> int:
        return 1


def test_an_info_without_end_is_cut() -> None:
    def late(*_: Any) -> None:
        raise TimeoutError("the info is still being read")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(5)
    try:
        info = read_info(Endless(), name="coin")
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert "turnwise_cut" in info


@pytest.mark.parametrize("said", ["false", "", "no"])
def test_a_success_in_words_is_refused(said: str) -> None:
    with pytest.raises(EnvError, match="success in info is True or False"):
        admit_result(StepResult(messages=(), reward=0.0, info={"success": said}), name="coin")
    for flag in (True, 0, 1.0, None):
        admit_result(StepResult(messages=(), reward=0.0, info={"success": flag}), name="coin")
