"""How episodes of programs begin and end: waiting for a place, hanging up, limits."""

import threading
from collections.abc import Iterator
from typing import Any

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
