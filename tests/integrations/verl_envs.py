"""Environments that misbehave."""

import os
import time
from collections.abc import Sequence
from typing import Any

from turnwise.envs.base import BadActionError, BaseEnv


class Fragile(BaseEnv):
    """Pays by the length of the reply; every sixth noise seed breaks it in its second step."""

    instruction = "Say something."

    def reset(self, seed: int | None = None, *, noise_seed: int = 0, **kwargs: Any) -> str:
        self._breaks = noise_seed % 6 == 0
        self._steps = 0
        return "go"

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        self._steps += 1
        if self._breaks and self._steps == 2:
            raise RuntimeError("the ice broke")
        return "on", float(len(action)) + self._steps, False, {}


class Easy(BaseEnv):
    """Every episode succeeds."""

    instruction = "Say something."

    def reset(self, seed: int | None = None, **kwargs: Any) -> str:
        return "go"

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        return "well", 1.0, True, {"success": True}


class Picky(BaseEnv):
    """Pays nothing, and cannot read replies of odd length."""

    instruction = "Say something."

    def reset(self, seed: int | None = None, **kwargs: Any) -> str:
        return "go"

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        if len(action) % 2:
            raise BadActionError("That is odd.")
        return "on", 0.0, False, {"success": False}


class Signed(BaseEnv):
    """Opens with the process that plays it."""

    instruction = "Say something."

    def reset(self, seed: int | None = None, **kwargs: Any) -> str:
        return f"process {os.getpid()}"

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        return "on", float(len(action)), False, {}


class Broken(BaseEnv):
    """Never survives a step."""

    def reset(self, seed: int | None = None, **kwargs: Any) -> str:
        return "go"

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        raise RuntimeError("the floor is gone")


class Stalls(BaseEnv):
    """Its second step takes five seconds."""

    def reset(self, seed: int | None = None, *, noise_seed: int = 0, **kwargs: Any) -> str:
        self._steps = 0
        return "go"

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        self._steps += 1
        if self._steps == 2:
            time.sleep(5.0)
        return "on", 1.0, False, {}


class Late(BaseEnv):
    """With some seeds, its second step takes an hour."""

    def __init__(self, slow: Sequence[int] = ()) -> None:
        self._slow = slow

    def reset(self, seed: int | None = None, **kwargs: Any) -> str:
        self._seed, self._steps = seed, 0
        return "go"

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        self._steps += 1
        if self._seed in self._slow and self._steps == 2:
            time.sleep(3600.0)
        return "on", float(len(action)), False, {}
