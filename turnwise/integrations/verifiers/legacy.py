# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
"""Environments of verifiers 0.3.1 and before: their own loop plays the episode, their own rubric
scores it."""

import itertools
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

from turnwise.envs.base import EnvError
from turnwise.envs.gate import json_safe, read_reward
from turnwise.envs.tools.calls import tool_calls
from turnwise.integrations.verifiers.exchange import (
    CutError,
    Exchange,
    ExchangeTurns,
    Outcome,
    text_only,
)
from turnwise.integrations.verifiers.source import Source
from turnwise.procs.coroutines import run_sync
from turnwise.types import Episode, Json, Task, ToolCall

logger = logging.getLogger(__name__)
STATE = "verifiers_state"
"""In the `info` of an episode's last turn: which state its group is scored with."""


def legacy_source(env: Any) -> Source:
    """The source that an Environment is."""
    name = type(env).__name__
    texts = env.message_type == "completion"
    refuse_texts(env, name)
    own = {key for key, value in env.sampling_args.items() if value and (key, value) != ("n", 1)}
    if own:
        logger.warning(
            "%s: its sampling_args (%s) are not used; the trainer says how replies are drawn",
            name,
            ", ".join(sorted(own)),
        )
    limit = (
        env.max_turns
        if isinstance(getattr(env, "max_turns", None), int) and env.max_turns > 0
        else None
    )
    train = _plain_rows(env.get_dataset(), name)
    val = _plain_rows(env.get_eval_dataset(), name) if env.eval_dataset is not None else []
    player = _Player(env)
    return Source(
        factory=lambda: ExchangeTurns(player.play, name=name, limit=limit),
        rows={"train": train, "val": val},
        score_group=player.score_group if player.by_group else None,
        texts=texts,
    )


def refuse_texts(env: Any, name: str) -> None:
    """Raises EnvError for texts to continue in more than one piece, or beside conversations."""
    members = list(getattr(env, "env_map", {}).values())
    for member in members:
        if member.message_type != env.message_type:
            raise EnvError(
                f"{name}: its member {type(member).__name__} has message_type "
                f"{member.message_type!r}; texts to continue are no conversations: pass that "
                "environment by itself"
            )
    if env.message_type == "chat":
        return
    rules = [
        (env.message_type != "completion", f"has message_type {env.message_type!r}"),
        (bool(members), "is a group of environments"),
        (getattr(env, "max_turns", None) != 1, "may ask more than once"),
        (bool(env.tool_defs), "has tools"),
        (bool(env.rubric.has_group_rewards), "scores the members of a group together"),
    ]
    for broken, why in rules:
        if broken:
            raise EnvError(
                f"{name} {why}: a text to continue (message_type 'completion') is continued once, "
                "and scored by itself"
            )


def _plain_rows(dataset: Any, name: str) -> list[dict[str, Json]]:
    rows = [dict(row) for row in dataset]
    for row in rows:
        for message in row["prompt"] if isinstance(row.get("prompt"), list) else ():
            text_only(message.get("content"), where=f"{name}: a prompt of its data set")
    return rows


class _Player:
    """Plays the episodes of an environment. Where its rubric compares the members of a group, an
    episode ends without a reward, and `score_group` gives it one."""

    def __init__(self, env: Any) -> None:
        self._env = env
        self.by_group = bool(env.rubric.has_group_rewards)
        self._states: dict[int, Any] = {}
        self._tickets = itertools.count()

    def play(self, task: Task) -> Callable[[Exchange], Coroutine[Any, Any, Outcome]]:
        async def play(exchange: Exchange) -> Outcome:
            given = {"answer": "", "info": {}, "example_id": 0, **task.payload}
            client = _client(exchange, self._env)
            state = await self._env.rollout(given, client, "policy", {})
            if not self.by_group:
                await self._score([state])
            outcome = _outcome(state, type(self._env).__name__)
            if self.by_group and outcome.error is None:
                ticket = next(self._tickets)
                self._states[ticket] = state
                outcome = replace(outcome, reward=0.0, info={STATE: ticket})
            return outcome

        return play

    def score_group(self, episodes: Sequence[Episode]) -> list[Episode]:
        """The episodes of a group with the rewards that its rubric gives to them together."""
        states = [self._states.pop(episode.turns[-1].info[STATE]) for episode in episodes]
        run_sync(self._score(states))
        return [
            _with_reward(episode, state) for episode, state in zip(episodes, states, strict=True)
        ]

    async def _score(self, states: list[Any]) -> None:
        """Scores states as verifiers' own `generate` does. Its `score_rollout` would refuse a
        rubric without reward functions, whose rewards are 0 there."""
        rubric = self._env.rubric
        await (rubric.score_group if self._env.score_rollouts else rubric.dummy_score_group)(states)
        for state in states:
            await rubric.cleanup(state)


