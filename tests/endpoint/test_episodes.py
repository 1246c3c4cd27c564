"""How episodes of programs begin and end: waiting for a place, hanging up, limits."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from agent_parts import play

from turnwise.types import Status

USER = {"role": "user", "content": "Where to?"}
ENOUGH = threading.Event()
"""Set when programs that would never end have served their purpose."""


@pytest.fixture(autouse=True, scope="module")
def nothing_goes_on() -> Iterator[None]:
    yield
    ENOUGH.set()


def chat(client: Any, messages: list[Any], **options: Any) -> Any:
    model = options.pop("model", "policy")
    return client.chat.completions.create(model=model, messages=messages, **options)


def test_waiting_for_a_free_place_is_no_part_of_the_reset() -> None:
    first = threading.Lock()

    def slow(client: Any) -> float:
        chat(client, [USER])
        if first.acquire(blocking=False):
            ENOUGH.wait(8.0)
        return 1.0

    episodes, _ = play(slow, groups=3, options={"slots": 1}, reset_timeout=4.0, step_timeout=600.0)
    assert [episode.error for episode in episodes] == [None] * 3
    assert [episode.reward for episode in episodes] == [1.0] * 3


def test_a_program_that_begins_and_never_asks_ends_by_the_reset_timeout() -> None:
    def idle(client: Any) -> float:
        ENOUGH.wait()
        return 1.0

    (episode,), _ = play(idle, reset_timeout=0.5)
    assert episode.status is Status.ENV_TIMEOUT
    assert "reset took longer" in (episode.error or "")


def slowly(session: Any, call: int) -> float:
    """The first reply comes at once, the others take their time."""
    return 0.0 if session.key.endswith("#0") else 1.0


async def takes_the_first(client: Any) -> float:
    await chat(client, [USER])
    jobs = [
        asyncio.create_task(chat(client, [{"role": "user", "content": f"part {number}"}]))
        for number in range(3)
    ]
    await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
    for job in jobs:
        job.cancel()
    await asyncio.gather(*jobs, return_exceptions=True)
    return 1.0


def gives_up(client: Any) -> float:
    chat(client, [USER])
    with contextlib.suppress(openai.APITimeoutError):
        chat(client.with_options(timeout=0.2, max_retries=0), [USER])
    return 1.0


@pytest.mark.parametrize("program", [takes_the_first, gives_up])
def test_a_program_may_end_while_the_policy_replies(program: Any) -> None:
    (episode,), _ = play(program, generator={"latency": slowly}, step_timeout=600.0)
    assert episode.status is Status.COMPLETED, episode.error
    assert episode.reward == 1.0
    assert not episode.turns[-1].trained
    assert all(turn.trained for turn in episode.turns[:-1])


def asks_for_many(client: Any) -> float:
    chat(client, [USER])
    try:
        chat(client.with_options(max_retries=0), [USER], n=16)
    except openai.APIStatusError as error:
        return 1.0 if (error.status_code, error.code) == (410, "turn_limit") else -1.0
    return -2.0


def test_choices_that_were_never_given_are_not_trained_on() -> None:
    (episode,), _ = play(asks_for_many, lambda session, call: f"reply {call}")
    assert episode.status is Status.TRUNCATED_TURNS, episode.error
    assert episode.reward == 1.0
    assert [turn.trained for turn in episode.turns] == [True] + [False] * 11


def hangs_up_among_choices(client: Any) -> float:
    with contextlib.suppress(openai.APITimeoutError):
        chat(client.with_options(timeout=0.5, max_retries=0), [USER], n=3)
    chat(client, [{"role": "user", "content": "Again."}])
    return 1.0


def test_choices_of_a_client_that_hung_up_are_not_trained_on() -> None:
    (episode,), _ = play(hangs_up_among_choices, generator={"latency": slowly}, step_timeout=600.0)
    assert episode.status is Status.COMPLETED, episode.error
    assert len(episode.turns) < 4  # nobody wants the last choice any more
    assert episode.turns[-1].trained
    assert not any(turn.trained for turn in episode.turns[:-1])


def asks_on(client: Any) -> float:
    told: list[tuple[int, str]] = []
    while len(told) < 3:
        try:
            chat(client, [USER])
        except openai.APIStatusError as error:
            told.append((error.status_code, str(error.code)))
    return 1.0 if told == [(410, "turn_limit")] * 3 else -1.0


def test_the_limit_of_turns_is_told_every_time() -> None:
    (episode,), _ = play(asks_on)
    assert (episode.status, episode.reward) == (Status.TRUNCATED_TURNS, 1.0)


def test_a_program_that_ends_after_its_episode_is_no_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ended = threading.Event()

    def late(client: Any) -> float:
        with contextlib.suppress(openai.APIStatusError):
            while True:
                chat(client, [USER])
        threading.Timer(1.0, ended.set).start()
        ENOUGH.wait(0.5)
        return 1.0

    (episode,), _ = play(late, options={"patience": 0.01})
    assert episode.status is Status.TRUNCATED_TURNS
    assert ended.wait(60)
    assert "410" not in caplog.text
