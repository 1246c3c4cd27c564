"""Environments whose optimum is known, for tests that something is learned."""

from random import Random
from typing import Any

from turnwise.envs.base import BaseEnv
from turnwise.seeding import derive_seed


class TwoTurnCredit(BaseEnv):
    """Two turns. Going right in the first pays 1; the second pays +8 or -8 by a coin that no action
    moves.

    Where a turn's credit is everything that comes after it, the first turn's drowns in the coin.
    Success means that the first turn was right.
    """

    instruction = "Choose twice."
    actions = ("left", "right")

    def reset(self, seed: int | None = None, *, noise_seed: int = 0, **kwargs: Any) -> str:
        self._noise = Random(derive_seed(seed or 0, "coin", noise_seed))
        self._first: float | None = None
        return "First."

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        if self._first is None:
            self._first = float(action == "right")
            return "Second.", self._first, False, {"success": self._first == 1.0}
        coin = 8.0 if self._noise.random() < 0.5 else -8.0
        return "Over.", coin, True, {"success": self._first == 1.0}


class Constant(BaseEnv):
    """Pays the same whatever is done: no group ever differs in reward."""

    instruction = "Nothing matters."
    actions = ("left", "right")
    max_turns = 1

    def reset(self, seed: int | None = None, **kwargs: Any) -> str:
        return "Go."

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        return "Over.", 1.0, True, {"success": True}


class Hopeless(BaseEnv):
    """There is one action, and it never leads anywhere."""

    instruction = "Wait."
    actions = ("wait",)
    max_turns = 1

    def reset(self, seed: int | None = None, **kwargs: Any) -> str:
        return "Go."

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        return "Over.", 0.0, True, {"success": False}


class Silent(Hopeless):
    """Goes on for ever. Training tasks hear nothing of success, as where it is reported at the end
    alone."""

    def reset(self, seed: int | None = None, split: str = "train", **kwargs: Any) -> str:
        self._split = split
        return "Go."

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        return "On.", 0.0, False, {"success": False} if self._split == "val" else {}


class Broken(BaseEnv):
    """Cannot even be made."""

    def __init__(self) -> None:
        raise OSError("the data of this environment is not there")

    def reset(self, seed: int | None = None, **kwargs: Any) -> str:
        raise NotImplementedError

    def step(self, action: str) -> Any:
        raise NotImplementedError


class Moody(BaseEnv):
    """Every fourth task raises."""

    instruction = "Choose."
    actions = ("left", "right")

    def reset(self, seed: int | None = None, **kwargs: Any) -> str:
        if (seed or 0) % 4 == 0:
            raise RuntimeError("not today")
        return "Now."

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        return "Over.", float(action == "right"), True, {}
