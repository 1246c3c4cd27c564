# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
"""Reward functions in TRL's form: called with the prompts and completions of a batch."""

import inspect
import json
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from turnwise.envs.base import EnvError
from turnwise.envs.gate import admit_result
from turnwise.envs.messages import MultiTurnEnv
from turnwise.integrations.trl.sources import ROW, EnvSource, make_source
from turnwise.integrations.verifiers.environments import is_legacy_environment
from turnwise.types import Message

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)


class EnvironmentRewardAdapter:
    """A single-turn environment as a TRL reward function: each completion is the one reply of its
    task.

    The environment gets the whole message, not a string; its score is that of an ordinary episode.
    Where it fails, the reward is None, which TRL leaves out of the baseline, and never zero. A
    batch of failures raises.

    Example:
        >>> from turnwise.envs.messages import Rubric, SingleTurnEnv
        >>> def exact(text, answer): return float(text == answer)
        >>> rows = [{"question": "1+1?", "answer": "2"}, {"question": "2+2?", "answer": "4"}]
        >>> env = SingleTurnEnv(rows, Rubric([exact]), val_fraction=0.0)
        >>> score = EnvironmentRewardAdapter(env)
        >>> reply = [{"role": "assistant", "content": "4"}]
        >>> score(prompts=[[], []], completions=[reply, reply], turnwise_row=[0, 1])
        [0.0, 1.0]
    """

    def __init__(self, env: object) -> None:
        source = env if isinstance(env, EnvSource) else make_source(env)
        if source.score_group is not None:
            raise EnvError(
                f"{source.name} scores the episodes of a group together, and TRL's own rollout "
                "scores each by itself; leave out multi_turn=False"
            )
        self._source = source
        self._env = source.ask("making it", source.factory)
        self.__name__ = source.name  # TRL names the reward's columns after it

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        *,
        split: str = "train",
        **columns: Any,
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
            raise EnvError(
                f"none of the {failures} completions could be scored; first error: {first}"
            )
        if first is not None:
            logger.warning(
                "%d of %d completions could not be scored; first error: %s",
                failures,
                len(rewards),
                first,
            )
        return rewards

    def _score(self, split: str, number: int, completion: Any) -> float:
        source, env, said = self._source, self._env, as_message(completion)
        source.opening(env, split, number)
        result = source.ask("step", lambda: admit_result(env.step(said), name=source.name))
        if result.done:
            return result.reward
        last = source.ask("finish", lambda: admit_result(env.finish(), name=source.name))
        return result.reward + last.reward


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
        calls[index] = {
            "id": call.get("id") or f"call_{index}",
            "type": "function",
            "function": function,
        }
    if calls:
        message["tool_calls"] = calls
    return Message.from_json(message)


def environment_reward(
    prompts: Sequence[Any], completions: Sequence[Any], **columns: Any
) -> list[float | None]:
    """The environment's reward of each episode; None if it failed."""
    return list(columns["turnwise_reward"])


def with_environment(
    reward: Any, given: Any, classes: Any, weights: Sequence[float] | None
) -> tuple[list[Any], list[Any] | None]:
    """(reward functions, their tokenizers) with the environment's own first.

    Args:
        given: what GRPOTrainer takes as `reward_funcs`: one or a list of functions, models, or
            names of models.
        classes: what it takes as `reward_processing_classes`.
        weights: `reward_weights` of the config.
    """
    functions = [] if given is None else list(given) if isinstance(given, list | tuple) else [given]
    if weights is not None and len(weights) != 1 + len(functions):
        raise ValueError(
            f"reward_weights has {len(weights)} values for the environment's reward and "
            f"{len(functions)} reward_funcs; the first is the environment's"
        )
    if classes is None:
        return [reward, *functions], None
    classes = list(classes) if isinstance(classes, list | tuple) else [classes]
    if len(classes) != len(functions):
        raise ValueError(
            f"reward_processing_classes has {len(classes)} entries for {len(functions)} "
            "reward_funcs; the environment needs none"
        )
    return [reward, *functions], [None, *classes]


def lacks_reward(env: object) -> str | None:
    """Why an environment can give no reward but 0, None where it can."""
    name = env.__name__ if inspect.isclass(env) else type(env).__name__
    if isinstance(env, MultiTurnEnv):
        own = any(
            getattr(type(env), method).__module__ != MultiTurnEnv.__module__
            for method in ("is_completed", "env_response", "setup_state")
        )
        return None if own or env.rubric.funcs else f"{name} has no rubric"
    if is_legacy_environment(env):
        return None if scores(env) else f"the rubric of {name} has no reward function"
    classes = list(env.values()) if isinstance(env, Mapping) else [env]
    for cls in classes:
        if inspect.isclass(cls) and not hasattr(cls, "step") and not hasattr(cls, "get_reward"):
            return f"{cls.__name__} has no get_reward"
    return None


def scores(env: Any) -> bool:
    """True where an environment of verifiers up to 0.3.1 has a reward function that counts."""
    members = getattr(env, "env_map", {}).values()
    if members:
        return any(map(scores, members))
    rubrics = getattr(env.rubric, "rubrics", [env.rubric])
    return any(
        any(rubric._get_reward_weights())
        or not type(rubric).score_group.__module__.startswith("verifiers.")
        for rubric in rubrics
    )


def refuse_infinite(rewards: "Tensor", names: Sequence[str]) -> None:
    """Raises ValueError for a reward of inf [N, functions], which would make all advantages of its
    group NaN."""
    found = rewards.isinf().nonzero()
    if len(found):
        row, function = found[0].tolist()
        raise ValueError(
            f"the reward function {names[function]!r} returned {rewards[row, function].item()} for "
            f"completion {row} of {len(rewards)}; a reward is a finite number, or None for a "
            "completion that cannot be scored"
        )


def as_texts(prompts: Sequence[Any], completions: Sequence[Any]) -> tuple[list[str], list[str]]:
    """Prompts and completions as text, for reward functions whose data set has text: what the user
    said last, and all that the model said.

    Example:
        >>> reply = [{"role": "assistant", "content": "4"}, {"role": "user", "content": "Sure?"},
        ...          {"role": "assistant", "content": "Yes."}]
        >>> as_texts([[{"role": "user", "content": "2+2?"}]], [reply])
        (['2+2?'], ['4\\nYes.'])
    """
    return [_said(prompt, "user")[-1] for prompt in prompts], [
        "\n".join(_said(completion, "assistant")) for completion in completions
    ]


def _said(messages: Any, role: str) -> list[str]:
    if isinstance(messages, str):
        return [messages]
    said = [as_message([message]).content for message in messages if message["role"] == role]
    return said or [""]
