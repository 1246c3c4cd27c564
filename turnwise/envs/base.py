"""What an environment is: the internal protocol, and the base class that users write against."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from random import Random
from typing import Any, Literal, Protocol, runtime_checkable

from turnwise.types import Json, Message, Observation, StepResult, Task


class EnvError(RuntimeError):
    """An environment broke its contract. The episode ends as `env_error`."""


class EnvTimeoutError(EnvError):
    """The environment did not answer in time. The episode ends as `env_timeout`."""


class EnvBusyError(EnvError):
    """All places of a shared environment are taken; there may be one later."""


@runtime_checkable
class Env(Protocol):
    """The one protocol that rollouts speak. `turnwise.envs.adapters.as_env` makes any supported object into one."""

    @property
    def max_turns(self) -> int | None:
        """The environment's own limit on turns; 1 marks a single-turn environment, None is no limit."""
        ...

    def make_task(self, seed: int, split: str) -> Task:
        """The problem instance that this seed stands for. Those of different splits are disjoint."""
        ...

    def reset(self, task: Task, noise_seed: int = 0) -> Observation:
        """The opening messages. The task decides the initial state; `noise_seed` only the noise of later steps."""
        ...

    def step(self, message: Message) -> StepResult:
        """The answer to one assistant message. Raises EnvError when the episode is already over."""
        ...

    def finish(self) -> StepResult:
        """Called once instead of another step when the rollout cuts the episode (turns or tokens): the reward that
        is only known at the end, such as a rubric's score. It has no messages and is never terminated."""
        ...

    def close(self) -> None:
        """Releases everything. May be called twice."""
        ...


EnvFactory = Callable[[], Env]
Hint = Literal["random", "expert", "actions"]


@runtime_checkable
class GivesHints(Protocol):
    """An environment that can say what a player might do now."""

    def hint(self, what: Hint, seed: int) -> Json:
        """random: a legal reply in the asked form. expert: the best reply. actions: the legal actions, as a list.
        None where the environment does not know."""
        ...


def hint_of(env: Env, what: Hint, seed: int) -> Json:
    """The environment's hint, None where it gives none."""
    return env.hint(what, seed) if isinstance(env, GivesHints) else None


@runtime_checkable
class SharedEnv(Env, Protocol):
    """An environment on another machine, with a limited number of places that others want too."""

    url: str
    wait: float
    """Seconds to wait for a place."""

    @property
    def max_sessions(self) -> int: ...


class BaseEnv(ABC):
    """Base class for environments in the style of `reset` and `step`.

    A subclass returns text. How the model must phrase its actions, what a badly formed reply costs and how many
    actions fit into a turn is not its business: `FormatConfig` and envs/text_turns.py see to that.

    Example:
        >>> class Coin(BaseEnv):
        ...     instruction = "Guess the coin."
        ...     actions = ("heads", "tails")
        ...     def reset(self, seed=None, **kwargs):
        ...         self.side = ("heads", "tails")[(seed or 0) % 2]
        ...         return "The coin is covered."
        ...     def step(self, action):
        ...         return "It was " + self.side, float(action == self.side), True, {"success": action == self.side}
        >>> env = Coin()
        >>> env.reset(seed=1), env.step("tails")[1]
        ('The coin is covered.', 1.0)
    """

    instruction: str = ""
    """What the model is told once, in the system message. An instance may set its own."""
    actions: tuple[str, ...] = ()
    """The actions that are legal now, where they are few; empty where any text is an action. An instance whose legal
    actions depend on the state sets them in `reset` and `step`."""
    max_turns: int | None = None
    """1 marks a single-turn environment."""

    expert: str = "expert"
    """What `expert_action` does, in a word or two, for tables."""

    @abstractmethod
    def reset(self, seed: int | None = None, **kwargs: Any) -> Any:
        """The first observation, or (observation, info). The same seed and arguments give the same state.

        An environment with noise of its own takes `noise_seed` as a keyword: it differs between the members of a
        group, while `seed` is shared. One that must keep its instances of "train" and "val" apart takes `split`.
        """

    @abstractmethod
    def step(self, action: str) -> Any:
        """(observation, reward, done, info), or Gymnasium's (observation, reward, terminated, truncated, info)."""

    def render(self) -> str:
        """The state as text, for `turnwise play`. Defaults to nothing beyond the observation."""
        return ""

    def state_key(self) -> str | None:
        """Names the current state for algorithms that compare turns from the same state. None: the observation."""
        return None

    def potential(self) -> float | None:
        """A potential for reward shaping, or None where the environment has none."""
        return None

    def random_action(self, rng: Random) -> str | None:
        """A random legal action in the current state, for warm starts and `check_env`; None where it knows none."""
        return rng.choice(self.actions) if self.actions else None

    def expert_action(self) -> str | None:
        """The best action in the current state, for the upper line of a comparison; None where it is not known."""
        return None

    def close(self) -> None:  # noqa: B027 - optional to override
        """Releases everything. May be called twice."""
