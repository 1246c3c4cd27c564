"""A class in the style of TRL's `environment_factory`, played by turnwise: its public methods are
the tools."""

import inspect
from collections.abc import Mapping
from typing import Any

from turnwise.envs.base import EnvError
from turnwise.envs.data_rows import prompt_messages
from turnwise.envs.gate import ask, read_reward
from turnwise.envs.tools.calls import Tool, make_tool, run_tool, tool_calls
from turnwise.procs.coroutines import resolve
from turnwise.types import Json, Message, Observation, StepResult, Task

WHICH = "environment"
"""The column that says which of several classes plays a row."""
_NOT_TOOLS = ("reset", "get_reward", "close")


class FactoryTurns:
    """One instance of the class per episode, behind turnwise's protocol.

    `reset(**row)` may return text, which is added to the last user message; every other public
    method is a tool; the optional `get_reward()` scores the episode. Unlike in TRL, an attribute
    `done` that becomes true ends the episode. Of several classes by name, the row's column
    `environment` says which.

    Args:
        instances: where the episode's object is left for reward functions, by noise seed.

    Example:
        >>> class Guess:
        ...     def reset(self, target=7, **row):
        ...         self.target, self.done = target, False
        ...         return "Guess a number."
        ...     def guess(self, number: int) -> str:
        ...         '''Guess.'''
        ...         self.done = number == self.target
        ...         return "right" if self.done else "wrong"
        ...     def get_reward(self):
        ...         return float(self.done)
        >>> env = FactoryTurns(Guess, name="guess")
        >>> env.reset(Task(id="t", seed=0, payload={"target": 3})).messages[0].content
        'Guess a number.'
        >>> call = '<tool_call>{"name": "guess", "arguments": {"number": 3}}</tool_call>'
        >>> result = env.step(Message(role="assistant", content=call))
        >>> result.reward, result.terminated, result.messages[0].content
        (1.0, True, 'right')
    """

    def __init__(
        self,
        cls: type | Mapping[str, type],
        *,
        name: str,
        tool_timeout: float | None = None,
        instances: dict[int, object] | None = None,
    ) -> None:
        self._classes = cls
        self._name = name
        self._timeout = tool_timeout
        self._instances = instances
        self._env: Any = None
        self._tools: dict[str, Tool] = {}
        limits = {_limit(one) for one in (cls.values() if isinstance(cls, Mapping) else [cls])}
        if len(limits) != 1:
            raise EnvError(f"{name}: all classes need the same max_turns, got {limits or 'none'}")
        (self.max_turns,) = limits

    def make_task(self, seed: int, split: str) -> Task:
        return Task(
            id=f"{self._name}/{split}/{seed}", seed=seed, payload={"seed": seed}, split=split
        )

    def reset(self, task: Task, noise_seed: int = 0) -> Observation:
        row = dict(task.payload)
        self._env = self._call("the constructor", self._choose(row))
        if self._instances is not None and noise_seed:  # 0: a look at the opening, no episode
            self._instances[noise_seed] = self._env
        self._tools = {tool.name: tool for tool in map(make_tool, _public_methods(self._env))}
        text = self._call("reset", self._env.reset, **_known(self._env.reset, row))
        opening = [
            Message.from_json(message) for message in prompt_messages(task.payload, name=self._name)
        ]
        if text is not None:
            last = (
                opening.pop()
                if opening and opening[-1].role == "user"
                else Message(role="user", content="")
            )
            opening.append(Message(role="user", content=last.content + str(text)))
        if not opening:
            raise EnvError(
                f"{self._name}: there is nothing to begin with; give rows with a prompt, or return "
                "text"
            )
        return Observation(
            messages=tuple(opening), tools=tuple(tool.schema for tool in self._tools.values())
        )

    def step(self, message: Message) -> StepResult:
        if self._env is None:
            raise EnvError(f"{self._name}: step needs a running episode; call reset first")
        calls = tool_calls(message)
        replies = tuple(
            Message(
                role="tool",
                content=self._answer(call.name, call.arguments),
                tool_call_id=call.id,
                name=call.name,
            )
            for call in calls
        )
        done = not calls or bool(getattr(self._env, "done", False))
        reward = self._reward() if done else 0.0
        return StepResult(
            messages=replies,
            reward=reward,
            terminated=done,
            action=", ".join(call.name for call in calls) or message.content,
            reward_parts={"env": reward},
        )

    def finish(self) -> StepResult:
        reward = self._reward()
        return StepResult(messages=(), reward=reward, truncated=True, reward_parts={"env": reward})

    def close(self) -> None:
        env, self._env = self._env, None
        close = getattr(env, "close", None)
        if callable(close):
            self._call("close", close)

    def _choose(self, row: dict[str, Json]) -> type:
        if not isinstance(self._classes, Mapping):
            return self._classes
        which = str(row.pop(WHICH, None))
        if which not in self._classes:
            raise EnvError(
                f"{self._name}: the row's column {WHICH!r} is one of {', '.join(self._classes)}, "
                f"got {which}"
            )
        return self._classes[which]

    def _answer(self, name: str, arguments: str) -> str:
        if name not in self._tools:
            return f"error: no tool is called {name[:80]!r}; there are {', '.join(self._tools)}"
        return run_tool(self._tools[name], arguments, timeout=self._timeout)

    def _reward(self) -> float:
        score = getattr(self._env, "get_reward", None)
        if not callable(score):
            return 0.0
        return read_reward(
            self._call("get_reward", score), name=self._name, what="what get_reward returns"
        )

    def _call(self, what: str, function: Any, **keywords: Any) -> Any:
        return ask(f"{self._name}: {what}", lambda: resolve(function(**keywords)))


def _limit(cls: object) -> int | None:
    name = getattr(cls, "__name__", str(cls))
    if not inspect.isclass(cls) or not callable(getattr(cls, "reset", None)):
        raise EnvError(
            f"{name} is no environment: a class needs reset, and either step or methods that are "
            "tools"
        )
    return getattr(cls, "max_turns", None)


def _public_methods(env: object) -> list[Any]:
    found = inspect.getmembers(type(env), predicate=inspect.isfunction)
    return [
        getattr(env, name)
        for name, _ in found
        if not name.startswith("_") and name not in _NOT_TOOLS
    ]


def _known(function: Any, row: Mapping[str, Json]) -> dict[str, Json]:
    """The row's columns that the function takes; all of them where it takes any."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(row)
    return {key: value for key, value in row.items() if key in parameters}
