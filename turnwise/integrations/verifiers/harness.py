# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
"""The chat loop of a rollout of verifiers 0.4, in this process: asks the model, runs its tools,
asks the user."""

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import httpx
import verifiers.v1 as vf
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.runtimes import ProgramResult

from turnwise.envs.base import EnvError
from turnwise.envs.tools.calls import Tool, make_tool, run_tool
from turnwise.integrations.verifiers.environments import TasksetEnv
from turnwise.integrations.verifiers.exchange import text_only
from turnwise.procs.coroutines import resolve
from turnwise.types import Json, Message

SHELL_SECONDS = 60.0
SHELL_CHARS = 16_000
"""Characters that the model reads of what a command printed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tools:
    """The tools of one segment of a conversation."""

    schemas: list[dict[str, Json]]
    run: Mapping[str, Callable[[str], Awaitable[str]]]
    """By name: from the arguments, as the model wrote them, to what the tool says."""


class ChatHarness(vf.Harness[Any]):
    """Plays a task as a conversation. Tools are those of the taskset, run as verifiers runs them
    (servers of their own), the functions of the TasksetEnv, and a shell where it is asked for."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    SUPPORTS_TOOL_INTERCEPTION = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    def __init__(self, config: Any, env: TasksetEnv, *, shell: bool) -> None:
        super().__init__(config)
        self._env = env
        self._shell = shell

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: Mapping[str, str],
        data: Any,
        tool_interception_url: str | None = None,
    ) -> ProgramResult:
        messages = self._opening(data)
        headers = {"Authorization": f"Bearer {secret}"}
        async with (
            AsyncExitStack() as stack,
            httpx.AsyncClient(timeout=None, headers=headers) as http,
        ):
            tools = await self._tools(trace, runtime, mcp_urls, stack)
            body: dict[str, Any] = {"model": ctx.model, "messages": messages}
            if tools.schemas:
                body["tools"] = tools.schemas
            while True:
                reply = await http.post(f"{endpoint}/chat/completions", json=body)
                # A stop condition, a limit, or the end that the rollout asked for.
                if reply.status_code != 200:
                    return ProgramResult(exit_code=0, stdout="", stderr=reply.text)
                said = reply.json()["choices"][0]["message"]
                messages.append(said)
                answers = [
                    await self._answer(call, tools, http, tool_interception_url)
                    for call in said.get("tool_calls") or ()
                ]
                answers = answers or await self._user_says(messages, data)
                if not answers:
                    return ProgramResult(exit_code=0, stdout="", stderr="")
                messages.extend(answers)

    def _opening(self, data: Any) -> list[dict[str, Json]]:
        system, prompt = self.resolve_prompt(data)
        opening: list[dict[str, Json]] = (
            [] if system is None else [{"role": "system", "content": system}]
        )
        if isinstance(prompt, str):
            return [*opening, {"role": "user", "content": prompt}]
        return [*opening, *(plain_message(message) for message in prompt or ())]

    async def _tools(
        self, trace: Any, runtime: Any, urls: Mapping[str, str], stack: AsyncExitStack
    ) -> _Tools:
        own = bound_tools(self._env.functions, trace)
        schemas = [dict(tool.schema) for tool in own.values()]
        run = {name: _in_thread(tool) for name, tool in own.items()}
        if self._shell:
            shell = make_tool(_shell(runtime))
            schemas.append(dict(shell.schema))
            run[shell.name] = _in_thread(shell)
        if urls:
            servers = {"mcpServers": {name: {"url": url} for name, url in urls.items()}}
            found, dispatch, live = await connect_mcp(servers, stack, set(run))
            schemas += found
            run |= {name: _on_server(live, dispatch, name) for name in dispatch}
        return _Tools(schemas=schemas, run=run)

    async def _answer(
        self, call: Mapping[str, Any], tools: _Tools, http: httpx.AsyncClient, gate: str | None
    ) -> dict[str, Json]:
        """The result of a tool call, or that of the task's hook in its place."""
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        answer = {"role": "tool", "tool_call_id": call["id"], "name": name}
        if gate is not None:
            asked = {"tool_call_id": call["id"], "name": name, "arguments": _object(arguments)}
            verdict = (await http.post(gate, json=asked)).raise_for_status().json()
            if verdict["action"] == "deny":
                return {**answer, "content": str(verdict["message"].get("content", ""))}
        if name not in tools.run:
            there = ", ".join(tools.run) or "none"
            text = f"error: no tool is called {name[:80]!r}; there are {there}"
        else:
            text = await tools.run[name](arguments)
        return {**answer, "content": text}

    async def _user_says(
        self, messages: Sequence[Mapping[str, Json]], data: Any
    ) -> list[dict[str, Json]]:
        if self._env.user is None:
            return []
        text = self._env.user(list(messages), data)
        if inspect.isawaitable(text):
            text = await text
        return [] if text is None else [{"role": "user", "content": str(text)}]


def plain_message(message: Any) -> dict[str, Json]:
    """A message of verifiers (an object, or as a request has it) in OpenAI's shape, with text as
    its content."""
    data = message if isinstance(message, Mapping) else message.model_dump(exclude_none=True)
    found = {**data, "content": text_only(data.get("content"), where=f"a {data['role']} message")}
    found["tool_calls"] = [
        {
            "id": call["id"],
            "type": "function",
            "function": call.get("function")
            or {"name": call["name"], "arguments": call["arguments"]},
        }
        for call in data.get("tool_calls") or ()
    ]
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


def _in_thread(tool: Tool) -> Callable[[str], Awaitable[str]]:
    async def run(arguments: str) -> str:
        return await asyncio.to_thread(run_tool, tool, arguments, timeout=None)

    return run


def _on_server(live: Any, dispatch: Any, name: str) -> Callable[[str], Awaitable[str]]:
    async def run(arguments: str) -> str:
        given = _object(arguments)
        if not isinstance(given, dict):
            return f"error: the arguments of {name} must be a JSON object, got {arguments[:200]!r}"
        said = await call_mcp(live, dispatch, name, given)
        return text_only(said, where=f"what the tool {name} says")

    return run


def _object(arguments: str) -> Json:
    """The arguments as JSON, or as text where they are none."""
    try:
        return json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments


def _shell(runtime: Any) -> Callable[..., Any]:
    async def bash(command: str) -> str:
        """Runs a shell command and returns what it printed.

        Args:
            command: the command
        """
        try:
            async with asyncio.timeout(SHELL_SECONDS):
                done = await runtime.run(["bash", "-c", command], {})
        except TimeoutError:
            return f"error: not over after {SHELL_SECONDS:g} s"
        said = f"{done.stdout}{done.stderr}"
        return said[-SHELL_CHARS:] or f"exit code {done.exit_code}, nothing printed"

    return bash


def refuse_images(task: Any, *, name: str) -> None:
    """Raises EnvError where the task's prompt is more than text."""
    prompt = task.data.prompt
    for message in prompt if isinstance(prompt, list) else ():
        try:
            plain_message(message)
        except EnvError as error:
            raise EnvError(f"{name}: task {task.data.idx}: {error}") from None
