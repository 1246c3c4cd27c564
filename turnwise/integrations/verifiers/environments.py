"""Environments of verifiers behind turnwise's protocol: those of 0.3.1 and before, and the tasksets of 0.4.

verifiers drives its own conversations; `verifiers_exchange` turns them inside out, and `verifiers_tasks` has what the
tasks of 0.4 need in this process.
"""

import itertools
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from turnwise.envs.base import Env, EnvError
from turnwise.envs.tools.calls import tool_calls
from turnwise.envs.validate import json_safe
from turnwise.integrations.verifiers.exchange import CutError, Exchange, ExchangeTurns, Outcome
from turnwise.types import Json, Task, ToolCall

Rows = dict[str, Sequence[Mapping[str, Json]] | None]
Source = tuple[Callable[[], Env], Rows]
NUM_ENDLESS = 1024
"""Tasks taken from a taskset without end."""


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
    from turnwise.integrations.verifiers.tasks import TaskPlayer

    wrapped = env if isinstance(env, TasksetEnv) else TasksetEnv(env)
    taskset = wrapped.taskset if wrapped.taskset.bounded else wrapped.taskset.take(NUM_ENDLESS)
    tasks = list(itertools.islice(taskset, None))
    if not tasks:
        raise EnvError(f"{type(wrapped.taskset).__name__} has no tasks")
    player = TaskPlayer(wrapped, tasks)
    rows = [{"prompt": task.data.prompt_text, "task_index": index} for index, task in enumerate(tasks)]
    name = type(wrapped.taskset).__name__
    return (lambda: ExchangeTurns(player.play, name=name, limit=wrapped.max_turns)), {"train": rows, "val": []}
