"""Environments that attack the run through what they return, raise and are: each is a status, runs
in its own thread, and changes no other episode."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import pytest
from gate_parts import Rude, assert_sound, on
from rollout_parts import CountEnv, config_for, says

from turnwise.config.schema import Config, EnvConfig
from turnwise.envs.base import BadActionError, EnvBusyError, EnvError, EnvTimeoutError
from turnwise.envs.gate import MAX_INFO, admit_result, ask, json_safe, read_info, values
from turnwise.evaluate.baselines import find_baselines
from turnwise.evaluate.players import PlayerSpeaker, RandomPlayer
from turnwise.rollout.proxy import AgentProxy
from turnwise.testing.tiny import tiny_tokenizer
from turnwise.types import Call, Episode, Message, Observation, Status, StepResult, Task, ToolCall
from turnwise.user_code import name_of

ISOLATIONS = pytest.mark.parametrize("isolation", ["inline", "thread"])


def play(factory: Callable[[], Any], isolation: str, *, steps: int = 1, **rollout: Any) -> Any:
    """The episodes of each step, two groups of two."""
    config = config_for(isolation=isolation, num_workers=2, retries=0, **rollout)
    proxy = AgentProxy(config, says(), tiny_tokenizer(), factories={"count": factory})
    try:
        return [proxy.play_all(step) for step in range(steps)]
    finally:
        proxy.close()


def statuses(episodes: Sequence[Episode]) -> set[Status]:
    for episode in episodes:
        assert_sound(episode)
    return {episode.status for episode in episodes}


ASKED = set[str]()
"""Names of the threads that asked for a text."""


class Told:
    """Its text exits, and tells which thread asked for it."""

    def __str__(self) -> str:
        ASKED.add(threading.current_thread().name)
        raise SystemExit("no text")

    __repr__ = __str__


class ExitingError(EnvError):
    __str__ = Told.__str__


class LateError(EnvTimeoutError):
    __str__ = Told.__str__


class RefusalError(BadActionError):
    """A user's own kind of bad action."""


class HostileRefusalError(BadActionError):
    @property
    def over(self) -> bool:
        raise SystemExit("no end")

    @over.setter
    def over(self, value: bool) -> None:
        pass


@pytest.mark.parametrize(("error", "kind"), [
    (ExitingError("why"), EnvError), (EnvError(Told()), EnvError), (LateError(), EnvTimeoutError),
    (EnvTimeoutError(Told()), EnvTimeoutError), (EnvBusyError(Told()), EnvBusyError),
    (RefusalError("no", over=True, info={"n": 1}), BadActionError),
    (HostileRefusalError("no"), EnvError),
    (type("Both", (EnvError, SystemExit), {})("why"), EnvError),
])  # fmt: skip
def test_an_environments_own_kind_of_error_does_not_leave_its_thread(
    error: EnvError, kind: type[EnvError]
) -> None:
    def fails() -> None:
        raise error

    with pytest.raises(EnvError) as caught:
        ask("step", fails)
    found = caught.value
    assert type(found) is kind
    assert all(type(part) is str for part in found.args)
    if isinstance(found, BadActionError):
        assert (found.over, found.info) == (True, {"n": 1})


@ISOLATIONS
@pytest.mark.parametrize("error", [ExitingError("why"), EnvError(Told()), LateError("why")])
@pytest.mark.parametrize("where", ["make_task", "reset", "step", "close"])
def test_the_text_of_an_error_is_read_in_the_thread_of_its_environment(
    where: str, error: EnvError, isolation: str
) -> None:
    class Hostile(CountEnv):
        def __getattribute__(self, name: str) -> Any:
            return fail if name == where else super().__getattribute__(name)

    def fail(*_: Any) -> Any:
        raise error

    ASKED.clear()
    (episodes,) = play(Hostile, isolation)
    assert len(episodes) == 4
    late = Status.ENV_TIMEOUT if isinstance(error, LateError) else Status.ENV_ERROR
    wanted = {"close": Status.COMPLETED, "make_task": Status.ENV_ERROR}.get(where, late)
    assert statuses(episodes) == {wanted}
    assert {"turnwise-env", "turnwise-probe"} >= ASKED
    assert ASKED


class Guarded(CountEnv):
    """Exits where it is looked at from the thread of the run."""

    def __getattr__(self, name: str) -> Any:
        if threading.current_thread() is threading.main_thread():
            raise SystemExit(name)
        raise AttributeError(name)


class Empty(CountEnv):
    """Is false, as a list of no levels is."""

    def __len__(self) -> int:
        return 0


class Spender(CountEnv):
    """Uses its task up."""

    def make_task(self, seed: int, split: str) -> Task:
        return Task(id=f"{seed}", seed=seed, payload={"rows": [1, 2]}, split=split)

    def reset(self, task: Task, noise_seed: int = 0) -> Observation:
        assert task.payload == {"rows": [1, 2]}
        payload = cast(dict[str, Any], task.payload)
        payload["rows"].clear()
        payload["rude"] = Rude()
        return super().reset(task, noise_seed)


