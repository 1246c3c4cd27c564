"""Nothing that an environment, a tool, a server or a model returns ends a run: it is mended, or it
is the status of its episode. Values are drawn for every field, in every place."""

import json
import math
from typing import Any, cast

import pytest
from draws import examples
from gate_parts import (
    ACTS,
    ERRORS,
    OPENING,
    OPENINGS,
    RESULTS,
    TEXTS,
    VALUES,
    Infinite,
    LongInt,
    Scripted,
    assert_sound,
    check_run,
    on,
    play,
)
from hypothesis import given
from hypothesis import strategies as st
from rollout_parts import config_for, says

from turnwise.envs.base import EnvError
from turnwise.envs.gate import (
    CUT,
    MAX_INFO,
    MAX_TEXT,
    admit_observation,
    admit_result,
    ask,
    clean_text,
    describe,
    json_safe,
    read_info,
    read_reward,
)
from turnwise.rollout.sync import SyncMultiTurnRollout
from turnwise.testing.tiny import tiny_tokenizer
from turnwise.types import (
    Call,
    Message,
    Status,
    StepResult,
    Task,
)


@pytest.mark.parametrize(("result", "error"), [
    (on(earlier={99: 1.0}), "a result is about turn 99; turns: 0 to 0"),
    (on(earlier={-1: 1.0}), "earlier turn must be 0 or more, got -1"),
    (on(earlier={"a": 1.0}), "earlier turn must be an integer, got 'a'"),
    (on(earlier={0: 1e12}), "turn 0: its whole reward must be within"),
    (on(call=Call(parent=99)), "the next turn continues turn 99, and 1 turns were played"),
    (on(call=Call(parent=-1)), "parent must be 0 or more, got -1"),
    (on(call=Call(max_tokens=0)), "max_tokens must be 1 or more, got 0"),
    (on(call=Call(max_tokens=cast(Any, "7"))), "max_tokens must be an integer, got '7'"),
    (on(call=Call(role=cast(Any, 7))), "role must be text, got int: 7"),
    (on(call=Call(stop=cast(Any, (7,)))), "a stop string must be text, got int: 7"),
])  # fmt: skip
def test_fields_about_other_turns_are_checked(result: StepResult, error: str) -> None:
    acts: dict[str, Any] = {"make_task": Task(id="t", seed=3), "step": result}
    acts |= {"reset": OPENING, "finish": StepResult(messages=(), reward=0.0), "close": None}
    check_run(acts, "inline")
    for episode in play(acts, "inline")[2:]:
        assert episode.status is Status.ENV_ERROR
        assert error in str(episode.error)


def test_odd_fields_about_other_turns_are_mended() -> None:
    step = on(call=Call(role="\ud83c"), info={"n": LongInt(3), "x": Infinite(0.5)})
    acts: dict[str, Any] = {"make_task": Task(id="t", seed=3), "step": step}
    acts |= {"reset": OPENING, "finish": StepResult(messages=(), reward=0.0), "close": None}
    check_run(acts, "inline")
    turns = play(acts, "inline")[2].turns
    assert turns[1].role == "\ufffd"
    assert turns[0].info == {"n": 3, "x": 0.5}


@given(ACTS)
def test_no_value_and_no_error_of_an_environment_ends_a_run(acts: dict[str, Any]) -> None:
    check_run(acts, "inline")


@examples(25)
@given(ACTS)
def test_nor_in_threads(acts: dict[str, Any]) -> None:
    check_run(acts, "thread")


@examples(25)
@given(ACTS)
def test_nor_in_lockstep(acts: dict[str, Any]) -> None:
    config = config_for(groups=2, size=2, isolation="inline")
    rollout = SyncMultiTurnRollout(
        says(), config, tiny_tokenizer(), factories={"count": lambda: Scripted(acts)}
    )
    rollout.rollout()
    episodes = rollout.env_state.episodes()
    rollout.close()
    assert len(episodes) == 4
    for episode in episodes:
        assert_sound(episode)


@given(st.one_of(OPENINGS, RESULTS, VALUES))
def test_what_passes_the_gate_passes_it_unchanged(value: Any) -> None:
    for admit in (admit_observation, admit_result):
        try:
            once = ask("env", lambda admit=admit: cast(Any, admit)(value, name="env"))
        except EnvError as error:
            str(error).encode()
        else:
            assert cast(Any, admit)(once, name="env") == once


@given(VALUES)
def test_json_is_plain_and_bounded(value: Any) -> None:
    plain = ask("value", lambda: json_safe(value))
    assert json_safe(plain) == plain
    json.dumps(plain, ensure_ascii=False, allow_nan=False).encode()
    info = ask("info", lambda: read_info({"found": value, "success": True}, name="env"))
    assert info["success"] is True
    assert len(json.dumps(info, ensure_ascii=False)) < 3 * MAX_INFO


def test_an_info_that_is_too_long_says_so_and_keeps_its_facts() -> None:
    info = read_info({"log": "x" * 10**6, "rows": list(range(10**6)), "success": False}, name="env")
    assert info["success"] is False
    assert str(MAX_INFO) in info[CUT]
    assert len(json.dumps(info)) < 2 * MAX_INFO
    assert CUT not in read_info({"log": "x" * 1000}, name="env")
    assert json_safe({"n": 10**5000, 10**5000: 1})["n"] == "<an integer of 16610 bits>"


@pytest.mark.parametrize(
    "listed",
    [
        [],
        ["go"] * 100,
        ["go"] * 101,
        ["x" * 9_000] * 2,
        ["\ud83d", "a"],
        ["caf\u00e9"],
        ["a", 1, [2]],
    ],
)
def test_lists_of_texts_in_an_info_are_read_as_elsewhere(listed: list[Any]) -> None:
    given = {"listed": listed, "success": True}
    info = read_info(given, name="env")
    assert info == json_safe(given)
    assert given["listed"] is listed
    assert info["listed"] is not listed


@pytest.mark.parametrize("value", [1e39, -1e300, 10**400, 1e13, math.nan, math.inf, "1.0", None])
def test_rewards_beyond_float32_are_the_environments_error(value: Any) -> None:
    with pytest.raises(EnvError, match="a reward must"):
        read_reward(value, name="env")
    assert read_reward(1e12, name="env") == 1e12


@given(TEXTS)
def test_text_is_valid_and_sound_text_is_left_alone(text: str) -> None:
    cleaned = clean_text(text)
    cleaned.encode()
    assert clean_text(cleaned) == cleaned
    if not any("\ud800" <= sign <= "\udfff" for sign in text):
        assert cleaned == text


@given(ERRORS)
def test_every_error_has_words(error: BaseException) -> None:
    text = describe(error)
    text.encode()
    assert text.startswith(type(error).__name__)
    assert len(text) < 3000


def test_text_has_a_limit() -> None:
    long = Message(role="user", content="x" * (MAX_TEXT // 2 + 1))
    with pytest.raises(EnvError, match=f"the limit is {MAX_TEXT}"):
        admit_result(StepResult(messages=(long, long), reward=0.0), name="env")
