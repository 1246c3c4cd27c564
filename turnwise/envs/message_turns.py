"""Adapts a message-style environment to the internal protocol: keeps the conversation, calls the
environment, checks, scores."""

import copy
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, cast

from turnwise.config.schema import EnvConfig
from turnwise.envs.base import EnvError, Hint
from turnwise.envs.data_rows import prompt_messages, row_key
from turnwise.envs.gate import ask, read_json, read_messages, read_reward, read_text
from turnwise.envs.messages import Messages, MultiTurnEnv, State
from turnwise.envs.shaping import shaping_parts
from turnwise.envs.validate import check_playing
from turnwise.procs.coroutines import resolve
from turnwise.types import Json, Message, Observation, StepResult, Task


class MessageTurns:
    """Adapts a MultiTurnEnv, SingleTurnEnv or ToolEnv to the protocol. The rubric's score is added
    to the last turn.

    User code gets copies of the conversation, so it cannot change it.
    """

    def __init__(self, env: MultiTurnEnv, *, config: EnvConfig, name: str) -> None:
        if config.max_actions_per_episode is not None:
            raise ValueError(
                f"{name}: max_actions_per_episode counts actions, message-style environments have "
                "none; use max_turn"
            )
        self.env = env
        self.config = config
        self.name = name
        self._phase = (
            "new"  # new -> playing -> over; failed after an EnvError, until the next reset
        )
        self._messages: Messages = []
        self._state: State = {}
        self._row: Mapping[str, Json] = {}
        self._closed = False

    @property
    def max_turns(self) -> int | None:
        own = 1 if self.config.single_turn else self.env.max_turns
        limits = [limit for limit in (own, self.config.max_turn) if limit is not None]
        return min(limits, default=None)

    def make_task(self, seed: int, split: str) -> Task:
        row = self._draw(seed, split)
        # Two seeds may draw one row of a data set: that is one task, and evaluation counts it once.
        stored = row and type(self.env).make_row is MultiTurnEnv.make_row
        name = row_key(row) if stored else seed
        return Task(id=f"{self.name}/{split}/{name}", seed=seed, payload=row, split=split)

    def reset(self, task: Task, noise_seed: int = 0) -> Observation:
        self._phase, self._closed, self._row = (
            "failed",
            False,
            task.payload or self._call("make_row", task.seed, task.split),
        )
        opening = prompt_messages(self._row, name=self.name)
        system = (
            self.env.system_prompt
            if self.config.system_prompt is None
            else self.config.system_prompt
        )
        if system is not None and not (opening and opening[0].get("role") == "system"):
            opening = [{"role": "system", "content": system}, *opening]
        messages = read_messages(opening, where=f"{self.name}: the prompt")
        if not messages:
            raise EnvError(
                f"{self.name}: there is no opening message; give a dataset, a system_prompt or "
                "a make_row"
            )
        self._messages = [message.to_json() for message in messages]
        self._state = {
            "prompt": copy.deepcopy(self._messages),
            "completion": [],
            "answer": self._row.get("answer"),
            "info": self._row.get("info") or {},
            "task": self._row.get("task", self.name),
            "turn": 0,
            "seed": task.seed,
            "noise_seed": noise_seed,
        }
        state = self._call("setup_state", self._state)
        self._state = self._state if state is None else self._read_state(state)
        self._phase = "playing"
        return Observation(messages=messages, tools=tuple(self.env.oai_tools))

    def step(self, message: Message) -> StepResult:
        check_playing(self._phase, name=self.name)
        self._phase = "failed"
        self._append([message])
        self._state["turn"] += 1
        done = self._call("is_completed", copy.deepcopy(self._messages), self._state)
        terminated = bool(done)
        truncated = (
            not terminated and self.max_turns is not None and self._state["turn"] >= self.max_turns
        )
        reply: tuple[Message, ...] = ()
        if not terminated and not truncated:
            reply = self._ask_env()
            terminated = bool(self._state.get("done", False))
        turn_reward = self._state.pop("turn_reward", 0.0)
        parts = {"env": read_reward(turn_reward, name=self.name, what="state['turn_reward']")}
        info: dict[str, Json] = {}
        if terminated or truncated:
            info = self._score(parts)
        parts |= shaping_parts(parts, self.config.shaping, before=None, after=None, name=self.name)
        self._phase = "over" if terminated or truncated else "playing"
        return StepResult(
            messages=reply,
            reward=sum(parts.values()),
            terminated=terminated,
            truncated=truncated,
            action=message.content,
            reward_parts=parts,
            info=info,
        )

    def finish(self) -> StepResult:
        """The rubric's score of the conversation so far; empty if it was already scored."""
        if self._phase != "playing":
            return StepResult(messages=(), reward=0.0, truncated=True)
        self._phase = "failed"
        parts: dict[str, float] = {}
        info = self._score(parts)
        self._phase = "over"
        return StepResult(
            messages=(), reward=sum(parts.values()), truncated=True, reward_parts=parts, info=info
        )

    def hint(self, what: Hint, seed: int) -> Json:
        """The environment's `random_reply` or `expert_reply`; there is no list of
        actions, and no board."""
        if what in ("actions", "board") or self._phase != "playing":
            return None
        given = (copy.deepcopy(self._messages), self._state)
        if what == "expert":
            said = self._call("expert_reply", *given)
        else:
            said = self._call("random_reply", Random(seed), *given)
        return None if said is None else read_text(said, what=f"{self.name}: {what}_reply")

    def close(self) -> None:
        if not self._closed:
            self._closed, self._phase = True, "closed"
            self._call("close")

    def _draw(self, seed: int, split: str) -> dict[str, Json]:
        row = self._call("make_row", seed, split)
        if not isinstance(row, Mapping):
            raise EnvError(f"{self.name}: make_row must return a dict, got {type(row).__name__}")
        return cast(dict[str, Json], read_json(row, what=f"{self.name}: the row of make_row"))

    def _ask_env(self) -> tuple[Message, ...]:
        value = self._call("env_response", copy.deepcopy(self._messages), self._state)
        if isinstance(value, tuple) and len(cast(tuple[Any, ...], value)) == 2:
            raw, state = cast(tuple[Any, Any], value)
            self._state = self._read_state(state)
        else:
            raw = cast(Any, value)
        reply = read_messages(raw, where=f"{self.name}: env_response")
        if not reply and not self._state.get("done", False):
            raise EnvError(
                f"{self.name}: env_response returned no message, and the episode is not over"
            )
        self._append(reply)
        return reply

    def _append(self, messages: Sequence[Message]) -> None:
        for message in messages:
            self._messages.append(message.to_json())
            self._state["completion"].append(message.to_json())

    def _score(self, parts: dict[str, float]) -> dict[str, Json]:
        """Adds the rubric's parts to `parts`; returns the unweighted values for the info."""
        completion = copy.deepcopy(cast(Messages, self._state["completion"]))
        said = [message["content"] for message in completion if message["role"] == "assistant"]
        standard: dict[str, Any] = {
            "prompt": copy.deepcopy(self._state["prompt"]),
            "completion": completion,
            "messages": copy.deepcopy(self._messages),
            "text": said[-1] if said else "",
            "answer": self._state["answer"],
            "info": self._state["info"],
            "state": self._state,
            "task": self._state["task"],
            "parser": self.env.parser,
        }
        score = self.env.rubric.score({**self._row, **standard})
        for name, value in score.parts.items():
            parts[name] = parts.get(name, 0.0) + value
        info: dict[str, Json] = {"rubric": dict(score.values)} if score.values else {}
        if "success" in self._state:
            info["success"] = bool(self._state["success"])
        elif self.env.success is not None:
            info["success"] = score.values[self.env.success] >= 1.0
        return info

    def _call(self, method: str, *args: Any) -> Any:
        """The result of the environment's method. Any exception becomes an EnvError."""
        return ask(f"{self.name}: {method}", lambda: resolve(getattr(self.env, method)(*args)))

    def _read_state(self, state: Any) -> State:
        needed = ("prompt", "completion", "answer", "info", "task", "turn")
        if not isinstance(state, dict) or any(key not in state for key in needed):
            raise EnvError(
                f"{self.name}: the state is the dict that was passed in, with its keys, got "
                f"{type(cast(Any, state)).__name__}"
            )
        return cast(State, state)
