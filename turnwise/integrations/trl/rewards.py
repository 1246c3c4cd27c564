"""Rewards as TRL asks for them: a function over the prompts and completions of a batch."""

import json
import logging
from collections.abc import Sequence
from typing import Any

from turnwise.envs.base import EnvError
from turnwise.integrations.trl.sources import ROW, EnvSource
from turnwise.types import Message

logger = logging.getLogger(__name__)


class EnvironmentRewardAdapter:
    """A single-turn environment as a TRL reward function: each completion is the one reply of its task.

    The environment gets the whole message, not a string; its score is that of an ordinary episode. Where it fails,
    the reward is None, which TRL leaves out of the baseline, and never zero. A batch of failures raises.

    Example:
        >>> from turnwise.envs.messages import Rubric, SingleTurnEnv
        >>> from turnwise.integrations.trl.sources import make_source
        >>> def exact(text, answer): return float(text == answer)
        >>> rows = [{"question": "1+1?", "answer": "2"}, {"question": "2+2?", "answer": "4"}]
        >>> env = SingleTurnEnv(rows, Rubric([exact]), val_fraction=0.0)
        >>> score = EnvironmentRewardAdapter(make_source(env))
        >>> reply = [{"role": "assistant", "content": "4"}]
        >>> score(prompts=[[], []], completions=[reply, reply], turnwise_row=[0, 1])
        [0.0, 1.0]
    """

    def __init__(self, source: EnvSource) -> None:
        self._source = source
        self._env = source.factory()
        self.__name__ = source.name  # TRL names the reward's columns after it

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], *, split: str = "train", **columns: Any
    ) -> list[float | None]:
        numbers = columns[ROW]
        splits = columns.get("turnwise_split") or [split] * len(numbers)
        rewards: list[float | None] = []
        first: EnvError | None = None
        for number, where, completion in zip(numbers, splits, completions, strict=True):
            try:
                rewards.append(self._score(where, number, completion))
            except EnvError as error:
                first = first or error
                rewards.append(None)
        failures = sum(reward is None for reward in rewards)
        if first is not None and failures == len(rewards):
            raise EnvError(f"none of the {failures} completions could be scored; first error: {first}")
        if first is not None:
            logger.warning("%d of %d completions could not be scored; first error: %s", failures, len(rewards), first)
        return rewards

    def _score(self, split: str, number: int, completion: Any) -> float:
        self._env.reset(self._source.task(split, number))
        result = self._env.step(as_message(completion))
        return result.reward if result.done else result.reward + self._env.finish().reward


def as_message(completion: Any) -> Message:
    """A completion of TRL (text, or a list with one message) as a message."""
    if isinstance(completion, str):
        return Message(role="assistant", content=completion)
    message = dict(completion[-1])
    if isinstance(message.get("content"), list):
        parts = [part.get("text", "") for part in message["content"] if part.get("type") == "text"]
        message["content"] = "".join(parts)
    calls = [dict(call) for call in message.get("tool_calls") or ()]
    for index, call in enumerate(calls):  # TRL parses arguments into dicts, and gives calls no id
        function = dict(call["function"])
        if not isinstance(function["arguments"], str):
            function["arguments"] = json.dumps(function["arguments"])
        calls[index] = {"id": call.get("id") or f"call_{index}", "type": "function", "function": function}
    if calls:
        message["tool_calls"] = calls
    return Message.from_json(message)


def environment_reward(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
    """What the environment paid for each episode; None where it failed."""
    return list(columns["turnwise_reward"])
