"""Message-style environments: a data set of prompts, a rubric, and for several turns two methods,
or tools.

Messages are dicts in OpenAI's format. One object serves many episodes, one after the other; the
data of an episode is in its `state`.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any, Literal

from turnwise.envs.data_rows import RowSplits, load_rows
from turnwise.envs.rubric import Rubric
from turnwise.envs.tools.calls import Tool, make_tool, run_tool, tool_calls
from turnwise.envs.tools.sample import random_reply
from turnwise.types import Json, Message, ToolCall

Messages = list[dict[str, Json]]
State = dict[str, Any]


class MultiTurnEnv(ABC):
    """A conversation that `env_response` continues until `is_completed`. Both may be async.

    Example:
        >>> class Echo(MultiTurnEnv):
        ...     def is_completed(self, messages, state, **kwargs):
        ...         return len(messages) >= 4
        ...     def env_response(self, messages, state, **kwargs):
        ...         said = messages[-1]["content"]
        ...         return [{"role": "user", "content": "You said: " + said}], state
        >>> Echo(dataset=[{"prompt": "Say something."}]).make_row(0, "train")
        {'prompt': 'Say something.'}
    """

    oai_tools: list[dict[str, Json]]
    """Schemas of the tools; empty without tools."""
    expert: str = "expert"
    """A short description of `expert_reply`, for tables."""

    def __init__(
        self,
        dataset: Any = None,
        rubric: Rubric | None = None,
        system_prompt: str | None = None,
        *,
        max_turns: int | None = 10,
        eval_dataset: Any = None,
        val_fraction: float = 0.1,
        parser: Any = None,
        success: str | None = None,
    ) -> None:
        """`dataset` is a list of rows, an object with length and items, or a JSONL path; a row has
        a `prompt` (text or messages) or a `question`, and may have `answer` and `info`. With an
        `eval_dataset`, validation draws from that, otherwise from a share `val_fraction` of the
        rows. `max_turns` None or negative: no limit. `success` names the rubric function whose
        value of 1 or more is a success, if state["success"] is not set."""
        name = type(self).__name__
        self.rubric = rubric if rubric is not None else Rubric()
        self.system_prompt = system_prompt
        self.max_turns = None if max_turns is None or max_turns < 0 else max_turns
        self.parser = parser if parser is not None else self.rubric.parser
        self.oai_tools = []
        self._train: RowSplits | None = None
        self._val: RowSplits | None = None
        self.success = success
        if success is not None and success not in self.rubric.funcs:
            raise ValueError(
                "success names a function of the rubric "
                f"({', '.join(self.rubric.funcs) or 'none'}), got {success!r}"
            )
        if self.max_turns == 0:
            raise ValueError("max_turns is at least 1, got 0; None means no limit")
        if dataset is not None:
            share = 0.0 if eval_dataset is not None else val_fraction
            self._train = self._val = RowSplits(
                load_rows(dataset, name=name), val_fraction=share, name=name
            )
        if eval_dataset is not None:
            self._val = RowSplits(load_rows(eval_dataset, name=name), val_fraction=0.0, name=name)

    @abstractmethod
    def is_completed(self, messages: Messages, state: State, **kwargs: Any) -> Any:
        """True if the conversation is over. Called after every reply of the model."""

    @abstractmethod
    def env_response(self, messages: Messages, state: State, **kwargs: Any) -> Any:
        """(messages to append, state), or only the messages.

        `messages` is the whole conversation. A number in state["turn_reward"] is the reward of the
        last reply; a true state["done"] ends the episode after these messages; state["success"] is
        reported.
        """

    def random_reply(self, rng: Random, messages: Messages, state: State) -> str | None:
        """A random valid reply, for the random player, warm starts and `check_env`; None if
        unknown. With tools: a random call by schema."""
        return random_reply(self.oai_tools, messages, rng) if self.oai_tools else None

    def expert_reply(self, messages: Messages, state: State) -> str | None:
        """The best reply, as an upper bound in comparisons; None if unknown."""
        return None

    def setup_state(self, state: State) -> Any:
        """The state before the first turn; may be async. It has prompt, completion, answer, info,
        turn, seed."""
        return state

    def make_row(self, seed: int, split: str) -> Mapping[str, Json]:
        """The row of a seed. Override it to generate tasks; tasks of "train" and "val" must
        differ."""
        rows = self._train if split == "train" else self._val
        if rows is None:
            return {}
        return rows.draw(seed, "train" if rows is not self._train else split)

    def rows(self, split: str) -> list[dict[str, Json]] | None:
        """Every row of a split, for trainers that iterate over a data set; None if tasks are
        generated."""
        rows = self._train if split == "train" else self._val
        if rows is None or type(self).make_row is not MultiTurnEnv.make_row:
            return None
        return rows.all("train" if rows is not self._train else split)

    def close(self) -> None:  # noqa: B027 - optional to override
        """Releases everything. May be called twice."""


Environment = MultiTurnEnv
"""The base of every environment in message style, single-turn ones too."""


class SingleTurnEnv(MultiTurnEnv):
    """One prompt, one reply, scored by the rubric.

    Example:
        >>> def exact(text, answer): return float(answer in text)
        >>> env = SingleTurnEnv([{"question": "1+1?", "answer": "2"}], Rubric([exact]))
        >>> env.max_turns
        1
    """

    def __init__(
        self,
        dataset: Any = None,
        rubric: Rubric | None = None,
        system_prompt: str | None = None,
        *,
        eval_dataset: Any = None,
        val_fraction: float = 0.1,
        parser: Any = None,
        success: str | None = None,
    ) -> None:
        super().__init__(
            dataset,
            rubric,
            system_prompt,
            max_turns=1,
            eval_dataset=eval_dataset,
            val_fraction=val_fraction,
            parser=parser,
            success=success,
        )

    def is_completed(self, messages: Messages, state: State, **kwargs: Any) -> bool:
        return True

    def env_response(
        self, messages: Messages, state: State, **kwargs: Any
    ) -> tuple[Messages, State]:
        return [], state


class ToolEnv(MultiTurnEnv):
    """The model calls tools until it replies without a call; then the rubric scores the
    conversation.

    Calls are parsed fields of the message, or in its text as <tool_call>{"name": .., "arguments":
    {..}}</tool_call>.

    Example:
        >>> def double(x: int) -> int:
        ...     '''Doubles a number.'''
        ...     return 2 * x
        >>> env = ToolEnv(tools=[double], dataset=[{"prompt": "Twice 21?"}])
        >>> env.oai_tools[0]["function"]["name"]
        'double'
        >>> call = {"role": "assistant",
        ...     "content": '<tool_call>{"name": "double", "arguments": {"x": 21}}</tool_call>'}
        >>> env.env_response([call], {})[0][0]["content"]
        '42'
    """

    def __init__(
        self,
        tools: Sequence[Callable[..., Any]] = (),
        dataset: Any = None,
        rubric: Rubric | None = None,
        system_prompt: str | None = None,
        *,
        max_turns: int | None = 10,
        eval_dataset: Any = None,
        val_fraction: float = 0.1,
        parser: Any = None,
        success: str | None = None,
        tool_timeout: float | None = 30.0,
        max_calls_per_turn: int = 8,
        max_result_chars: int = 8000,
        tool_role: Literal["tool", "user"] = "tool",
        describe_tools: bool = False,
    ) -> None:
        """`tool_timeout` is in seconds per call. `tool_role` "user" is for chat templates without
        tool messages; `describe_tools` writes the schemas into the system prompt, for templates
        that do not show tools."""
        super().__init__(
            dataset,
            rubric,
            system_prompt,
            max_turns=max_turns,
            eval_dataset=eval_dataset,
            val_fraction=val_fraction,
            parser=parser,
            success=success,
        )
        self.tools: dict[str, Tool] = {}
        for tool in map(make_tool, tools):
            if tool.name in self.tools:
                raise ValueError(f"two tools have the name {tool.name!r}; names must differ")
            self.tools[tool.name] = tool
        self.oai_tools = [dict(tool.schema) for tool in self.tools.values()]
        self.tool_timeout, self.tool_role = tool_timeout, tool_role
        self.max_calls_per_turn, self.max_result_chars = max_calls_per_turn, max_result_chars
        if describe_tools:
            lines = [json.dumps(schema["function"]) for schema in self.oai_tools]
            how = (
                'Call a tool with <tool_call>{"name": "NAME", "arguments": {}}</tool_call>. Tools:'
            )
            self.system_prompt = "\n".join(
                [*([system_prompt] if system_prompt else []), how, *lines]
            )

    def is_completed(self, messages: Messages, state: State, **kwargs: Any) -> Any:
        return not tool_calls(Message.from_json(messages[-1]))

    def env_response(self, messages: Messages, state: State, **kwargs: Any) -> Any:
        calls = tool_calls(Message.from_json(messages[-1]))
        return [self._answer(call, index) for index, call in enumerate(calls)], state

    def _answer(self, call: ToolCall, index: int) -> dict[str, Any]:
        if index >= self.max_calls_per_turn:
            text = f"error: not run, a reply may hold {self.max_calls_per_turn} calls"
        elif call.name in self.tools:
            text = run_tool(self.tools[call.name], call.arguments, timeout=self.tool_timeout)
        elif call.name:
            text = f"error: no tool is called {call.name[:80]!r}; there are {', '.join(self.tools)}"
        else:
            text = 'error: a call is a JSON object like {"name": "NAME", "arguments": {}}'
        if len(text) > self.max_result_chars:
            text = text[: self.max_result_chars] + " [cut]"
        if self.tool_role == "user":
            return {"role": "user", "content": text}
        return {"role": "tool", "content": text, "tool_call_id": call.id, "name": call.name}
