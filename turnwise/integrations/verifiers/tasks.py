"""How a task of verifiers 0.4 is played in this process: verifiers' rollout, trace and scoring; turnwise's replies."""

import asyncio
import inspect
import json
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import httpx
import verifiers.v1 as vf
from verifiers.v1.clients.client import Client
from verifiers.v1.interception import InterceptionServer
from verifiers.v1.runtimes import ProgramResult
from verifiers.v1.types import Response

from turnwise.envs.tools.calls import Tool, make_tool, run_tool, tool_calls
from turnwise.integrations.verifiers.environments import TasksetEnv
from turnwise.integrations.verifiers.exchange import CutError, Exchange, Outcome
from turnwise.procs.coroutines import resolve
from turnwise.types import Json, Message, Task

MODEL = "policy"


class ExchangeClient(Client):
    """Answers the requests of every rollout with the exchange that plays it."""

    def __init__(self) -> None:
        self.exchanges: dict[str, Exchange] = {}

    async def get_response(
        self, dialect: Any, body: dict[str, Any], sampling: Any, session_id: str | None = None, **_: Any
    ) -> Response:
        assert session_id is not None
        messages = [_message(message) for message in body["messages"]]
        said = await self.exchanges[session_id].ask(messages, list(body.get("tools") or ()))
        raw = completion_json(said, MODEL)
        response = dialect.parse_response(dialect.validate_response(raw))
        response.raw = raw
        return response


class ExchangeServer(InterceptionServer):
    """verifiers' interception server, whose model is the exchange."""

    def __init__(self, client: ExchangeClient) -> None:
        super().__init__()
        self._exchange_client = client

    def _client(self, config: Any) -> Client:
        return self._exchange_client


