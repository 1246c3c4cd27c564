# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
"""How tasks of verifiers 0.4 are played in this process: verifiers' rollout, trace and scoring;
turnwise's replies."""

import asyncio
import atexit
import json
import logging
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from typing import Any, cast

import verifiers.v1 as vf
from verifiers.v1.clients import ModelContext
from verifiers.v1.clients.client import Client
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.interception import InterceptionServer
from verifiers.v1.mcp import serve_shared
from verifiers.v1.types import Response
from verifiers.v1.utils.compile import resolve_runtime_config, validate_pairing

from turnwise.envs.base import EnvError
from turnwise.envs.tools.calls import tool_calls
from turnwise.integrations.verifiers.environments import TasksetEnv
from turnwise.integrations.verifiers.exchange import (
    CutError,
    Exchange,
    ExchangeTurns,
    Outcome,
)
from turnwise.integrations.verifiers.harness import (
    ChatHarness,
    plain_message,
    refuse_images,
)
from turnwise.integrations.verifiers.packages import Cast, cast_of, policy_client
from turnwise.integrations.verifiers.source import Source
from turnwise.procs.coroutines import run_sync
from turnwise.types import Json, Message, Task

logger = logging.getLogger(__name__)
MODEL = "policy"
NUM_ENDLESS = 1024
"""Tasks taken from a taskset without end."""
RUNS_PER_EPISODE = 8
"""Rollouts that an Env of a package may have in one episode before its turns are cut."""


def taskset_source(env: TasksetEnv) -> Source:
    """The source that a taskset is: verifiers' own rollout and trace, with turnwise as its
    model."""
    roles = cast_of(env)
    name = type(env.taskset).__name__
    taskset = roles.taskset if roles.taskset.bounded else roles.taskset.take(NUM_ENDLESS)
    tasks = list(taskset)
    if not tasks:
        raise EnvError(f"{name} has no tasks")
    player = TaskPlayer(env, roles, tasks)
    for task in tasks:
        refuse_images(task, name=name)
        player.refuse(task, name=name)
    rows = [
        {"task_index": index, **({"prompt": text} if (text := task.data.prompt_text) else {})}
        for index, task in enumerate(tasks)
    ]
    limit = env.max_turns * (1 if roles.own is None else RUNS_PER_EPISODE)
    return Source(
        factory=lambda: ExchangeTurns(player.play, name=name, limit=limit),
        rows={"train": rows, "val": []},
        close=player.close,
    )


class ExchangeClient(Client):
    """Answers the requests of every rollout with the exchange that plays it."""

    def __init__(self) -> None:
        self.exchanges: dict[str, tuple[Exchange, dict[str, Json]]] = {}
        """By trace: the exchange, and what its questions say of the seat that asks."""
        self.errors: dict[str, EnvError] = {}
        """By trace: what could not be shown to the model."""

    async def get_response(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        dialect: Any,
        body: dict[str, Any],
        sampling: Any,
        session_id: str | None = None,
        **_: Any,
    ) -> Response:
        assert session_id is not None
        exchange, seat = self.exchanges[session_id]
        try:
            messages = [plain_message(message) for message in body["messages"]]
        except EnvError as error:
            self.errors[session_id] = error
            raise
        except KeyError:
            self.errors[session_id] = EnvError(
                f"its harness speaks {type(dialect).__name__}, and turnwise answers chat "
                "completions; TasksetEnv(.., harness='chat') plays it with turnwise's own loop"
            )
            raise
        said = await exchange.ask(messages, list(body.get("tools") or ()), seat)
        raw = completion_json(said, MODEL)
        response = dialect.parse_response(dialect.validate_response(raw))
        response.raw = raw
        return response


class ExchangeServer(InterceptionServer):
    """verifiers' interception server, whose model is the exchange."""

    def __init__(self, client: ExchangeClient, *, secrets: Sequence[str]) -> None:
        super().__init__(state_service_secrets=secrets)
        self._exchange_client = client

    def _client(self, config: Any) -> Client:
        ours = isinstance(config, TrainClientConfig)
        return self._exchange_client if ours else super()._client(config)


