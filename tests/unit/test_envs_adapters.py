"""The adapter over reset/step environments: messages, rewards, limits, and environments that
misbehave."""

import json
from typing import Any

import numpy as np
import pytest

from turnwise.config.schema import EnvConfig
from turnwise.envs.adapters import as_env
from turnwise.envs.base import BaseEnv, Env, EnvError
from turnwise.types import Message, StepResult, Task


class Counter(BaseEnv):
    """Counts the actions "one" and "two" up to 5; reward is what was added."""

    instruction = "Count to five."
    actions = ("one", "two")

    def __init__(self) -> None:
        self.total = 0
        self.resets: list[dict[str, Any]] = []
        self.closed = 0

    def reset(self, seed: int | None = None, **kwargs: Any) -> Any:
        self.total = 0
        self.resets.append({"seed": seed, **kwargs})
        return "at 0", {"seed": seed}

    def step(self, action: str) -> Any:
        added = 1 + self.actions.index(action)
        self.total += added
        return f"at {self.total}", added, self.total >= 5, {"success": self.total == 5}

    def potential(self) -> float:
        return float(self.total)

    def close(self) -> None:
        self.closed += 1


def say(env: Env, text: str) -> StepResult:
    return env.step(Message(role="assistant", content=text))


def answer(*actions: str) -> str:
    return f"<think>hm</think><answer>{' || '.join(actions)}</answer>"


def started(obj: object, **settings: Any) -> Env:
    env = as_env(obj, config=EnvConfig.model_validate(settings), name="counter")
    env.reset(env.make_task(3, "train"))
    return env


def test_messages_say_what_the_game_is_and_how_to_answer() -> None:
    env = as_env(Counter(), config=EnvConfig(max_actions_per_episode=4), name="counter")
    opening = env.reset(env.make_task(3, "train"))
    system, user = opening.messages
    assert (system.role, user.role) == ("system", "user")
    assert "Count to five." in system.content
    assert "one, two" in system.content
    assert "<answer>" in system.content
    assert user.content == "at 0\nActions left: 4."
    assert opening.state_key == "at 0"
    other = as_env(Counter(), config=EnvConfig(system_prompt="Be quick."), name="counter")
    assert other.reset(env.make_task(3, "train")).messages[0].content.startswith("Be quick.\n")


def test_several_actions_in_one_reply_are_played_until_the_end() -> None:
    env = started(Counter())
    result = say(env, answer("ONE", "two"))
    assert (result.reward, result.action, result.done) == (3.0, "one || two", False)
    assert result.info == {"success": False, "valid": True, "num_actions": 2}
    result = say(env, answer("two", "two", "two"))
    assert (result.reward, result.action, result.terminated) == (2.0, "two", True)
    assert result.info["success"] is True
    assert result.messages[0].content == "at 5"


def test_actions_beyond_the_turns_limit_are_not_played() -> None:
    env = started(Counter(), format={"max_actions_per_turn": 2})
    assert say(env, answer("one", "one", "one")).reward == 2.0


def test_a_badly_formed_reply_costs_and_changes_nothing() -> None:
    env = started(Counter(), format={"format_penalty": -0.25})
    result = say(env, "one")
    assert (result.reward, result.action, result.done) == (-0.25, None, False)
    assert result.reward_parts == {"env": 0.0, "format": -0.25}
    assert result.messages[0].content.startswith("at 0\nNo legal action")
    assert result.info["valid"] is False
    quiet = started(Counter(), format={"reminder": "never"})
    assert say(quiet, "one").messages[0].content == "at 0"
    loud = started(Counter(), format={"reminder": "always"})
    assert "Reply with" in say(loud, answer("one")).messages[0].content


def test_the_limit_on_actions_truncates() -> None:
    env = started(Counter(), max_actions_per_episode=2)
    result = say(env, answer("one", "one", "one"))
    assert (result.reward, result.terminated, result.truncated) == (2.0, False, True)
    env = started(Counter(), max_actions_per_episode=3)
    result = say(env, answer("two", "two", "two"))
    assert (result.terminated, result.truncated) == (
        True,
        False,
    )  # the end counts, where both fall together


def test_shaping_adds_named_parts_that_sum_to_the_reward() -> None:
    env = started(Counter(), shaping={"turn_cost": -0.5, "potential_coef": 2.0, "clip": 1.0})
    result = say(env, answer("two"))
    assert result.reward_parts == {"env": 2.0, "turn_cost": -0.5, "potential": 4.0, "clip": -4.5}
    assert result.reward == 1.0


