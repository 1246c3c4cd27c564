"""Records passed between the parts of a rollout: env_outputs -> lm_inputs -> lm_outputs ->
env_inputs -> env_outputs.

They are never modified. They are not frozen dataclasses because those are slower to create, and
every turn creates three.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

from turnwise.generate.base import Session
from turnwise.types import Completion, Episode, Json


class HistoryEntry(TypedDict, total=False):
    """One state, with the reply and its result after it was played."""

    state: str
    """The environment's text."""
    messages: list[dict[str, Json]]
    """The environment's messages, of which `state` is the text."""
    actions_left: int | None
    """Turns that are left."""
    llm_response: str
    """The model's reply, unchanged."""
    actions: list[str]
    """The actions that the environment parsed."""
    reward: float
    info: dict[str, Json]
    rewritten: dict[str, Json]
    """The whole conversation from this state on, where the environment rewrote it."""


class EnvOutput(TypedDict):
    """The state of one environment of a rollout, as a plain dictionary."""

    env_id: int
    episode_id: str
    seed: int
    """Keys the episode's tokens."""
    tools: list[dict[str, Json]]
    """Tool schemas for the chat template."""
    group_id: int
    tag: str
    history: list[HistoryEntry]
    penalty: float
    """Sum of the format penalties so far. They are part of the turns' rewards; this copy is for
    display and filters."""
    done: bool
    status: str | None
    episode: Episode | None
    """The episode with its tokens, once it is over."""


@dataclass(kw_only=True, slots=True)
class LmInput:
    """One environment's request to the generator."""

    env_id: int
    session: Session
    new_ids: tuple[int, ...]
    """Ids that the session does not hold yet."""
    restart: bool
    """True: new_ids are the whole context, in a new session."""
    stale: Session | None
    """The session that the restart replaces, to be released."""
    max_tokens: int
    """Tokens for the reply: the smaller of the limit per reply and the rest of the context."""
    context_bound: bool
    """True if the context, not the limit per reply, bounds max_tokens."""
    prefix: tuple[int, ...] = ()
    """Ids that a new session must hold first, where it continues a conversation that was left."""
    parent: int | None = None
    """The turn that this one continues, where that is not the previous one."""


@dataclass(kw_only=True, slots=True)
class LmOutput:
    """The generator's answer."""

    env_id: int
    completion: Completion
    seconds: float = 0.0
    start: float | None = None
    """When the reply was asked for, by `time.time`."""


@dataclass(kw_only=True, slots=True)
class EnvInput:
    """One environment's input: the reply as text, with its sampled tokens."""

    env_id: int
    text: str
    completion: Completion
    prompt_ids: tuple[int, ...]
    restart: bool
    context_full: bool
    """True if the reply filled the context: no further turn fits."""
    seconds: float = 0.0
    start: float | None = None
    """When the reply was asked for, by `time.time`."""
    parent: int | None = None
    """The turn that this one continues, where that is not the previous one."""
    trained: bool = True
    """False: the reply is shown and never learned."""
    decode: Callable[[Sequence[int]], str] | None = field(default=None, compare=False, repr=False)
    """The text of ids, for environments that tell a program the log-prob of every token."""