class TaskPlayer:
    """Plays the tasks of one taskset, all of them through one interception server, beside the tool
    servers that they share."""

    def __init__(self, env: TasksetEnv, roles: Cast, tasks: Sequence[Any]) -> None:
        self._env = env
        self._roles = roles
        self._tasks = tasks
        self._harnesses = {
            role: self._harness(role, vf.load_harness(spec.harness))
            for role, spec in roles.specs.items()
        }
        self._client = ExchangeClient()
        self._opened: asyncio.Future[tuple[Any, Any]] | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._closing: asyncio.Event | None = None

    def refuse(self, task: Any, *, name: str) -> None:
        """Raises EnvError where an agent cannot play this task here, as where it needs a
        container."""
        toolsets = [*task.toolsets(task.config), *self._toolsets()]
        for role, spec in self._roles.specs.items():
            try:
                runtime = resolve_runtime_config(spec.runtime, task, set())
                validate_pairing(self._harnesses[role], type(task), runtime, tools=toolsets)
            except ValueError as error:
                raise EnvError(f"{name} cannot be played here: {error}") from error

    def play(self, task: Task) -> Callable[[Exchange], Coroutine[Any, Any, Outcome]]:
        async def run(exchange: Exchange) -> Outcome:
            server, shared = await self._ready()
            traces: list[Any] = []

            def register(trace: Any) -> None:
                traces.append(trace)
                seat = {} if self._roles.own is None else _seat(trace, traces)
                self._client.exchanges[trace.id] = (exchange, seat)

            try:
                outcome = await self._run(
                    self._tasks[task.payload["task_index"]], server, shared, register, traces
                )
            finally:
                for trace in traces:
                    self._client.exchanges.pop(trace.id, None)
                errors = [self._client.errors.pop(trace.id, None) for trace in traces]
            for error in filter(None, errors):
                raise error
            return outcome

        return run

    async def _run(
        self, task: Any, server: Any, shared: Any, register: Any, traces: Sequence[Any]
    ) -> Outcome:
        if self._roles.own is None:
            agent = vf.make_agent(self._roles.specs["agent"], interception=server)
            agent.harness = self._harness("agent", agent.harness)
            return _outcome(await agent.run(task, tools=shared, on_trace=register))
        context = ModelContext(model=MODEL, client=policy_client())
        episode = await self._roles.own.run_episode(task, context, on_trace=register)
        return episode_outcome(episode, traces)

    def _harness(self, role: str, harness: Any) -> Any:
        """The role's harness: its package's, or the chat loop of this process."""
        kind = self._roles.kinds[role]
        if kind == "own":
            return harness
        return ChatHarness(harness.config, self._env, shell=kind == "bash")

    def _toolsets(self) -> list[Any]:
        taskset = self._roles.taskset
        return list(taskset.toolsets(taskset.config))

    async def _ready(self) -> tuple[Any, Any]:
        """(interception server, shared tool servers), started by the first episode."""
        if self._opened is None:
            self._opened = asyncio.get_running_loop().create_future()
            self._closing = asyncio.Event()
            self._keeper = asyncio.create_task(self._keep_open(self._opened, self._closing))
            atexit.register(self.close)
        return await asyncio.shield(self._opened)

    async def _keep_open(
        self, opened: "asyncio.Future[tuple[Any, Any]]", closing: asyncio.Event
    ) -> None:
        """Holds the servers, which one task must open and close."""
        own = self._roles.own
        try:
            async with AsyncExitStack() as stack:
                shared = await stack.enter_async_context(serve_shared(self._toolsets()))
                secrets = [tools.state_secret for tools in shared.values() if tools.state_secret]
                server = ExchangeServer(self._client, secrets=secrets)
                await stack.enter_async_context(server)
                if own is not None:
                    self._hand_over(own, server, shared)
                    stack.push_async_callback(own.stop)
                    await own.start()
                opened.set_result((server, shared))
                await closing.wait()
        except Exception as error:
            if opened.done():
                logger.warning("closing the servers of %s: %s", type(own).__name__, error)
            else:
                opened.set_exception(
                    EnvError(f"its servers did not start: {type(error).__name__}: {error}")
                )

    def _hand_over(self, own: Any, server: Any, shared: Any) -> None:
        """Gives a package's Env the servers, and its agents the harnesses, of this process."""
        own._interception, own._shared_tools = server, shared
        agents_of = type(own)._episode_agents

        def episode_agents(*args: Any, **kwargs: Any) -> Any:
            agents = agents_of(own, *args, **kwargs)
            for role in self._roles.specs:
                agent = getattr(agents, role)
                agent.harness = self._harness(role, agent.harness)
            return agents

        own._episode_agents = episode_agents

    def close(self) -> None:
        """Stops the servers. The next episode starts them again."""
        atexit.unregister(self.close)
        keeper, self._keeper, self._opened = self._keeper, None, None
        if keeper is not None and self._closing is not None:
            run_sync(_end(keeper, self._closing))


