"""Environments of GEM (package gem-llm): `gem:game:Sudoku-v0-easy`."""

import importlib
import logging
from collections.abc import Mapping
from random import Random
from typing import Any

from turnwise.envs.base import BadActionError, BaseEnv
from turnwise.envs.gate import describe
from turnwise.integrations.envs.common import (
    MOVE_ERRORS,
    OwnRandom,
    SplitBy,
    require,
    split_rule,
    start_in_split,
    unknown_name,
)


class GemEnv(BaseEnv):
    """A GEM environment. It explains its own form of actions, such as \\boxed{7}; they go into the
    answer.

    GEM draws from the global generators, so every episode gets states of its own for them. One seed
    is one game: GEM seeds the start and what follows alike, so there is no noise of its own. Where
    GEM says terminated and truncated at once, its own rules ended the game: terminated. An action
    that an environment cannot read is a failed action and ends the episode.

    Args:
        id: GEM's id, such as game:GuessTheNumber-v0-easy.
        kwargs: keyword arguments of `gem.make`.
        split_by: whether a start's opening or its seed decides if it is held out. None: the seed in
            games, whose starts may be slow to make, and the question in data sets.
    """

    def __init__(
        self,
        id: str,
        *,
        kwargs: Mapping[str, Any] | None = None,
        split_by: str | None = None,
    ) -> None:
        gem = _import_gem()
        registry: Mapping[str, Any] = importlib.import_module("gem.envs.registration").ENV_REGISTRY
        if id not in registry:
            raise unknown_name("gem", id, sorted(registry))
        own = "seed" if id.startswith("game:") else "opening"
        self._split_by: SplitBy = split_rule(split_by or own)
        self._own = OwnRandom(0)
        self._info: dict[str, Any] = {}
        with self._own.drawing():
            self._env: Any = gem.make(id, **(kwargs or {}))

    def reset(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, seed: int | None = None, *, split: str = "train"
    ) -> tuple[str, dict[str, Any]]:
        return start_in_split(self._start, seed or 0, split, by=self._split_by), self._info

    def _start(self, seed: int) -> str:
        self._own = OwnRandom(seed)
        with self._own.drawing():
            text, info = self._env.reset(seed=seed)
        self._info = dict(info)
        return str(text)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        try:
            with self._own.drawing():
                text, reward, terminated, truncated, info = self._env.step(action)
        except MOVE_ERRORS as error:  # what was left half done is not to be played on
            raise BadActionError(
                "The action could not be read.",
                over=True,
                info={"success": False, "refused": describe(error)},
            ) from error
        ended, cut = bool(terminated), bool(truncated)
        suffix = "" if ended or cut else str(info.get("suffix") or "")
        return (
            "\n".join(part for part in (str(text), suffix) if part),
            float(reward),
            ended,
            cut and not ended,
            dict(info),
        )

    def random_action(self, rng: Random) -> str | None:
        try:
            with OwnRandom(rng.randrange(2**31)).drawing():
                return str(self._env.sample_random_action())
        except NotImplementedError:
            return None

    def close(self) -> None:
        close = getattr(self._env, "close", None)
        if callable(close):
            close()


def _import_gem() -> Any:
    """The package, without the log handler that importing it installs for the whole process."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        return require("gem", extra="gem")
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
