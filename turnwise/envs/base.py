"""The environment interface: the internal protocol, and the base class for users."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from random import Random
from typing import Any, Literal, Protocol, TypeGuard, runtime_checkable

from turnwise.types import Json, Message, Observation, StepResult, Task


class EnvError(RuntimeError):
    """An environment broke its contract. The episode ends as `env_error`."""


class BadActionError(EnvError):
    """An action of the model that the environment cannot play. The model is told why, and the turn
    gets `format.format_penalty`. Raised by the `step` of a BaseEnv.

    Args:
        why: the message for the model.
        over: whether the episode ends.
        info: facts for metrics.
    """

    def __init__(
        self, why: str, *, over: bool = False, info: Mapping[str, Json] | None = None
    ) -> None:
        super().__init__(why)
        self.over, self.info = over, dict(info or {})


class EnvTimeoutError(EnvError):
    """The environment did not answer in time. The episode ends as `env_timeout`."""


class EnvBusyError(EnvError):
    """All places of a shared environment are taken. A later attempt may succeed."""


@runtime_checkable
class Env(Protocol):
    """The interface that rollouts use. `turnwise.envs.adapters.as_env` adapts any supported object
    to it."""

    @property
    def max_turns(self) -> int | None:
        """The environment's own limit on turns; 1 for a single-turn environment, None for no
        limit."""
        ...

    def make_task(self, seed: int, split: str) -> Task:
        """The problem instance of this seed. Instances of different splits are disjoint."""
        ...

    def reset(self, task: Task, noise_seed: int = 0) -> Observation:
        """The opening messages. The task decides the initial state; `noise_seed` only the noise of
        later steps."""
        ...

    def step(self, message: Message) -> StepResult:
        """The answer to one assistant message. Raises EnvError when the episode is already over."""
        ...

    def finish(self) -> StepResult:
        """Called once, instead of another step, when the rollout cuts the episode (turns or
        tokens). Returns the reward that is only known at the end, such as a rubric's score, without
        messages and not terminated."""
        ...

    def close(self) -> None:
        """Releases everything. May be called twice."""
        ...


@runtime_checkable
class WaitingEnv(Env, Protocol):
    """An environment that waits for others between its turns, such as a program that calls the
    model. Hundreds of them wait at once, without a thread for each."""

    def submit_reset(self, task: Task, noise_seed: int) -> Future[None]:
        """Done when somebody plays the task. That may take long: others are played before it."""
        ...

    def submit_opening(self) -> Future[Observation]:
        """The opening of the episode, once somebody plays it."""
        ...

    def mend(self) -> None:
        """Called now and then while a reset waits to be played.

        Raises:
            EnvError: nobody will ever play it.
        """
        ...

    def submit_step(self, message: Message, said: Any) -> Future[StepResult]: ...

    def submit_finish(self, why: "Cut") -> Future[StepResult]: ...

    def submit_end(self) -> Future[None]:
        """Ends the episode. The environment may be reset again."""
        ...


EnvFactory = Callable[[], Env]
Hint = Literal["random", "expert", "actions", "board"]
Cut = Literal["turns", "length"]
"""Why a rollout cuts an episode: its limit of turns, or of tokens."""


@runtime_checkable
class GivesHints(Protocol):
    """An environment that can suggest replies."""

    def hint(self, what: Hint, seed: int) -> Json:
        """random: a legal reply in the required format. expert: the best reply. actions: the list
        of legal actions. board: the state as text. None if the environment cannot tell."""
        ...


def hint_of(env: Env, what: Hint, seed: int) -> Json:
    """The environment's hint; None if it gives none."""
    return env.hint(what, seed) if isinstance(env, GivesHints) else None


@runtime_checkable
class SharedEnv(Env, Protocol):
    """An environment on another machine, with a limited number of places shared by all clients."""

    url: str
    wait: float
    """Seconds to wait for a place."""

    @property
    def max_sessions(self) -> int: ...


def is_shared(env: Env) -> TypeGuard[SharedEnv]:
    """True for a SharedEnv. Called twice per episode; `isinstance` with a protocol would check
    every attribute."""
    return hasattr(env, "max_sessions") and isinstance(env, SharedEnv)


class BaseEnv(ABC):
    """Base class for environments in the style of `reset` and `step`.

    A subclass returns text. The format of actions, the penalty for a malformed reply and the number
    of actions per turn are handled by `FormatConfig` and envs/text_turns.py.

    Example:
        >>> class Coin(BaseEnv):
        ...     instruction = "Guess the coin."
        ...     actions = ("heads", "tails")
        ...     def reset(self, seed=None, **kwargs):
        ...         self.side = ("heads", "tails")[(seed or 0) % 2]
        ...         return "The coin is covered."
        ...     def step(self, action):
        ...         won = action == self.side
        ...         return "It was " + self.side, float(won), True, {"success": won}
        >>> env = Coin()
        >>> env.reset(seed=1), env.step("tails")[1]
        ('The coin is covered.', 1.0)
    """

    instruction: str = ""
    """The instruction in the system message. An instance may set its own."""
    actions: tuple[str, ...] = ()
    """The actions that are legal now; empty if any text is an action. An instance whose legal
    actions depend on the state sets them in `reset` and `step`."""
    max_turns: int | None = None
    """1 for a single-turn environment."""

    expert: str = "expert"
    """A short description of `expert_action`, for tables."""

    @abstractmethod
    def reset(self, seed: int | None = None, **kwargs: Any) -> Any:
        """The first observation, or (observation, info). The same seed and arguments give the same
        state.

        An environment with its own noise takes `noise_seed` as a keyword: it differs between the
        members of a group, while `seed` is shared. An environment that must separate its instances
        of "train" and "val" takes `split`.
        """

    @abstractmethod
    def step(self, action: str) -> Any:
        """(observation, reward, done, info), or Gymnasium's (observation, reward, terminated,
        truncated, info). Raises BadActionError for an action that cannot be played."""

    def render(self) -> str:
        """The state as text, for `turnwise play` and the Play view of `turnwise inspect`: a board,
        where there is one. Default: empty."""
        return ""

    def state_key(self) -> str | None:
        """A key of the current state, for algorithms that compare turns from the same state. None:
        the observation."""
        return None

    def potential(self) -> float | None:
        """A potential for reward shaping, or None if the environment has none."""
        return None

    def random_action(self, rng: Random) -> str | None:
        """A random legal action in the current state, for warm starts and `check_env`; None if
        unknown."""
        return rng.choice(self.actions) if self.actions else None

    def expert_action(self) -> str | None:
        """The best action in the current state, as an upper bound in comparisons; None if
        unknown."""
        return None

    def expert_thought(self) -> str | None:
        """The thought before `expert_action`, for demonstrations where `format.think` asks for one;
        None for an empty one."""
        return None

    def close(self) -> None:  # noqa: B027 - optional to override
        """Releases everything. May be called twice."""
