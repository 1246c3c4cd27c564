"""Objects with `reset` and `step` that do not derive from BaseEnv, Gymnasium's environments among them."""

from collections.abc import Callable
from typing import Any

from turnwise.envs.base import BaseEnv


def looks_like_env(obj: object) -> bool:
    """True where the object has `reset` and `step` to call.

    Example:
        >>> looks_like_env("no")
        False
    """
    return callable(getattr(obj, "reset", None)) and callable(getattr(obj, "step", None))


class PlainEnv(BaseEnv):
    """A foreign object as a BaseEnv. Its own `instruction`, `actions` and `max_turns` count where it has them.

    With a discrete Gymnasium action space the actions are its numbers, and observations that are not text are
    written out with `str`. Without an action space the object deals in text on both sides, like a BaseEnv.

    Example:
        >>> import gymnasium
        >>> env = PlainEnv(gymnasium.make("FrozenLake-v1"), name="lake")
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
        """The foreign reset, whose signature says which keywords it takes."""
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
        """Takes over the legal actions, which may depend on the state."""
        if not self._numbered:
            self.actions = tuple(getattr(self._obj, "actions", ()))

    def _text_first(self, value: Any) -> Any:
        return (self._text(value[0]), *value[1:]) if value else value

    def _text(self, observation: Any) -> Any:
        return str(observation) if self._to_text and observation is not None else observation