async def _end(keeper: "asyncio.Task[None]", closing: asyncio.Event) -> None:
    closing.set()
    await asyncio.wait({keeper}, timeout=10.0)


def episode_outcome(episode: Any, minted: Sequence[Any]) -> Outcome:
    """The outcome of the rollouts of a package's Env: the mean reward of its trained agents. Each
    agent's own reward stands in `info`, where there are several.

    Args:
        minted: all traces in the order in which they began.
    """
    errors = [*(error for trace in episode.traces for error in trace.errors), *episode.errors]
    trained = [trace for trace in episode.traces if trace.agent.trainable]
    if not episode.ok or not trained:
        why = "none of its agents is trained" if episode.ok else "it failed"
        said = why if not errors else f"{errors[-1].type}: {errors[-1].message}"
        return Outcome(reward=None, parts={}, metrics={}, error=said)
    if len(episode.traces) == 1:
        return _outcome(trained[0])
    metrics: dict[str, list[float]] = {}
    outcomes = [_outcome(trace) for trace in episode.traces]
    for trace, outcome in zip(episode.traces, outcomes, strict=True):
        for name, value in outcome.metrics.items():
            metrics.setdefault(f"{_seat(trace, minted)['seat']}/{name}", []).append(value)
    seats = [
        {**_seat(trace, minted), "reward": trace.reward, "trained": trace.agent.trainable}
        for trace in episode.traces
    ]
    return Outcome(
        reward=sum(trace.reward for trace in trained) / len(trained),
        parts={},
        metrics={name: sum(values) / len(values) for name, values in metrics.items()},
        truncated=any(outcome.truncated for outcome in outcomes),
        info={"seats": seats},
    )


def _seat(trace: Any, minted: Sequence[Any]) -> dict[str, Json]:
    """The agent's seat, and which of the episode's rollouts this is."""
    number = next(index for index, one in enumerate(minted) if one.id == trace.id)
    return {"seat": trace.agent.name or "agent", "trace": number}


def _outcome(trace: Any) -> Outcome:
    branch = trace.branches[-1] if trace.branches else None
    messages = [] if branch is None else [plain_message(m) for m in branch.messages]
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


def completion_json(message: Message, model: str) -> dict[str, Json]:
    """A reply as an OpenAI-compatible server would send it."""
    calls = [call.to_json() for call in tool_calls(message)]
    said: dict[str, Json] = {"role": "assistant", "content": message.content}
    if calls:
        said["tool_calls"] = calls
    choice = {"index": 0, "message": said, "finish_reason": "tool_calls" if calls else "stop"}
    usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    return cast(
        dict[str, Json],
        json.loads(
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
        ),
    )
