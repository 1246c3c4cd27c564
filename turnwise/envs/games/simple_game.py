"""Walk along a line to a target: the smallest game with several turns, for first runs and tests."""

import hashlib
from collections.abc import Mapping
from difflib import get_close_matches
from random import Random
from typing import Any, cast

from turnwise.config.schema import EnvConfig
from turnwise.envs.base import BaseEnv, EnvError
from turnwise.envs.validate import refuse_keywords
from turnwise.seeding import derive_seed

_DEFAULTS: dict[str, int] = {"size": 10, "max_steps": 20}


class SimpleGameEnvironment(BaseEnv):
    """A line of `size` places; "left" and "right" move by one. Reaching the target pays 1 and ends
    the game.

    The settings come as a dict, as an EnvConfig, or as any object with the attributes `size` and
    `max_steps`.

    Example:
        >>> env = SimpleGameEnvironment({"size": 4})
        >>> print(env.reset(seed=2))
        Places 0 to 3. You are at 2, the target is at 0.
        >>> env.step("left")[1], env.step("left")[1]
        (0.0, 1.0)
    """

    instruction = (
        "You stand on a line of places. Walk to the target. left lowers your place by 1, right "
        "raises it."
    )
    actions = ("left", "right")

    def __init__(
        self, config: Any = None, *, size: int | None = None, max_steps: int | None = None
    ) -> None:
        settings = _settings(config)
        self.size = settings["size"] if size is None else size
        self.max_steps = settings["max_steps"] if max_steps is None else max_steps
        if self.size < 3 or self.max_steps < 1:
            raise ValueError(
                f"size is at least 3 and max_steps 1, got {self.size} and {self.max_steps}"
            )
        self._place = self._target = self._steps = 0

    def reset(self, seed: int | None = None, *, split: str = "train", **kwargs: Any) -> str:
        refuse_keywords(kwargs, name="simple_game")
        rng = Random(derive_seed(seed or 0, "simple-game"))
        for _ in range(10_000):
            self._place, self._target = rng.sample(range(self.size), 2)
            if self._is_val() == (split != "train"):
                self._steps = 0
                return self._text()
        raise EnvError(
            f"simple_game: no game for split {split!r} on a line of {self.size} places; make it "
            "longer"
        )

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        move = {"left": -1, "right": 1}.get(action.strip().casefold(), 0)
        self._place = min(max(self._place + move, 0), self.size - 1)
        self._steps += 1
        won = self._place == self._target
        truncated = not won and self._steps >= self.max_steps
        return self._text(), float(won), won, truncated, {"success": won}

    def potential(self) -> float:
        return -abs(self._place - self._target) / (self.size - 1)

    def _text(self) -> str:
        return (
            f"Places 0 to {self.size - 1}. You are at {self._place}, the target is at "
            f"{self._target}."
        )

    def _is_val(self) -> bool:
        key = f"{self.size} {self._place} {self._target}".encode()
        return hashlib.blake2b(key, digest_size=4).digest()[0] % 4 == 0


def _settings(config: Any) -> dict[str, int]:
    """The settings in a config of any of the accepted kinds, completed by the defaults."""
    if config is None:
        return dict(_DEFAULTS)
    if isinstance(config, EnvConfig):
        config = config.options
    if not isinstance(config, Mapping):
        return {key: int(getattr(config, key, default)) for key, default in _DEFAULTS.items()}
    given = cast(Mapping[str, Any], config)
    for key in given:
        if key not in _DEFAULTS:
            near = get_close_matches(key, _DEFAULTS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(_DEFAULTS)}"
            raise ValueError(f"simple_game has no setting {key!r}; {hint}")
    return _DEFAULTS | {key: int(value) for key, value in given.items()}
