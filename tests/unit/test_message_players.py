"""Players of message environments: random calls by schema, experts, success, tools in `play`."""

import json
from random import Random
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

import turnwise
from turnwise.cli.play import show_tools
from turnwise.config.base import run_config
from turnwise.config.schema import EnvConfig
from turnwise.envs.adapters import as_env
from turnwise.envs.base import hint_of
from turnwise.envs.tools.calls import make_tool, parse_tool_calls, run_tool
from turnwise.envs.tools.sample import random_reply, random_value
from turnwise.evaluate.baselines import find_baselines
from turnwise.evaluate.person import written_call
from turnwise.train.warmstart import build_embedded
from turnwise.types import Message
from turnwise.user_code import name_of


def order(item: Literal["tea", "milk"], count: int, notes: list[str], gift: bool = False) -> str:
    """Orders something.

    Args:
        item: what
    """
    return f"{count} {item} {notes} {gift}"


@given(st.integers(0, 2**32))
def test_random_calls_are_calls_that_the_tool_takes(seed: int) -> None:
    tool = make_tool(order)
    said = random_reply([tool.schema], [{"role": "user", "content": "two milk"}], Random(seed))
    (call,) = parse_tool_calls(said)
    answer = run_tool(tool, call.arguments, timeout=None)
    assert not answer.startswith("error"), (said, answer)


def test_random_values_follow_references_bounds_and_depth() -> None:
    node = {
        "type": "object",
        "properties": {"next": {"$ref": "#/$defs/Node"}},
        "required": ["next"],
    }
    root = {"$defs": {"Node": node}}
    drawn = random_value(node, Random(0), words=["a"], root=root)
    assert json.dumps(drawn).count("next") < 20  # a schema that never ends is cut
    for seed in range(50):
        number = random_value({"type": "number", "minimum": 3}, Random(seed), words=[], root={})
        assert number >= 3.0
        text = random_value(
            {"anyOf": [{"type": "null"}, {"type": "string"}]}, Random(seed), words=["w"], root={}
        )
        assert text in (None, "w")


def test_after_an_answer_the_random_player_sometimes_repeats_it() -> None:
    said = [{"role": "user", "content": "x"}, {"role": "tool", "content": "42"}]
    replies = {random_reply([make_tool(order).schema], said, Random(seed)) for seed in range(20)}
    assert "42" in replies
    assert len(replies) > 1


class Stock(turnwise.ToolEnv):
    """Asks for a number that only the tool knows."""

    def __init__(self) -> None:
        super().__init__(
            tools=[self.stock], rubric=turnwise.Rubric([right]), max_turns=3, success="right"
        )

    def make_row(self, seed: int, split: str) -> dict[str, Any]:
        return {"prompt": f"How many plums? ({split} {seed})", "answer": "7"}

    def stock(self, item: Literal["plums", "figs"]) -> int:
        """Counts."""
        return 7 if item == "plums" else 0

    def expert_reply(self, messages: Any, state: Any) -> str:
        if messages[-1]["role"] == "tool":
            return messages[-1]["content"]
        return '<tool_call>{"name": "stock", "arguments": {"item": "plums"}}</tool_call>'


def right(text: str, answer: str) -> float:
    return float(text == answer)


SMALL = {"rollout": {"isolation": "inline"}, "eval": {"episodes": 32}}


def test_random_and_expert_players_play_tools_and_success_is_told() -> None:
    random = turnwise.evaluate("random", Stock, config=SMALL)
    expert = turnwise.evaluate("expert", Stock, config=SMALL)
    assert 0.0 < random.success.estimate < 1.0
    assert expert.success.estimate == 1.0
    config = turnwise.load_config(SMALL, [f"env.name={name_of(Stock)}"])
    assert [one.label for one in find_baselines(config)] == ["random player", "expert"]


def test_an_unknown_success_function_is_refused() -> None:
    with pytest.raises(ValueError, match="success names a function of the rubric \\(right\\)"):
        turnwise.SingleTurnEnv([{"prompt": "a"}], turnwise.Rubric([right]), success="wrong")


def test_a_chat_without_random_replies_says_what_to_give_it() -> None:
    class Chat(turnwise.MultiTurnEnv):
        def is_completed(self, messages: Any, state: Any, **_: Any) -> bool:
            return True

        def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
            return [], state

    env = as_env(Chat([{"prompt": "hi"}]), config=EnvConfig(), name="chat")
    assert hint_of(env, "random", 0) is None
    with pytest.raises(ValueError, match="random_reply"):
        turnwise.evaluate("random", lambda: Chat([{"prompt": "hi"}]), config=SMALL, split="train")


def test_hints_leave_the_conversation_alone() -> None:
    class Vandal(Stock):
        def random_reply(self, rng: Any, messages: Any, state: Any) -> str:
            messages.clear()
            return "7"

    env = as_env(Vandal(), config=EnvConfig(), name="vandal")
    env.reset(env.make_task(0, "train"))
    assert hint_of(env, "random", 0) == "7"
    assert env.step(Message(role="assistant", content="7")).info["success"] is True


def test_play_shows_tools_and_takes_short_calls(capsys: pytest.CaptureFixture[str]) -> None:
    schema = make_tool(order).schema
    show_tools([schema])
    assert (
        "order(item: tea|milk, count: integer, notes: array, gift: boolean)"
        in capsys.readouterr().out
    )
    for typed in (
        "order item=tea count=2 notes=[1]",
        'order {"item": "tea", "count": 2, "notes": [1]}',
    ):
        (call,) = parse_tool_calls(written_call(typed, [schema]))
        assert json.loads(call.arguments) == {"item": "tea", "count": 2, "notes": [1]}
    for plain in ("order", "two tea", "order tea", 'order item="tea', "order {broken"):
        found = written_call(plain, [schema])
        assert found == plain or json.loads(parse_tool_calls(found)[0].arguments) == {}


def test_a_reply_limit_that_cuts_most_calls_is_refused() -> None:
    words = [f"env.name={name_of(Stock)}", "rollout.isolation=inline"]
    words += ["model.embedded.warmstart_episodes=16", "model.embedded.warmstart_epochs=0"]
    said: list[str] = []
    enough = run_config(None, [*words, "rollout.max_response_tokens=48"])
    build_embedded(enough, progress=said.append)
    assert not any("max_response_tokens" in line for line in said)
    with pytest.raises(ValueError, match=r"max_response_tokens=16 cuts most replies.*up to 34"):
        build_embedded(run_config(None, words), progress=said.append)
