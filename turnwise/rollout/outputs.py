"""What travels between the parts of a rollout: env_outputs -> lm_inputs -> lm_outputs -> env_inputs -> env_outputs.

Nobody changes these records. They are not frozen because every turn makes three, and a frozen one takes longer to make.
"""

from dataclasses import dataclass
from typing import TypedDict

from turnwise.generate.base import Session
from turnwise.types import Completion, Json


class HistoryEntry(TypedDict, total=False):
    """One state and, once it was played from, what came of it."""

    state: str
    """The environment's text."""
    messages: list[dict[str, Json]]
    """The environment's messages, of which `state` is the text."""
    actions_left: int | None
    """Turns that are left."""
    llm_response: str
    """What the model said, as it said it."""
    actions: list[str]
    """What the environment understood."""
    reward: float
    info: dict[str, Json]


class EnvOutput(TypedDict):
    """The state of one environment of a rollout, as a plain dictionary."""

    env_id: int
    group_id: int
    tag: str
    history: list[HistoryEntry]
    penalty: float
    """Sum of the format penalties so far. They are part of the turns' rewards; this is for people and filters."""
    done: bool
    status: str | None


@dataclass(kw_only=True, slots=True)
class LmInput:
    """What one environment asks of the generator."""

    env_id: int
    session: Session
    new_ids: tuple[int, ...]
    """Ids that the session does not hold yet."""
    restart: bool
    """True: new_ids are the whole context, in a new session."""
    stale: Session | None
    """The session that the restart replaces, to be released."""
    max_tokens: int
    """Room for the reply: at most the limit per reply, and what is left of the context."""
    context_bound: bool
    """True where the context, not the limit per reply, bounds max_tokens."""


@dataclass(kw_only=True, slots=True)
class LmOutput:
    """What the generator answered."""

    env_id: int
    completion: Completion
    seconds: float = 0.0


@dataclass(kw_only=True, slots=True)
class EnvInput:
    """What one environment is given: the reply as text, and the tokens that it really was."""

    env_id: int
    text: str
    completion: Completion
    prompt_ids: tuple[int, ...]
    restart: bool
    context_full: bool
    """True where the reply used up the context: no further turn fits."""
    seconds: float = 0.0