@ISOLATIONS
@pytest.mark.parametrize("kind", [Guarded, Empty, Spender])
def test_the_environment_itself_harms_nobody(kind: type[CountEnv], isolation: str) -> None:
    for episodes in play(kind, isolation, steps=2):
        assert statuses(episodes) == {Status.COMPLETED}


@ISOLATIONS
def test_only_a_shared_environment_is_waited_for(isolation: str) -> None:
    class Busy(CountEnv):
        attempts = 0

        def reset(self, task: Task, noise_seed: int = 0) -> Observation:
            Busy.attempts += 1
            if Busy.attempts <= 4:
                raise EnvBusyError("come back later")
            return super().reset(task, noise_seed)

    (episodes,) = play(Busy, isolation)
    assert statuses(episodes) == {Status.ENV_ERROR}
    assert Busy.attempts == 4


@ISOLATIONS
def test_a_limit_of_turns_that_breaks_later_fails_its_episodes(isolation: str) -> None:
    class Moody(CountEnv):
        asked = 0

        @property
        def max_turns(self) -> int | None:
            Moody.asked += 1
            if Moody.asked > 1:  # once a rollout
                raise SystemExit("no more")
            return None

    first, second = play(Moody, isolation, steps=2)
    assert statuses(first) == {Status.COMPLETED}
    assert statuses(second) == {Status.ENV_ERROR}
    assert second[0].error.startswith("count: max_turns raised SystemExit: no more")


def test_an_environment_that_was_made_too_late_is_closed() -> None:
    made, closed = threading.Event(), threading.Semaphore(0)

    class Late(CountEnv):
        number = 0

        def __init__(self) -> None:
            super().__init__()
            Late.number += 1
            if Late.number > 1:  # the first makes tasks
                made.wait()

        def close(self) -> None:
            closed.release()

    (episodes,) = play(Late, "thread", reset_timeout=0.2)
    assert statuses(episodes) == {Status.ENV_TIMEOUT}
    assert closed.acquire(timeout=600.0), "the one that makes tasks"
    made.set()
    for _ in episodes:
        assert closed.acquire(timeout=600.0)


class Endless(Sequence[Any]):
    """Goes on for ever; the test ends it."""

    def __init__(self, item: Any) -> None:
        self._item = item
        self._reads = 0

    def __getitem__(self, index: Any) -> Any:
        self._reads += 1
        assert self._reads < 200_000, "it is read without end"
        return self._item

    def __len__(self) -> int:
        return 1


class EndlessMapping(Mapping[Any, Any]):
    def __getitem__(self, key: Any) -> float:
        return 0.5

    def __iter__(self) -> Iterator[Any]:
        return iter(range(200_000))

    def __len__(self) -> int:
        return 1


@pytest.mark.parametrize("result", [
    StepResult(messages=cast(Any, Endless("")), reward=0.0),
    StepResult(messages=cast(Any, [""] * 20_000), reward=0.0),
    on(reward_parts={f"{number}": 0.0 for number in range(20_000)}),
    on(earlier=EndlessMapping()), on(repeated=EndlessMapping()),
    on(untrained=Endless(0)), on(call=Call(stop=cast(Any, Endless("x")))),
    StepResult(messages=(Message(role="user", content="", tool_calls=cast(
        Any, Endless(ToolCall(id="", name="", arguments="")))),), reward=0.0),
])  # fmt: skip
def test_a_list_has_a_limit(result: StepResult) -> None:
    with pytest.raises(EnvError, match="has more than 10000 items"):
        admit_result(result, name="coin")


def nested(levels: int) -> Any:
    found: Any = []
    for _ in range(levels):
        found = [found] * 100
    return found


@pytest.mark.parametrize(
    "value", [[[]] * 400_000, [{}] * 400_000, nested(3), Endless([]), np.empty((400_000, 0))]
)
def test_what_is_empty_takes_room_too(value: Any) -> None:
    assert len(json.dumps(read_info({"x": value}, name="coin"))) < 3 * MAX_INFO


def test_what_numpy_cannot_list_is_text() -> None:
    assert isinstance(json_safe(np.finfo(np.float32)), str)


def test_what_was_admitted_does_not_change(monkeypatch: pytest.MonkeyPatch) -> None:
    message, info = Message(role="user", content="On."), {"n": 1}
    simple = values._is_simple

    def then_changed(items: dict[Any, Any]) -> bool:
        found = simple(items)
        info["n"] = cast(Any, Rude())  # as another thread would
        return found

    monkeypatch.setattr(values, "_is_simple", then_changed)
    result = admit_result(StepResult(messages=(message,), reward=0.0, info=info), name="coin")
    object.__setattr__(message, "content", 7)
    assert result.messages[0].content == "On."
    assert result.info == {"n": 1}


