"""Adapter for objects with `reset` and `step` that do not derive from BaseEnv, such as Gymnasium
environments."""

from collections.abc import Callable
from typing import Any

from turnwise.envs.base import BaseEnv


def looks_like_env(obj: object) -> bool:
    """True if the object has callable `reset` and `step`.

    Example:
        >>> looks_like_env("no")
        False
    """
    return callable(getattr(obj, "reset", None)) and callable(getattr(obj, "step", None))


class ObjectEnv(BaseEnv):
    """An object with `reset` and `step`, adapted to BaseEnv. Uses the object's `instruction`,
    `actions` and `max_turns` if it has them.

    If the object has a discrete Gymnasium action space, the actions are its numbers and
    observations are converted with `str`. Without an action space, actions and observations are
    text, as in BaseEnv. `integrations.envs.gymnasium.GymnasiumEnv` is the adapter for environments
    named by their Gymnasium id: it names the actions and describes the observations.

    Example:
        >>> import gymnasium
        >>> env = ObjectEnv(gymnasium.make("FrozenLake-v1"), name="lake")
        >>> env.actions, env.reset(seed=0)[0]
        (('0', '1', '2', '3'), '0')
    """

    def __init__(self, obj: Any, *, name: str) -> None:
        self._obj = obj
        self._name = name
        space = getattr(obj, "action_space", None)
        self._first = int(getattr(space, "start", 0))
        count = getattr(space, "n", None)
        self._numbered = isinstance(count, int) or type(count).__module__ == "numpy"
        self._to_text = space is not None
        self.instruction = str(getattr(obj, "instruction", ""))
        self.max_turns = getattr(obj, "max_turns", None)
        if self._numbered:
            self.actions = tuple(str(self._first + index) for index in range(int(count)))  # pyright: ignore[reportArgumentType]
        self._look()

    @property
    def reset_target(self) -> Callable[..., Any]:
        """The object's own reset, whose signature tells which keywords it takes."""
        return self._obj.reset

    def reset(self, seed: int | None = None, **kwargs: Any) -> Any:
        value = self._obj.reset(**kwargs) if seed is None else self._obj.reset(seed=seed, **kwargs)
        self._look()
        return self._text_first(value) if isinstance(value, tuple) else self._text(value)

    def step(self, action: str) -> Any:
        value = self._obj.step(int(action) if self._numbered else action)
        self._look()
        return self._text_first(value) if isinstance(value, tuple) else value

    def render(self) -> str:
        render = getattr(self._obj, "render", None)
        text = render() if callable(render) else ""
        return text if isinstance(text, str) else ""

    def close(self) -> None:
        close = getattr(self._obj, "close", None)
        if callable(close):
            close()

    def _look(self) -> None:
        """Copies the object's legal actions, which may depend on the state."""
        if not self._numbered:
            self.actions = tuple(getattr(self._obj, "actions", ()))

    def _text_first(self, value: Any) -> Any:
        return (self._text(value[0]), *value[1:]) if value else value

    def _text(self, observation: Any) -> Any:
        return str(observation) if self._to_text and observation is not None else observation