def test_potential_shaping_telescopes() -> None:
    env = started(Counter(), shaping={"potential_coef": 1.0})
    parts = [say(env, answer("two")).reward_parts["potential"] for _ in range(3)]
    assert sum(parts) == 0.0  # minus the potential of the initial state


def test_what_reset_is_given() -> None:
    counter = Counter()
    env = as_env(counter, config=EnvConfig(reset_options={"level": 2}), name="counter")
    task = env.make_task(5, "train")
    assert task.id == "counter/train/5"
    env.reset(task, noise_seed=9)
    env.reset(Task(id="x", seed=1, payload={"extra": True}))
    assert counter.resets == [{"seed": 5, "level": 2}, {"seed": 1, "level": 2, "extra": True}]


def test_tasks_of_train_and_val_never_share_a_seed() -> None:
    env = as_env(Counter(), config=EnvConfig(), name="counter")
    seeds = [*range(50), 2**62 + 1, 2**62 + 2]
    train = {env.make_task(seed, "train").seed for seed in seeds}
    val = {env.make_task(seed, "val").seed for seed in seeds}
    assert len(train) == len(val) == len(seeds)
    assert not train & val
    assert max(train | val) < 2**31


def test_noise_and_split_go_to_those_who_take_them() -> None:
    class Noisy(Counter):
        def reset(
            self, seed: int | None = None, *, noise_seed: int = 0, split: str = "", **kwargs: Any
        ) -> str:
            self.resets.append({"seed": seed, "noise_seed": noise_seed, "split": split})
            return "here"

    noisy = Noisy()
    env = as_env(noisy, config=EnvConfig(), name="noisy")
    env.reset(env.make_task(7, "val"), noise_seed=3)
    assert noisy.resets == [{"seed": 7, "noise_seed": 3, "split": "val"}]


def test_turn_limits() -> None:
    class Once(Counter):
        max_turns = 1

    def limit(obj: BaseEnv, **settings: Any) -> int | None:
        return as_env(obj, config=EnvConfig.model_validate(settings), name="x").max_turns

    assert [limit(Counter()), limit(Counter(), max_turn=3), limit(Counter(), single_turn=True)] == [
        None,
        3,
        1,
    ]
    assert [limit(Once()), limit(Once(), max_turn=3), limit(Once(), single_turn=False)] == [
        1,
        1,
        None,
    ]


def test_steps_out_of_order_are_refused() -> None:
    env = as_env(Counter(), config=EnvConfig(), name="counter")
    with pytest.raises(EnvError, match="call reset first"):
        say(env, answer("one"))
    env.reset(env.make_task(0, "train"))
    say(env, answer("two", "two", "two"))
    with pytest.raises(EnvError, match="this one is over"):
        say(env, answer("one"))


def test_reset_and_close_may_be_repeated() -> None:
    counter = Counter()
    env = started(counter)
    say(env, answer("two"))
    assert env.reset(env.make_task(3, "train")).messages[-1].content == "at 0"
    env.close()
    env.close()
    assert counter.closed == 1
    assert env.finish().reward == 0.0


