"""Agents of well-known frameworks, unmodified but for the base URL: each plays, and every token
that would be trained was sampled."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from agent_parts import agent_config, play

from turnwise.data.samples import contexts
from turnwise.evaluate.replay import replay_episodes
from turnwise.types import Status, Task

CALL = '<tool_call>{"name": "stock", "arguments": {"item": "figs"}}</tool_call>'


def twice_then_answer(session: Any, call: int) -> str:
    return "There are 3." if call % 3 == 2 else f"I ask. {CALL}"


def react_agent(task: Task, base_url: str) -> float:
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    @tool
    def stock(item: str) -> str:
        """How many of an item there are."""
        return f"3 {item}"

    model = ChatOpenAI(model="policy", base_url=base_url, api_key="x")  # pyright: ignore
    agent: Any = create_react_agent(model, [stock])
    answer = agent.invoke({"messages": [{"role": "user", "content": "How many figs?"}]})
    return float("3" in answer["messages"][-1].content)


def smol_agent(task: Task, base_url: str) -> float:
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    @tool
    def stock(item: str) -> str:
        """How many of an item there are.

        Args:
            item: what to count
        """
        return f"3 {item}"

    model = OpenAIServerModel("policy", api_base=base_url, api_key="x")
    agent = ToolCallingAgent(tools=[stock], model=model, max_steps=3, verbosity_level=0)
    agent.run("How many figs?")
    return 1.0


def sdk_agent(chat: bool) -> Any:
    async def run(task: Task, base_url: str) -> float:
        import agents
        import openai

        agents.set_tracing_disabled(True)

        @agents.function_tool
        def stock(item: str) -> str:
            """How many of an item there are."""
            return f"3 {item}"

        client = openai.AsyncOpenAI(base_url=base_url, api_key="x")
        kind = agents.OpenAIChatCompletionsModel if chat else agents.OpenAIResponsesModel
        model = kind(model="policy", openai_client=client)
        agent = agents.Agent(name="clerk", model=model, tools=[stock])
        found = await agents.Runner.run(agent, "How many figs?", max_turns=6)
        await client.close()
        return float("3" in found.final_output)

    return run


def lite_agent(task: Task, base_url: str) -> float:
    import litellm

    tool = {
        "type": "function",
        "function": {
            "name": "stock",
            "parameters": {"type": "object", "properties": {"item": {"type": "string"}}},
        },
    }
    messages: list[Any] = [{"role": "user", "content": "How many figs?"}]
    while True:
        answer: Any = litellm.completion(
            model="openai/policy", api_base=base_url, api_key="x", messages=messages, tools=[tool]
        )
        message = answer.choices[0].message
        messages.append(message.model_dump())
        if not message.tool_calls:
            return float("3" in message.content)
        for call in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "3 figs"})


@pytest.mark.parametrize(
    ("module", "program", "turns", "rows"),
    [
        ("langgraph", react_agent, 3, 1),
        ("agents", sdk_agent(True), 3, 1),
        ("agents", sdk_agent(False), 3, 1),
        ("litellm", lite_agent, 3, 1),
        # It writes its own account of a call into the history, so most calls are new contexts.
        ("smolagents", smol_agent, 4, 4),
    ],
    ids=["langgraph", "agents-chat", "agents-responses", "litellm", "smolagents"],
)
def test_frameworks_play_unmodified(module: str, program: Any, turns: int, rows: int) -> None:
    pytest.importorskip(module)
    limits = {"step_timeout": 600.0, "reset_timeout": 600.0}
    episodes, _ = play(program, twice_then_answer, groups=2, options={"slots": 1}, **limits)
    for episode in episodes:
        assert episode.status is Status.COMPLETED, episode.error
        assert episode.reward == 1.0
        assert len(episode.turns) == turns
        assert 1 <= len(contexts(episode.turns)) <= rows
    # The program runs again and hears the recorded replies.
    again = agent_config(program, options={"slots": 1}, **limits)
    assert replay_episodes([episodes[0]], again) == [None]


NODE = """
const url = process.env.OPENAI_BASE_URL;
const task = JSON.parse(process.env.TURNWISE_TASK);
const messages = [{role: "user", content: `Task ${task.seed % 10}`}];
for (let turn = 0; turn < 3; turn++) {
  const answer = await fetch(url + "/chat/completions", {
    method: "POST",
    headers: {"Content-Type": "application/json"},
    body: JSON.stringify({model: "policy", messages}),
  });
  const data = await answer.json();
  messages.push(data.choices[0].message, {role: "user", content: "And?"});
}
console.log("some output");
console.log(JSON.stringify({reward: 0.5, success: true}));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_a_program_in_another_language_plays(tmp_path: Path) -> None:
    script = tmp_path / "agent.mjs"
    script.write_text(NODE)
    episodes, _ = play(f"command:node {script}", groups=2, step_timeout=600, reset_timeout=600)
    for episode in episodes:
        assert episode.status is Status.COMPLETED, episode.error
        assert (episode.reward, episode.success, len(episode.turns)) == (0.5, True, 3)
        assert len(contexts(episode.turns)) == 1


OPENAI_NODE = """
import OpenAI from "openai";
const client = new OpenAI();
const messages = [{role: "user", content: "How many figs?"}];
const parameters = {type: "object", properties: {}};
const tools = [{type: "function", function: {name: "stock", parameters}}];
let message;
do {
  const stream = client.chat.completions.stream({model: "policy", messages, tools});
  message = (await stream.finalChatCompletion()).choices[0].message;
  messages.push(message);
  for (const call of message.tool_calls ?? [])
    messages.push({role: "tool", tool_call_id: call.id, content: "3 figs"});
} while (message.tool_calls?.length);
console.log(JSON.stringify({reward: message.content.includes("3") ? 1 : 0}));
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
def test_openais_client_for_node_plays(tmp_path: Path) -> None:
    (tmp_path / "agent.mjs").write_text(OPENAI_NODE)
    subprocess.run(["npm", "install", "--silent", "openai"], cwd=tmp_path, check=True)
    command = f"command:cd {tmp_path} && node agent.mjs"
    (episode,), _ = play(command, twice_then_answer, step_timeout=600, reset_timeout=600)
    assert episode.status is Status.COMPLETED, episode.error
    assert (episode.reward, len(episode.turns), len(contexts(episode.turns))) == (1.0, 3, 1)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("exit 3", "exit code 3"),
        ("echo nothing", "without calling the model"),
        ("echo '{\"reward\": 1}'", "without calling the model"),
        ("no-such-program-anywhere", "exit code 127"),
    ],
)
def test_commands_that_fail_are_a_status(command: str, words: str) -> None:
    (episode,), _ = play(f"command:{command}", step_timeout=600, reset_timeout=600)
    assert episode.status is Status.ENV_ERROR
    assert words in (episode.error or ""), episode.error


def test_the_token_of_workers_is_not_given_to_commands() -> None:
    (episode,), _ = play("command:env | grep -c '^TURNWISE_TOKEN='; exit 1", reset_timeout=600)
    assert json.loads((episode.error or "").rpartition(":")[2]) == 0