class Advising(CountEnv):
    """Names `hints` as random replies, one a turn."""

    def __init__(self, hints: Sequence[Any]) -> None:
        super().__init__()
        self._hints = hints

    def hint(self, what: str, seed: int) -> Any:
        return self._hints[self.count]


@ISOLATIONS
@pytest.mark.parametrize(("hints", "told"), [
    ((7,), "the hint 'random' must be text, got int: 7"),
    (("go", {"a": 1}), "the hint 'random' must be text, got dict"),
    ((Rude(),), "the hint 'random' must be text, got Rude"),
    (("go", None), "'count' named legal actions before, and now none"),
])  # fmt: skip
def test_a_hint_that_is_none_fails_its_episode(
    hints: Sequence[Any], told: str, isolation: str
) -> None:
    config = config_for(isolation=isolation, num_workers=2, retries=0)
    speaker = PlayerSpeaker(RandomPlayer())
    proxy = AgentProxy(config, factories={"count": lambda: Advising(hints)}, speaker=speaker)
    episodes = proxy.play_all(0)
    proxy.close()
    assert {episode.status for episode in episodes} == {Status.ENV_ERROR}
    assert all(told in str(episode.error) for episode in episodes)


def test_baselines_hear_of_a_hint_that_exits() -> None:
    class Exits(CountEnv):
        def hint(self, what: str, seed: int) -> Any:
            raise SystemExit("no hint")

    config = Config(
        env=EnvConfig(name=name_of(Exits)),
        rollout=config_for(tags=(), isolation="thread").rollout,
    )
    with pytest.raises(EnvError, match="SystemExit: no hint"):
        find_baselines(config)


def raises(error: BaseException) -> Callable[..., Any]:
    def fail(*_: Any) -> Any:
        raise error

    return fail


def hostile_objects() -> list[Any]:
    """An object of every base, with every method that may be called failing in every way."""
    errors = (SystemExit(), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError(),
              StopIteration(), RecursionError(), ExceptionGroup("g", [ValueError()]))  # fmt: skip
    bases: dict[type, Any] = {object: None, dict: {"a": 1}, list: [1], str: "x", int: 3, float: 0.5}
    methods = ("__str__", "__repr__", "__eq__", "__hash__", "__len__", "__iter__", "__getitem__",
               "__class__", "__bool__", "__float__", "__getattribute__", "items")  # fmt: skip
    found: list[Any] = []
    for number, (base, method) in enumerate((b, m) for b in bases for m in methods):
        fail: Any = raises(errors[number % len(errors)])
        body = {method: property(fail) if method == "__class__" else fail}
        kind = type("Hostile", (base,), body)
        found.append(kind() if base is object else kind(bases[base]))
    return found


PLACES: tuple[Callable[[Any], Any], ...] = (
    lambda value: value,
    lambda value: StepResult(messages=(value,), reward=1.0),
    lambda value: StepResult(messages=(Message(role="user", content=value),), reward=1.0),
    lambda value: StepResult(messages=(), reward=value),
    lambda value: on(terminated=value),
    lambda value: on(reward_parts={"env": value}),
    lambda value: on(info=value),
    lambda value: on(info={"x": [value]}),
    lambda value: on(state_key=value),
    lambda value: on(call=value),
)


def test_hundreds_of_hostile_answers_in_one_rollout_change_no_other_episode() -> None:
    """Every second group is sound: its tokens and rewards are those of a run of sound groups."""
    answers = [(value, place) for value in hostile_objects() for place in PLACES]

    class Hostile(CountEnv):
        def __init__(self, share: int) -> None:
            super().__init__()
            self._share, self._made, self._case = share, 0, -1

        def make_task(self, seed: int, split: str) -> Task:
            self._made += 1
            return Task(id=f"{seed}", seed=seed, payload={"case": self._made - 1}, split=split)

        def reset(self, task: Task, noise_seed: int = 0) -> Observation:
            self._case = task.payload["case"]
            return super().reset(task, noise_seed)

        def step(self, message: Message) -> StepResult:
            found = super().step(message)
            if self._case % 2 or not self._share:
                return found
            value, place = answers[self._case // 2]
            return place(value)

    def run(share: int) -> list[Episode]:
        (episodes,) = play(lambda: Hostile(share), "thread", groups=2 * len(answers), size=1,
                           max_turn=3)  # fmt: skip
        return episodes

    before, attacked = run(0), run(1)
    for episode in attacked:
        assert_sound(episode)
    assert [_played(one) for one in attacked[1::2]] == [_played(one) for one in before[1::2]]
    assert sum(one.status is Status.ENV_ERROR for one in attacked[::2]) > 0.8 * len(answers)


def _played(episode: Episode) -> Any:
    turns = [(turn.prompt_ids, turn.completion, turn.reward) for turn in episode.turns]
    return episode.status, turns
