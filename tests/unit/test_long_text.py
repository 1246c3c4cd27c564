"""Long text costs what its length asks for: an observation beyond the context is not tokenised in
full, and tool calls are read in one pass."""

import json
import re
from typing import Any

import pytest
from rollout_parts import CountEnv, config_for, says

from turnwise.envs.tools.calls import CLOSE, MAX_CALLS, OPEN, parse_tool_calls
from turnwise.rollout.context import CHARS_PER_ID
from turnwise.rollout.proxy import AgentProxy, RolloutError
from turnwise.testing.tiny import tiny_tokenizer
from turnwise.types import Message, Observation, Status, StepResult, Task, ToolCall

MEGABYTE = 1 << 20
LONG = "all work and no play " * (MEGABYTE // 21)


class LongWinded(CountEnv):
    """Says a megabyte, in its opening (seed 0) or in its second answer."""

    def __init__(self, *, opening: bool) -> None:
        super().__init__()
        self._opening = opening

    def reset(self, task: Task, noise_seed: int = 0) -> Observation:
        opening = super().reset(task, noise_seed)
        if not self._opening:
            return opening
        return Observation(messages=(*opening.messages, Message(role="user", content=LONG)))

    def step(self, message: Message) -> StepResult:
        result = super().step(message)
        if self.count < 2:
            return result
        return StepResult(messages=(Message(role="user", content=LONG),), reward=1.0)


def counted(proxy: AgentProxy) -> list[int]:
    """Lengths of the texts that are tokenised from now on."""
    sizes: list[int] = []
    encode = proxy.context.renderer.encode

    def count(text: str) -> tuple[int, ...]:
        sizes.append(len(text))
        return encode(text)

    proxy.context.renderer.encode = count
    return sizes


def test_a_megabyte_is_cut_before_it_is_tokenised() -> None:
    config = config_for(groups=1, size=2, max_context=200, max_turn=4)
    factories = {"count": lambda: LongWinded(opening=False)}
    proxy = AgentProxy(config, says(), tiny_tokenizer(), factories=factories)
    sizes = counted(proxy)
    episodes = proxy.play(0).episodes
    proxy.close()
    assert [e.status for e in episodes] == [Status.TRUNCATED_LENGTH] * 2
    assert [len(e.turns) for e in episodes] == [2, 2]
    assert episodes[0].turns[-1].messages[0].content == LONG, "the record is whole"
    assert episodes[0].reward == 2.25, "the environment was told that it is over"
    assert sum(sizes) < 8 * CHARS_PER_ID * 200


def test_the_last_words_of_a_truncated_episode_are_not_tokenised_in_full_either() -> None:
    config = config_for(groups=1, size=1, max_context=200, max_turn=2)
    factories = {"count": lambda: LongWinded(opening=False)}
    proxy = AgentProxy(config, says(), tiny_tokenizer(), factories=factories)
    sizes = counted(proxy)
    (episode,) = proxy.play(0).episodes
    proxy.close()
    assert (episode.status, episode.final_ids) == (Status.TRUNCATED_TURNS, ())
    assert sum(sizes) < 4 * CHARS_PER_ID * 200


def test_a_reset_of_a_megabyte_says_both_numbers() -> None:
    config = config_for(groups=1, size=2, max_context=200)
    factories = {"count": lambda: LongWinded(opening=True)}
    proxy = AgentProxy(config, says(), tiny_tokenizer(), factories=factories)
    sizes = counted(proxy)
    message = (
        rf"the opening needs more than \d+ \(text of {len(LONG)} characters\) tokens.*holds 200"
    )
    with pytest.raises(RolloutError, match=message):
        proxy.play(0)
    proxy.close()
    assert sum(sizes) < 4 * CHARS_PER_ID * 200


PIECES = tuple(Message(role="user", content=LONG[:2000]) for _ in range(MEGABYTE // 2000))
CALL = ToolCall(id="a", name="read", arguments=json.dumps({"text": LONG}))
SPREAD = {
    "many messages": Observation(messages=PIECES),
    "a call": Observation(
        messages=(
            Message(role="assistant", content="", tool_calls=(CALL,)),
            Message(role="user", content="Go?"),
        )
    ),
    "a tool": Observation(
        messages=(Message(role="user", content="Go?"),),
        tools=({"type": "function", "function": {"name": "read", "description": LONG}},),
    ),
}


@pytest.mark.parametrize("title", SPREAD)
def test_a_megabyte_in_other_places_is_cut_too(title: str) -> None:
    class Spread(CountEnv):
        def reset(self, task: Task, noise_seed: int = 0) -> Observation:
            super().reset(task, noise_seed)
            return SPREAD[title]

    config = config_for(groups=1, size=1, max_context=200, retries=0)
    proxy = AgentProxy(config, says(), tiny_tokenizer(), factories={"count": Spread})
    sizes = counted(proxy)
    (episode,) = proxy.play_all(0)
    proxy.close()
    assert episode.status is Status.TRUNCATED_LENGTH
    assert re.search(
        r"needs more than \d+ \(text of \d+ characters\).*holds 200", str(episode.error)
    )
    assert sum(sizes) < 4 * CHARS_PER_ID * 200


class Scanned(str):
    """Text that counts the characters that searches in it went over."""

    total = 0

    def find(self, sub: str, start: Any = 0, end: Any = None) -> int:  # type: ignore[override]
        found = super().find(sub, start)
        self.total += (len(self) if found < 0 else found + len(sub)) - start
        return found


HOSTILE_CALLS = {
    "opens": OPEN * 18_000,
    "closes": CLOSE * 16_000,
    "empty calls": (OPEN + CLOSE) * 8_000,
    "calls": (OPEN + '{"name": "a", "arguments": {}}' + CLOSE) * 3_700,
    "lists": (OPEN + "[" * 900 + CLOSE) * 200,
    "objects": (OPEN + '{"a":' * 900 + CLOSE) * 40,
    "deep": OPEN + '{"a":' * 19_000 + CLOSE,
    "white": (OPEN + "\n" * 500 + CLOSE) * 380,
    "opens in a call": OPEN + OPEN * 17_000 + CLOSE,
    "backslashes": OPEN + '{"' + "\\" * 90_000 + CLOSE,
    "digits": OPEN + '{"a": ' + "1" * 90_000 + "}" + CLOSE,
}


@pytest.mark.parametrize("title", HOSTILE_CALLS)
def test_calls_are_read_in_one_pass(title: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in characters, because a clock would measure the machine."""
    text = Scanned(HOSTILE_CALLS[title])
    parsed: list[int] = []
    loads = json.loads

    def counted(body: str) -> Any:
        parsed.append(len(body))
        return loads(body)

    monkeypatch.setattr("turnwise.envs.tools.calls.json.loads", counted)
    calls = parse_tool_calls(text)
    assert 0 < text.total <= len(text) + MAX_CALLS * len(OPEN + CLOSE), "searched twice"
    assert sum(parsed) <= len(text), "parsed twice"
    assert len(calls) <= MAX_CALLS