class Broken(Counter):
    """Returns whatever it was given."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def step(self, action: str) -> Any:
        if isinstance(self.value, BaseException):
            raise self.value
        return self.value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (ZeroDivisionError("oh"), "step raised ZeroDivisionError: oh"),
        (SystemExit(3), "step raised SystemExit: 3"),
        (("a", float("nan"), False, {}), "finite number, got nan"),
        (("a", float("-inf"), False, {}), "finite number, got -inf"),
        (("a", None, False, {}), "finite number, got None"),
        (("a", "1.0", False, {}), "finite number"),
        (("a", np.array([1.0, 2.0]), False, {}), "finite number"),
        (("a", 1.0, True), "tuple of 3"),
        (["a", 1.0, True, {}], "got list"),
        (None, "got NoneType"),
        ((np.zeros(3), 1.0, True, {}), "observation of step must be text, got ndarray"),
        ((b"bytes", 1.0, True, {}), "observation of step must be text, got bytes"),
        (("a", 1.0, "no", {}), "True or False, got 'no'"),
        (("a", 1.0, False, None, {}), "True or False, got None"),
        (("a", 1.0, False, [1]), "info must be a dict"),
    ],
)
def test_broken_environments_raise_env_errors(value: Any, message: str) -> None:
    env = started(Broken(value))
    with pytest.raises(EnvError, match=message):
        say(env, answer("one"))
    with pytest.raises(EnvError, match="this one is failed"):
        say(env, answer("one"))
    assert env.reset(env.make_task(0, "train")).messages  # and a reset makes it playable again


@pytest.mark.parametrize("value", [3, None, ("a", {}, 1), (4, {})])
def test_broken_resets_raise_env_errors(value: Any) -> None:
    class BadReset(Counter):
        def reset(self, seed: int | None = None, **kwargs: Any) -> Any:
            return value

    with pytest.raises(EnvError, match="reset"):
        started(BadReset())


def test_five_values_numpy_scalars_and_odd_infos_are_accepted() -> None:
    info = {
        "array": np.arange(2),
        3: {"nan": float("nan")},
        "set": {1},
        "object": object(),
        "deep": [[[[1]]]],
    }
    env = started(Broken(("a", np.float32(0.5), np.bool_(False), np.bool_(True), info)))
    result = say(env, answer("one"))
    assert (result.reward, result.terminated, result.truncated) == (0.5, False, True)
    stored = json.loads(json.dumps(result.info, allow_nan=False))
    assert stored["array"] == [0, 1]
    assert stored["3"] == {"nan": None}


def test_four_values_tell_a_limit_by_their_info() -> None:
    result = say(started(Broken(("a", 0, True, {"TimeLimit.truncated": True}))), answer("one"))
    assert (result.terminated, result.truncated) == (False, True)


def test_info_that_contains_itself_is_cut() -> None:
    loop: dict[str, Any] = {}
    loop["loop"] = loop
    json.dumps(say(started(Broken(("a", 0, True, loop))), answer("one")).info)


def test_gymnasium_environments_play_by_numbers() -> None:
    gymnasium = pytest.importorskip("gymnasium")
    env = as_env(gymnasium.make("CliffWalking-v1"), config=EnvConfig(), name="cliff")
    opening = env.reset(env.make_task(0, "train"))
    assert "Actions: 0, 1, 2, 3." in opening.messages[0].content
    assert opening.messages[1].content == "36"
    result = say(env, answer("0"))
    assert (result.reward, result.messages[0].content) == (-1.0, "24")


def test_objects_with_text_need_not_derive_from_anything() -> None:
    class Plain:
        actions = ("go",)

        def reset(self) -> str:
            return "start"

        def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
            return action, 2.0, True, {}

    assert say(started(Plain()), answer("GO")).reward == 2.0

    class Changing(Plain):
        def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
            self.actions = ("stop",)
            return action, 1.0, action == "stop", {}

    result = say(started(Changing()), answer("go", "stop"))
    assert (result.action, result.terminated) == ("go || stop", True)
    with pytest.raises(EnvError, match="str is not an environment"):
        as_env("hello", config=EnvConfig(), name="x")


def test_unknown_reset_options_name_the_nearest() -> None:
    class Strict:
        def reset(self, *, seed: int = 0, level: int = 1) -> str:
            return "start"

        def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
            return action, 0.0, True, {}

    with pytest.raises(ValueError, match=r"no option 'levle'; did you mean 'level'"):
        as_env(Strict(), config=EnvConfig(reset_options={"levle": 2}), name="strict")


def test_a_split_is_not_in_the_seeds_last_bit() -> None:
    """An environment that takes no split may use its seed as it likes: seed % 2 must not be the
    split."""
    env = as_env(Counter(), config=EnvConfig(), name="counter")
    for split in ("train", "val"):
        assert {env.make_task(seed, split).seed % 2 for seed in range(2**62, 2**62 + 100)} == {0, 1}


def test_half_a_surrogate_pair_is_replaced() -> None:
    class Broken(Counter):
        def reset(self, seed: int | None = None, **kwargs: Any) -> str:
            return "half a pair: \ud800"

    env = as_env(Broken(), config=EnvConfig(), name="broken")
    assert "half a pair: \ufffd" in env.reset(env.make_task(0, "train")).messages[1].content


@pytest.mark.parametrize(
    ("actions", "message"), [("left", "got one text"), (("go", "a || b"), "has the separator")]
)
def test_actions_that_no_reply_could_name_are_refused(actions, message) -> None:
    counter = Counter()
    counter.actions = actions
    with pytest.raises(EnvError, match=message):
        as_env(counter, config=EnvConfig(), name="counter")
