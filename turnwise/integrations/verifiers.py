"""Environments of verifiers behind turnwise's protocol: those of 0.3.1 and before, and the tasksets of 0.4.

verifiers drives its own conversations and asks a client for every reply. Here the client asks turnwise: a conversation
becomes questions and answers (`Exchange`), so that AgentProxy plays it like any other environment. No model server is
needed, and the tokens are turnwise's own.
"""

import asyncio
import inspect
import itertools
import json
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turnwise.envs.aio import resolve, run_sync
from turnwise.envs.base import Env, EnvError
from turnwise.envs.tool_calls import Tool, make_tool, run_tool, tool_calls
from turnwise.envs.validate import json_safe, read_reward
from turnwise.types import Json, Message, Observation, StepResult, Task, ToolCall

Rows = dict[str, Sequence[Mapping[str, Json]] | None]
Source = tuple[Callable[[], Env], Rows]
NUM_ENDLESS = 1024
"""Tasks taken from a taskset without end."""


class CutError(Exception):
    """The rollout ended the conversation before the environment did."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What a conversation asks the model: everything said so far, and the tools on offer."""

    messages: list[dict[str, Json]]
    tools: list[dict[str, Json]]


class Exchange:
    """A coroutine that asks a model, turned inside out: every question is returned, every answer passed in.

    Example:
        >>> async def play(exchange):
        ...     first = await exchange.ask([{"role": "user", "content": "1+1?"}], [])
        ...     return first.content == "2"
        >>> exchange = Exchange(play)
        >>> exchange.start().messages[0]["content"]
        '1+1?'
        >>> exchange.answer(Message(role="assistant", content="2")) is None, exchange.result
        (True, True)
    """

    def __init__(self, play: "Callable[[Exchange], Coroutine[Any, Any, Any]]") -> None:
        self._play = play
        self._task: asyncio.Task[Any] | None = None
        self._questions: asyncio.Queue[Question] | None = None
        self._reply: asyncio.Future[Message] | None = None

    async def ask(self, messages: list[dict[str, Json]], tools: list[dict[str, Json]]) -> Message:
        """The model's reply. For the coroutine's side."""
        assert self._questions is not None
        self._reply = asyncio.get_running_loop().create_future()
        self._questions.put_nowait(Question(messages=messages, tools=tools))
        return await self._reply

    def start(self) -> Question | None:
        """The first question, or None where the coroutine ended without one."""
        return run_sync(self._start())

    def answer(self, message: Message) -> Question | None:
        """The next question, or None where the coroutine is over."""
        return run_sync(self._answer(message))

    def cut(self) -> None:
        """Answers the open question with CutError and waits for the end."""
        run_sync(self._answer(CutError("the rollout cut the episode")))

    def close(self) -> None:
        run_sync(self._cancel())

    @property
    def result(self) -> Any:
        """What the coroutine returned; raises what it raised."""
        assert self._task is not None
        return self._task.result()

    async def _start(self) -> Question | None:
        self._questions = asyncio.Queue()
        self._task = asyncio.create_task(self._play(self))
        return await self._next()

    async def _answer(self, reply: Message | Exception) -> Question | None:
        assert self._reply is not None
        if not self._reply.done():
            if isinstance(reply, Exception):
                self._reply.set_exception(reply)
            else:
                self._reply.set_result(reply)
        return await self._next()

    async def _next(self) -> Question | None:
        assert self._questions is not None
        assert self._task is not None
        question = asyncio.create_task(self._questions.get())
        await asyncio.wait({question, self._task}, return_when=asyncio.FIRST_COMPLETED)
        if question.done():
            return question.result()
        question.cancel()
        return None

    async def _cancel(self) -> None:
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=5.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a conversation came to."""

    reward: float | None
    parts: Mapping[str, float]
    metrics: Mapping[str, float]
    error: str | None = None
    truncated: bool = False
    messages: Sequence[Mapping[str, Json]] = ()
    """Everything that was said, from the first message on."""


class ExchangeTurns:
    """A conversation of verifiers behind the protocol. The reward is known at the end and counts for the last turn."""

    def __init__(
        self,
        play: Callable[[Task], Callable[[Exchange], Coroutine[Any, Any, Outcome]]],
        *,
        name: str,
        limit: int | None,
    ) -> None:
        self._play = play
        self._name = name
        self._exchange: Exchange | None = None
        self._known = 0  # messages that the model has seen, its own replies included
        self.max_turns = limit

    def make_task(self, seed: int, split: str) -> Task:
        raise EnvError(f"{self._name}: tasks are the rows of its data set; there are none for seeds")

    def reset(self, task: Task, noise_seed: int = 0) -> Observation:
        self.close()
        self._exchange = Exchange(self._play(task))
        question = self._call("setup", self._exchange.start)
        if question is None:
            outcome = self._outcome()
            raise EnvError(
                f"{self._name}: the episode ended before the model was asked ({outcome.error or 'no reason'})"
            )
        self._known = len(question.messages)
        return Observation(
            messages=tuple(Message.from_json(message) for message in question.messages), tools=tuple(question.tools)
        )

    def step(self, message: Message) -> StepResult:
        if self._exchange is None:
            raise EnvError(f"{self._name}: step needs a running episode; call reset first")
        exchange = self._exchange
        question = self._call("step", lambda: exchange.answer(message))
        if question is None:
            return self._end()
        if len(question.messages) <= self._known:
            raise EnvError(
                f"{self._name}: it rewrote the conversation ({len(question.messages)} messages after {self._known}); "
                "only environments that add to it can be trained on here"
            )
        new = tuple(Message.from_json(item) for item in question.messages[self._known + 1 :])
        self._known = len(question.messages)
        return StepResult(messages=new, reward=0.0, action=message.content)

    def finish(self) -> StepResult:
        if self._exchange is None:
            raise EnvError(f"{self._name}: finish needs a running episode; call reset first")
        self._call("finish", self._exchange.cut)
        result = self._end()
        return StepResult(
            messages=(), reward=result.reward, truncated=True, reward_parts=result.reward_parts, info=result.info
        )

    def close(self) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.close()

    def _end(self) -> StepResult:
        outcome = self._outcome()
        if outcome.error is not None:
            raise EnvError(f"{self._name}: {outcome.error}")
        reward = read_reward(outcome.reward, name=self._name, what="its reward")
        # What is added after the last reply, such as the last tool's answer, belongs to the record.
        last = [Message.from_json(item) for item in outcome.messages[self._known + 1 :]]
        return StepResult(
            messages=tuple(last),
            reward=reward,
            terminated=not outcome.truncated,
            truncated=outcome.truncated,
            reward_parts=dict(outcome.parts) or {"env": reward},
            info={"metrics": dict(outcome.metrics)},
        )

    def _outcome(self) -> Outcome:
        assert self._exchange is not None
        exchange = self._exchange
        return self._call("scoring", lambda: exchange.result)

    def _call(self, what: str, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except EnvError:
            raise
        except (Exception, SystemExit) as error:
            raise EnvError(f"{self._name}: {what} raised {type(error).__name__}: {error}") from error


def is_legacy_environment(env: object) -> bool:
    """True for an environment of verifiers 0.3.1 or before."""
    return _derives(env, "Environment")


def is_taskset(env: object) -> bool:
    """True for a taskset of verifiers 0.4, alone or with what plays it."""
    return isinstance(env, TasksetEnv) or _derives(env, "Taskset")


def _derives(env: object, name: str) -> bool:
    return any(cls.__name__ == name and cls.__module__.partition(".")[0] == "verifiers" for cls in type(env).__mro__)


# verifiers 0.3.1 and before


def legacy_source(env: Any) -> Source:
    """(factory, rows) of an Environment: its own loop plays the episode, its own rubric scores it."""
    limit = env.max_turns if isinstance(getattr(env, "max_turns", None), int) and env.max_turns > 0 else None
    rows: Rows = {"train": _plain_rows(env.get_dataset()), "val": None}
    rows["val"] = _plain_rows(env.get_eval_dataset()) if env.eval_dataset is not None else []
    name = type(env).__name__
    return (lambda: ExchangeTurns(lambda task: _legacy_play(env, task), name=name, limit=limit)), rows


def _plain_rows(dataset: Any) -> list[dict[str, Json]]:
    return [dict(row) for row in dataset]


def _legacy_play(env: Any, task: Task) -> Callable[[Exchange], Coroutine[Any, Any, Outcome]]:
    async def play(exchange: Exchange) -> Outcome:
        given = {"answer": "", "info": {}, "example_id": 0, **task.payload}
        state = await env._run_rollout_state(given, _legacy_client(exchange), "policy", {})
        error = state.get("error")
        return Outcome(
            reward=state["reward"],
            parts={},
            metrics={key: float(value) for key, value in (state.get("metrics") or {}).items()},
            error=None if error is None else f"{type(error).__name__}: {error}",
            truncated=bool(state.get("is_truncated")) or state.get("stop_condition") == "max_turns_reached",
            messages=[_openai(m) for m in [*state["prompt"], *(state["completion"] or [])]],
        )

    return play


def _legacy_client(exchange: Exchange) -> Any:
    """A client of verifiers that asks the exchange; the provider's side of it is never used."""
    from verifiers.legacy.clients.client import Client
    from verifiers.legacy.errors import OverlongPromptError
    from verifiers.legacy.types import Response, ResponseMessage
    from verifiers.legacy.types import ToolCall as LegacyCall

    async def get_response(self: Any, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **_: Any) -> Any:
        try:
            said = await exchange.ask([_openai(message) for message in prompt], [_schema(tool) for tool in tools or ()])
        except CutError as error:
            raise OverlongPromptError(str(error)) from error
        calls = [LegacyCall(id=call.id, name=call.name, arguments=call.arguments) for call in tool_calls(said)]
        reason = "tool_calls" if calls else "stop"
        answer = ResponseMessage(
            role="assistant", content=said.content, tool_calls=calls or None, finish_reason=reason, is_truncated=False
        )
        return Response(id="turnwise", created=0, model=model, message=answer)

    unused = {name: _unused for name in Client.__abstractmethods__}
    return type("ExchangeClient", (Client,), {**unused, "get_response": get_response})(object())


