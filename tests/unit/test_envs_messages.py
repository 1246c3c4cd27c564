"""Message-style environments: conversations, rubrics, rows and tools."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any, Literal

import pytest
from draws import examples
from hypothesis import given
from hypothesis import strategies as st

from turnwise.config.schema import EnvConfig
from turnwise.envs import MultiTurnEnv, Rubric, SingleTurnEnv, ToolEnv, check_env
from turnwise.envs.adapters import as_env
from turnwise.envs.base import Env, EnvError
from turnwise.envs.data_rows import RowSplits
from turnwise.envs.tools.calls import make_tool, parse_tool_calls, read_docstring, run_tool
from turnwise.procs.coroutines import run_sync
from turnwise.types import Message, StepResult, ToolCall

ROWS = [{"question": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(40)]


def exact(text: str, answer: str) -> float:
    return float(text.strip() == answer)


async def brief(completion: list[dict[str, Any]]) -> float:
    await asyncio.sleep(0)
    return 1.0 / len(completion[-1]["content"])


def say(env: Env, text: str, **fields: Any) -> StepResult:
    return env.step(Message(role="assistant", content=text, **fields))


def started(obj: object, **settings: Any) -> Env:
    env = as_env(obj, config=EnvConfig.model_validate(settings), name="chat")
    env.reset(env.make_task(0, "train"))
    return env


def test_single_turn_is_scored_by_its_rubric() -> None:
    raw = SingleTurnEnv(ROWS, Rubric([exact, brief], weights=[1.0, 0.5]), "Answer with a number.")
    env = as_env(raw, config=EnvConfig(), name="sums")
    task = env.make_task(7, "train")
    opening = env.reset(task)
    assert [message.role for message in opening.messages] == ["system", "user"]
    assert opening.messages[1].content == task.payload["question"]
    result = say(env, task.payload["answer"])
    expected = {"env": 0.0, "exact": 1.0, "brief": 0.5 / len(task.payload["answer"])}
    assert (result.terminated, result.truncated, env.max_turns) == (True, False, 1)
    assert result.reward_parts == expected
    assert result.reward == sum(expected.values())
    assert result.info["rubric"]["exact"] == 1.0
    assert env.finish().reward == 0.0
    with pytest.raises(EnvError, match="over"):
        say(env, "again")


class Story(MultiTurnEnv):
    """The conversation of five messages from the documents."""

    def is_completed(self, messages: Any, state: Any, **kwargs: Any) -> bool:
        return len(messages) >= 5

    def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        return [{"role": "user", "content": "Environment feedback"}], state


def test_multi_turn_goes_on_until_completed() -> None:
    env = started(Story(dataset=ROWS, rubric=Rubric([lambda messages: len(messages)])))
    first = say(env, "a")
    assert (first.done, first.reward, first.messages[0].content) == (
        False,
        0.0,
        "Environment feedback",
    )
    assert not say(env, "b").done
    last = say(env, "c")
    assert (last.terminated, last.reward, last.messages) == (True, 6.0, ())


def test_a_limit_on_turns_truncates_and_scores() -> None:
    env = started(Story(dataset=ROWS, rubric=Rubric([lambda messages: len(messages)]), max_turns=2))
    assert not say(env, "a").done
    last = say(env, "b")
    assert (last.terminated, last.truncated, last.reward) == (False, True, 4.0)


def test_finish_scores_what_the_rollout_cut() -> None:
    env = started(Story(dataset=ROWS, rubric=Rubric([lambda messages: len(messages)])))
    say(env, "a")
    result = env.finish()
    assert (result.reward, result.terminated, result.messages) == (3.0, False, ())
    assert env.finish().reward == 0.0


def test_async_methods_turn_rewards_and_bare_messages() -> None:
    class Async(MultiTurnEnv):
        async def setup_state(self, state: Any) -> Any:
            return {**state, "count": 0}

        async def is_completed(self, messages: Any, state: Any, **kwargs: Any) -> bool:
            return False

        async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
            await asyncio.sleep(0)
            state["count"] += 1
            state["turn_reward"] = 0.25 * state["count"]
            state["done"] = state["success"] = state["count"] == 2
            return [{"role": "user", "content": f"count {state['count']}"}]

    env = started(Async(dataset=ROWS))
    assert (say(env, "a").reward, say(env, "b").reward_parts) == (0.25, {"env": 0.5})
    env = started(Async(dataset=ROWS))
    say(env, "a")
    last = say(env, "b")
    assert (last.terminated, last.info, last.messages[0].content) == (
        True,
        {"success": True},
        "count 2",
    )


def test_user_code_cannot_change_what_was_said() -> None:
    seen: list[str] = []

    class Rewriter(Story):
        def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
            seen.append(messages[-1]["content"])
            for message in messages:
                message["content"] = "rewritten"
            return [{"role": "user", "content": "on"}], state

    def kept(messages: Any) -> float:
        said = [message["content"] for message in messages if message["role"] == "assistant"]
        return float(said == ["first", "second", "third"])

    env = started(Rewriter(dataset=ROWS, rubric=Rubric([kept])))
    say(env, "first")
    say(env, "second")
    assert say(env, "third").reward == 1.0
    assert seen == ["first", "second"]


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (ValueError("oh"), "env_response raised ValueError: oh"),
        ([], "no message"),
        ([{"role": "robot", "content": "x"}], "role is one of"),
        ([{"role": "user", "content": 3}], "content of a message must be text, got int"),
        ([3], "instead of a message dict"),
        (([{"role": "user", "content": "x"}], None), "the state is the dict"),
        (7, "a list of messages, got int"),
        (None, "a list of messages, got NoneType"),
        ([{"role": "assistant", "content": "x", "tool_calls": [{}]}], "malformed tool calls"),
    ],
)
def test_broken_conversations_raise_env_errors(reply: Any, message: str) -> None:
    class Broken(Story):
        def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
            if isinstance(reply, Exception):
                raise reply
            return reply

    with pytest.raises(EnvError, match=message):
        say(started(Broken(dataset=ROWS)), "a")


def test_an_environment_without_a_beginning_is_refused() -> None:
    with pytest.raises(EnvError, match="no opening message"):
        started(Story())
    assert started(Story(system_prompt="Begin."))
    with pytest.raises(ValueError, match="max_turn"):
        as_env(Story(), config=EnvConfig(max_actions_per_episode=3), name="x")


def test_check_env_likes_conversations() -> None:
    for env in (SingleTurnEnv(ROWS, Rubric([exact])), Story(dataset=ROWS), ToolEnv([add], ROWS)):
        report = check_env(env, seeds=8)
        assert report.findings == (), str(report)


# Rubric


def test_rubric_calls_with_what_is_asked_for() -> None:
    def everything(
        prompt: Any, completion: Any, answer: Any, state: Any, info: Any, parser: Any, **rest: Any
    ) -> float:
        assert prompt[-1]["content"].startswith("What is")
        assert completion == [{"role": "assistant", "content": "hi"}]
        assert (parser, info, state["turn"], rest["level"]) == ("the parser", {"k": 1}, 1, 3)
        return 2.0

    rows = [row | {"info": {"k": 1}, "level": 3} for row in ROWS]
    metric = Rubric(
        [everything, exact, lambda level: level], weights=[1, 0, 0.5], parser="the parser"
    )
    result = say(started(SingleTurnEnv(rows, metric)), "hi")
    assert result.reward_parts == {"env": 0.0, "everything": 2.0, "<lambda>": 1.5}
    assert result.info["rubric"]["exact"] == 0.0


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda text: float("nan"), "finite number"),
        (lambda text: "good", "finite number"),
        (lambda text: None, "finite number"),
        (lambda text: 1 / 0, "raised ZeroDivisionError"),
        (lambda anser: 1.0, "did you mean 'answer'"),
    ],
)
def test_rubric_errors_are_errors_of_the_episode(function: Any, message: str) -> None:
    with pytest.raises(EnvError, match=message):
        say(started(SingleTurnEnv(ROWS, Rubric([function]))), "hi")


def test_rubric_weights_and_names() -> None:
    with pytest.raises(ValueError, match="one weight per function, got 1 for 2"):
        Rubric([exact, brief], weights=[1.0])
    assert list(Rubric([exact, exact]).funcs) == ["exact", "exact_2"]


def test_run_sync_works_inside_a_running_loop() -> None:
    async def inner() -> int:
        await asyncio.sleep(0.001)
        return 1

    async def outer() -> int:
        return run_sync(inner())

    assert asyncio.run(outer()) == 1
    with pytest.raises(RuntimeError, match="await the coroutine"):
        run_sync(outer())


# Rows


def test_rows_of_any_kind(tmp_path: Path) -> None:
    class Table:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"prompt": [{"role": "user", "content": f"row {index}"}], "info": {"n": index}}

    env = as_env(SingleTurnEnv(Table()), config=EnvConfig(), name="table")
    assert env.reset(env.make_task(1, "train")).messages[0].content.startswith("row ")
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in ROWS) + "\n\n")
    env = as_env(SingleTurnEnv(str(file)), config=EnvConfig(), name="file")
    assert dict(env.make_task(1, "train").payload) in ROWS
    file.write_text('{"prompt": "a"}\nbroken\n')
    with pytest.raises(EnvError, match="line 2 cannot be read"):
        SingleTurnEnv(file)
    for bad, message in (
        ("nowhere.jsonl", "no data set at"),
        ([], "empty"),
        (5, "got int"),
        ({"a": 1}, "got dict"),
    ):
        with pytest.raises(EnvError, match=message):
            SingleTurnEnv(bad)


@given(st.lists(st.integers(0, 50), min_size=2, max_size=60), st.floats(0.05, 0.9))
@examples(60)
def test_no_prompt_is_in_both_splits_and_none_is_lost(values: list[int], share: float) -> None:
    rows = [{"question": str(value), "index": index} for index, value in enumerate(values)]
    splits = RowSplits(rows, val_fraction=share, name="x")._divided()
    train = {rows[index]["question"] for index in splits["train"]}
    val = {rows[index]["question"] for index in splits["val"]}
    assert not train & val
    assert len(splits["train"]) + len(splits["val"]) == len(rows)
    assert train
    assert val or len(set(values)) == 1


def test_large_data_sets_are_divided_without_reading_them_whole() -> None:
    class Huge:
        reads = 0

        def __len__(self) -> int:
            return 10**7

        def __getitem__(self, index: int) -> dict[str, Any]:
            self.reads += 1
            return {"question": f"q{index}"}

    huge = Huge()
    splits = RowSplits(huge, val_fraction=0.1, name="x")
    train = {splits.draw(seed, "train")["question"] for seed in range(100)}
    assert not train & {splits.draw(seed, "val")["question"] for seed in range(100)}
    assert huge.reads < 3000


def test_one_row_is_for_training() -> None:
    env = as_env(SingleTurnEnv([{"prompt": "hi"}]), config=EnvConfig(), name="one")
    assert env.make_task(0, "train").payload == {"prompt": "hi"}
    with pytest.raises(EnvError, match="eval_dataset"):
        env.make_task(0, "val")
    both = as_env(
        SingleTurnEnv([{"prompt": "a"}], eval_dataset=[{"prompt": "b"}]),
        config=EnvConfig(),
        name="two",
    )
    assert [both.make_task(5, split).payload["prompt"] for split in ("train", "val")] == ["a", "b"]


# Tools


def add(a: int, b: int = 1) -> int:
    """Adds two numbers.

    Args:
        a: the first
        b (int): the second,
            or one more
    """
    return a + b


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_schemas_come_from_signatures_and_docstrings() -> None:
    def search(
        query: str,
        unit: Literal["km", "mi"],
        tags: list[str] | None = None,
        title: str = "x",
        schema: bool = False,
    ) -> str:
        """Finds places.

        :param query: what to look for
        """
        return query

    schema = ToolEnv([add, search], ROWS).oai_tools
    assert schema[0] == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "the first"},
                    "b": {
                        "type": "integer",
                        "default": 1,
                        "description": "the second, or one more",
                    },
                },
                "required": ["a"],
            },
        },
    }
    parameters = schema[1]["function"]["parameters"]
    assert set(parameters["properties"]) == {"query", "unit", "tags", "title", "schema"}
    assert parameters["required"] == ["query", "unit"]
    assert parameters["properties"]["unit"]["enum"] == ["km", "mi"]
    assert parameters["properties"]["query"]["description"] == "what to look for"
    assert read_docstring("") == ("", {})


def test_tools_answer_until_a_reply_without_calls() -> None:
    env = started(ToolEnv([add], ROWS, Rubric([lambda text: float(text == "5")])))
    result = say(env, "let me see " + call("add", a=2, b=3) + call("add", a="4"))
    assert [(m.role, m.content, m.name, m.tool_call_id) for m in result.messages] == [
        ("tool", "5", "add", "call_0"),
        ("tool", "5", "add", "call_1"),
    ]
    parsed = ToolCall(id="x1", name="add", arguments='{"a": 10}')
    assert say(env, "", tool_calls=(parsed,)).messages[0].to_json() == {
        "role": "tool",
        "content": "11",
        "tool_call_id": "x1",
        "name": "add",
    }
    last = say(env, "5")
    assert (last.terminated, last.reward) == (True, 1.0)


def test_the_opening_shows_the_tools() -> None:
    env = as_env(
        ToolEnv([add], ROWS, describe_tools=True, tool_role="user"),
        config=EnvConfig(),
        name="tools",
    )
    opening = env.reset(env.make_task(0, "train"))
    assert opening.tools[0]["function"]["name"] == "add"
    assert "Adds two numbers." in opening.messages[0].content
    assert say(env, call("add", a=1)).messages[0].to_json() == {"role": "user", "content": "2"}


def test_errors_of_tools_go_back_to_the_model() -> None:
    def fails(x: str) -> str:
        raise KeyError(x)

    def leaves() -> None:
        raise SystemExit(3)

    async def slow() -> str:
        await asyncio.sleep(30)
        return "late"

    def chatty() -> str:
        return "x" * 10_000

    env = ToolEnv([add, fails, leaves, slow, chatty], ROWS, tool_timeout=600.0)
    texts = {
        call("add", a="x"): "error: add: a: Input should be a valid integer",
        call("add"): "error: add: a: Field required",
        call("add", a=1, c=2): "error: add: c: Extra inputs",
        call("fails", x="k"): "error: fails raised KeyError: 'k'",
        call("leaves"): "error: leaves raised SystemExit: 3",
        call("slow"): "error: slow took longer than 0.05 seconds",
        call("missing"): "error: no tool is called 'missing'; there are add",
        call("chatty"): "x" * 20 + " [cut]",
        "<tool_call>add(1)</tool_call>": "error: a call is a JSON object",
        "<tool_call>[1]</tool_call>": "error: a call is a JSON object",
        "<tool_call>" + "[" * 100_000 + "</tool_call>": "error: a call is a JSON object",
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call>': "error: add: the arguments must be a JSON object",
        '<tool_call>{"name": "add", "arguments": "{"}</tool_call>': "error: add: the arguments must be a JSON object",
    }
    for text, expected in texts.items():
        env.max_result_chars = 20 if "chatty" in text else 500
        env.tool_timeout = 0.05 if "slow" in text else 600.0
        result = say(started(env), text)
        assert result.messages[0].content.startswith(expected)
        assert not result.done


def test_a_flood_of_calls_is_bounded_and_parsed_quickly() -> None:
    env = started(ToolEnv([add], ROWS, max_calls_per_turn=2))
    contents = [message.content for message in say(env, call("add", a=1) * 4).messages]
    assert contents[:2] == ["2", "2"]
    assert contents[2].startswith("error: not run")
    start = time.process_time()
    for unit in ("<tool_call>", "</tool_call>", "<tool_call>{", "{"):
        parse_tool_calls(unit * (10_000_000 // len(unit)))
    assert time.process_time() - start < 1.0


def test_tools_that_cannot_be_called_by_name_are_refused() -> None:
    def many(*values: int) -> int:
        return sum(values)

    with pytest.raises(ValueError, match="cannot be passed by name"):
        make_tool(many)
    with pytest.raises(ValueError, match="function with a name"):
        make_tool(lambda x: x)
    with pytest.raises(ValueError, match="two tools"):
        ToolEnv([add, add], ROWS)


@given(st.text(max_size=200))
@examples(100)
def test_any_arguments_are_answered(text: str) -> None:
    assert isinstance(run_tool(make_tool(add), text, timeout=None), str)
    parse_tool_calls(text)