class InProcessHarness(vf.Harness):
    """The chat loop of a rollout, in this process: asks the model, runs tools, asks the user."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    def __init__(self, config: Any, env: TasksetEnv) -> None:
        super().__init__(config)
        self._env = env

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: Mapping[str, str],
        data: Any,
        *_: Any,
        **__: Any,
    ) -> ProgramResult:
        if mcp_urls:
            raise NotImplementedError(
                f"tool servers ({', '.join(mcp_urls)}) run as processes of their own; pass the tools as functions: "
                "TasksetEnv(taskset, tools=[..])"
            )
        tools = bound_tools(self._env.functions, trace)
        messages = self._opening(data)
        body: dict[str, Any] = {"model": ctx.model, "messages": messages}
        if tools:
            body["tools"] = [dict(tool.schema) for tool in tools.values()]
        async with httpx.AsyncClient(timeout=None) as http:
            while True:
                headers = {"Authorization": f"Bearer {secret}"}
                reply = await http.post(f"{endpoint}/chat/completions", headers=headers, json=body)
                if reply.status_code != 200:  # a stop condition, a limit, or the end that the rollout asked for
                    return ProgramResult(exit_code=0, stdout="", stderr=reply.text)
                said = reply.json()["choices"][0]["message"]
                messages.append(said)
                answers = await self._answers(tools, said) or await self._user_says(messages, data)
                if not answers:
                    return ProgramResult(exit_code=0, stdout="", stderr="")
                messages.extend(answers)

    def _opening(self, data: Any) -> list[dict[str, Json]]:
        system, prompt = self.resolve_prompt(data)
        opening: list[dict[str, Json]] = [] if system is None else [{"role": "system", "content": system}]
        if isinstance(prompt, str):
            return [*opening, {"role": "user", "content": prompt}]
        return [*opening, *(_message(message.model_dump(exclude_none=True)) for message in prompt or ())]

    async def _answers(self, tools: Mapping[str, Any], said: Mapping[str, Any]) -> list[dict[str, Json]]:
        answers: list[dict[str, Json]] = []
        for call in said.get("tool_calls") or ():
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            text = await asyncio.to_thread(answer_call, tools, name, arguments)
            answers.append({"role": "tool", "tool_call_id": call["id"], "name": name, "content": text})
        return answers

    async def _user_says(self, messages: Sequence[Mapping[str, Json]], data: Any) -> list[dict[str, Json]]:
        if self._env.user is None:
            return []
        text = self._env.user(list(messages), data)
        if inspect.isawaitable(text):
            text = await text
        return [] if text is None else [{"role": "user", "content": str(text)}]


class TaskPlayer:
    """Plays the tasks of one taskset, all of them through one interception server."""

    def __init__(self, env: TasksetEnv, tasks: Sequence[Any]) -> None:
        self._env = env
        self._tasks = tasks
        self._client = ExchangeClient()
        self._agent: Any = None
        self._starting: asyncio.Lock | None = None

    def play(self, task: Task) -> Callable[[Exchange], Coroutine[Any, Any, Outcome]]:
        async def run(exchange: Exchange) -> Outcome:
            agent = await self._ready()

            def register(trace: Any) -> None:
                self._client.exchanges[trace.id] = exchange

            trace = await agent.run(self._tasks[task.payload["task_index"]], on_trace=register)
            self._client.exchanges.pop(trace.id, None)
            return _outcome(trace)

        return run

    async def _ready(self) -> Any:
        if self._starting is None:
            self._starting = asyncio.Lock()
        async with self._starting:
            if self._agent is None:
                server = ExchangeServer(self._client)
                await server.__aenter__()
                config = vf.AgentConfig(
                    harness={"id": "null"},
                    runtime=vf.SubprocessConfig(),
                    model=MODEL,
                    max_turns=self._env.max_turns,
                )
                agent = vf.make_agent(config, interception=server)
                agent.harness = InProcessHarness(agent.harness.config, self._env)
                self._agent = agent
        return self._agent


def _outcome(trace: Any) -> Outcome:
    branch = trace.branches[-1] if trace.branches else None
    messages = [] if branch is None else [_message(m.model_dump(exclude_none=True)) for m in branch.messages]
    error = trace.last_error
    cut = error is not None and CutError.__name__ in f"{error.type} {error.message}"
    parts = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
    return Outcome(
        reward=trace.reward,
        parts=parts,
        metrics={name: float(value) for name, value in trace.metrics.items() if value is not None},
        error=None if trace.ok or cut else str(error.message if error is not None else "it failed"),
        truncated=cut or trace.stop_condition == "max_turns",
        messages=messages,
    )


def _message(data: Mapping[str, Any]) -> dict[str, Json]:
    """A message as a request or a trace has it, in OpenAI's shape with text as content."""
    content = data.get("content")
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content if part.get("type") == "text")
    found = {**data, "content": content or ""}
    found["tool_calls"] = [
        {
            "id": call["id"],
            "type": "function",
            "function": call.get("function") or {"name": call["name"], "arguments": call["arguments"]},
        }
        for call in data.get("tool_calls") or ()
    ]
    if not found["tool_calls"]:
        del found["tool_calls"]
    return Message.from_json(found).to_json()


def bound_tools(functions: Sequence[Callable[..., Any]], trace: Any) -> dict[str, Tool]:
    """The tools of one episode; those that name `trace` first get it."""
    found: dict[str, Tool] = {}
    for function in functions:
        names = list(inspect.signature(function).parameters)
        tool = make_tool(_with_trace(function, trace) if names[:1] == ["trace"] else function)
        found[tool.name] = tool
    return found


def _with_trace(function: Callable[..., Any], trace: Any) -> Callable[..., Any]:
    def call(**arguments: Any) -> Any:
        return resolve(function(trace, **arguments))

    signature = inspect.signature(function)
    call.__name__ = function.__name__
    call.__doc__ = function.__doc__
    call.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])
    return call


def answer_call(tools: Mapping[str, Tool], name: str, arguments: str) -> str:
    """What a tool says to a call, errors included."""
    if name not in tools:
        return f"error: no tool is called {name[:80]!r}; there are {', '.join(tools) or 'none'}"
    return run_tool(tools[name], arguments, timeout=None)


def completion_json(message: Message, model: str) -> dict[str, Json]:
    """A reply as an OpenAI-compatible server would send it."""
    calls = [call.to_json() for call in tool_calls(message)]
    said: dict[str, Json] = {"role": "assistant", "content": message.content}
    if calls:
        said["tool_calls"] = calls
    choice = {"index": 0, "message": said, "finish_reason": "tool_calls" if calls else "stop"}
    usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    return json.loads(
        json.dumps(
            {
                "id": "turnwise",
                "object": "chat.completion",
                "created": 0,
                "model": model,
                "choices": [choice],
                "usage": usage,
            }
        )
    )