def _with_reward(episode: Episode, state: Any) -> Episode:
    last = episode.turns[-1]
    reward = read_reward(state["reward"], name=episode.tag, what="its reward")
    info = {**last.info, "metrics": _metrics(state)}
    del info[STATE]
    parts = {**last.reward_parts, "env": reward}
    turn = replace(last, reward=last.reward + reward, reward_parts=parts, info=info)
    return replace(episode, turns=(*episode.turns[:-1], turn))


def _outcome(state: Any, name: str) -> Outcome:
    error = state.get("error")
    said = [*state["prompt"], *(state["completion"] or [])]
    return Outcome(
        reward=state.get("reward"),
        parts={},
        metrics=_metrics(state),
        error=None if error is None else f"{type(error).__name__}: {error}",
        truncated=bool(state.get("is_truncated"))
        or state.get("stop_condition") == "max_turns_reached",
        messages=[openai_message(message, name) for message in said],
    )


def _metrics(state: Any) -> dict[str, float]:
    return {key: float(value) for key, value in (state.get("metrics") or {}).items()}


def _client(exchange: Exchange, env: Any) -> Any:
    """A client of verifiers that asks the exchange; the provider's side of it is never used."""
    from verifiers.legacy.clients.client import Client  # pyright: ignore[reportMissingImports]
    from verifiers.legacy.errors import OverlongPromptError  # pyright: ignore[reportMissingImports]
    from verifiers.legacy.types import Response, ResponseMessage  # pyright: ignore[reportMissingImports]
    from verifiers.legacy.types import ToolCall as LegacyCall  # pyright: ignore[reportMissingImports]

    name = type(env).__name__

    async def get_response(
        self: Any, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **_: Any
    ) -> Any:
        messages = [openai_message(message, name) for message in prompt]
        if env.message_type == "completion":
            messages = [{"role": "user", "content": joined(messages)}]
        try:
            said = await exchange.ask(messages, [_schema(tool) for tool in tools or ()])
        except CutError as error:
            raise OverlongPromptError(str(error)) from error
        calls = [
            LegacyCall(id=call.id, name=call.name, arguments=call.arguments)
            for call in tool_calls(said)
        ]
        reason = "tool_calls" if calls else "stop"
        answer = ResponseMessage(
            role="assistant",
            content=said.content,
            tool_calls=calls or None,
            finish_reason=reason,
            is_truncated=False,
        )
        return Response(id="turnwise", created=0, model=model, message=answer)

    unused = {name: _unused for name in Client.__abstractmethods__}
    return type("ExchangeClient", (Client,), {**unused, "get_response": get_response})(object())


async def _unused(self: Any, *args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("the exchange answers; no provider is asked")


def joined(messages: Sequence[Mapping[str, Any]]) -> str:
    """The text to continue that messages are, joined as verifiers' client for completions joins
    them.

    Example:
        >>> joined([{"role": "system", "content": "A tale."}, {"role": "user", "content": "Once"}])
        'A tale.\\n\\nOnce'
    """
    return "\n\n".join(message["content"] for message in messages)


def openai_message(message: Any, name: str) -> dict[str, Json]:
    """A message of verifiers in OpenAI's shape. A prompt that is a text is the user's."""
    data = dict(message) if isinstance(message, Mapping) else message.model_dump(exclude_none=True)
    calls = []
    for call in data.get("tool_calls") or ():
        function = call.get("function", call)
        calls.append(
            ToolCall(
                id=call["id"], name=function["name"], arguments=function["arguments"]
            ).to_json()
        )
    content = text_only(data.get("content"), where=f"{name}: a message of the {data['role']}")
    role = "user" if data["role"] == "text" else data["role"]
    found = {"role": role, "content": content, "tool_calls": calls}
    return {**found, **{key: data[key] for key in ("tool_call_id", "name") if data.get(key)}}


def _schema(tool: Any) -> dict[str, Json]:
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": json_safe(tool.parameters),
    }
    return {"type": "function", "function": function}