async def _unused(self: Any, *args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("the exchange answers; no provider is asked")


def _openai(message: Any) -> dict[str, Json]:
    """A message of verifiers in OpenAI's shape."""
    data = dict(message) if isinstance(message, Mapping) else message.model_dump(exclude_none=True)
    calls = []
    for call in data.get("tool_calls") or ():
        function = call.get("function", call)
        calls.append(ToolCall(id=call["id"], name=function["name"], arguments=function["arguments"]).to_json())
    content = data.get("content")
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content if part.get("type") == "text")
    found = {"role": data["role"], "content": content or "", "tool_calls": calls}
    return {**found, **{key: data[key] for key in ("tool_call_id", "name") if data.get(key)}}


def _schema(tool: Any) -> dict[str, Json]:
    function = {"name": tool.name, "description": tool.description, "parameters": json_safe(tool.parameters)}
    return {"type": "function", "function": function}


# verifiers 0.4


class TasksetEnv:
    """A taskset of verifiers 0.4 with what plays it in this process.

    Args:
        taskset: its tasks give the prompts, the stop conditions and the rewards.
        tools: functions that the model may call. A first parameter named `trace` is given the trace.
        user: what the user says to a reply without tool calls, from (messages, task data); None ends the episode.
            May be async. Without it, such a reply ends the episode.
        max_turns: replies per episode.
    """

    multi_turn = True

    def __init__(
        self,
        taskset: Any,
        *,
        tools: Sequence[Callable[..., Any]] = (),
        user: Callable[..., Any] | None = None,
        max_turns: int = 10,
    ) -> None:
        self.taskset = taskset
        self.functions = tuple(tools)
        self.user = user
        self.max_turns = max_turns


def taskset_source(env: Any) -> Source:
    """(factory, rows) of a taskset: verifiers' own rollout and trace, with turnwise as its model."""
    from turnwise.integrations.verifiers_tasks import TaskPlayer

    wrapped = env if isinstance(env, TasksetEnv) else TasksetEnv(env)
    taskset = wrapped.taskset if wrapped.taskset.bounded else wrapped.taskset.take(NUM_ENDLESS)
    tasks = list(itertools.islice(taskset, None))
    if not tasks:
        raise EnvError(f"{type(wrapped.taskset).__name__} has no tasks")
    player = TaskPlayer(wrapped, tasks)
    rows = [{"prompt": task.data.prompt_text, "task_index": index} for index, task in enumerate(tasks)]
    name = type(wrapped.taskset).__name__
    return (lambda: ExchangeTurns(player.play, name=name, limit=wrapped.max_turns)), {"train": rows, "val": []}


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
