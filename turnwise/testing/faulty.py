"""An environment that breaks on purpose, in every way that environments break. For fault-injection tests."""

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

from turnwise.envs.base import BaseEnv
from turnwise.seeding import derive_seed

FAULTS = ("kill", "hang", "raise", "garbage", "nan", "slow")


class FaultyEnv(BaseEnv):
    """Count to three with "go". A share of the episodes has a fault, at a random step, drawn from the noise seed.

    A fault happens at an episode's first attempt only: the marker file that it leaves in `marks` keeps it from
    happening again, so that a retry can be compared with a run that had no faults.

    Args:
        share: how many episodes have a fault, 0 to 1.
        faults: which ones: kill (the process dies), hang, raise, garbage (a wrong tuple), nan (reward), slow.
        marks: a directory for the marker files. None: a fault happens again at every attempt.
        hang_seconds: how long a hang lasts, if nobody kills it.
    """

    instruction = "Say go three times."
    actions = ("go", "stop")

    def __init__(
        self,
        share: float = 0.1,
        faults: tuple[str, ...] | list[str] = FAULTS,
        marks: str | None = None,
        hang_seconds: float = 3600.0,
    ) -> None:
        unknown = set(faults) - set(FAULTS)
        if unknown:
            raise ValueError(f"unknown faults {sorted(unknown)}; there are {', '.join(FAULTS)}")
        self._share = share
        self._faults = tuple(faults)
        self._marks = Path(marks) if marks else None
        self._hang_seconds = hang_seconds
        self._random = random.Random(0)
        self._fault: tuple[str, int] | None = None
        self._noise_seed = 0
        self._count = 0

    def reset(self, seed: int | None = None, noise_seed: int = 0, **kwargs: Any) -> str:
        self._count = 0
        self._noise_seed = noise_seed
        self._random = random.Random(derive_seed(noise_seed, "faulty"))
        broken = self._random.random() < self._share
        kind, moment = self._random.choice(self._faults), self._random.randrange(4)
        self._fault = (kind, moment) if broken else None
        self._break_if_due()
        return f"Task {(seed or 0) % 1000}."

    def step(self, action: str) -> Any:
        self._count += 1
        if (wrong := self._break_if_due()) is not None:
            return wrong
        reward = float(action == "go") + 0.01 * self._random.random()
        done = self._count >= 3
        return f"{self._count} of 3.", reward, done, {"success": done}

    def _break_if_due(self) -> Any:
        if self._fault is None or self._fault[1] != self._count:
            return None
        if self._marks is not None:
            try:
                (self._marks / f"{self._noise_seed}").touch(exist_ok=False)
            except FileExistsError:
                return None
        match self._fault[0]:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                time.sleep(self._hang_seconds)
            case "raise":
                raise RuntimeError("this environment was told to break")
            case "garbage":
                return ("only", "two")
            case "nan":
                return "Not a number.", float("nan"), False, {}
            case _:
                time.sleep(0.05)
        return None


class GreedyEnv(BaseEnv):
    """One turn. "go" is fine; "stop" takes `megabytes` of memory, which a worker's memory limit must not allow."""

    instruction = "Say go."
    actions = ("go", "stop")

    def __init__(self, megabytes: int = 4096) -> None:
        self._megabytes = megabytes

    def reset(self, seed: int | None = None, **kwargs: Any) -> str:
        return "Say go."

    def step(self, action: str) -> Any:
        if action == "stop":
            taken = bytearray(self._megabytes << 20)
            return f"Took {len(taken)} bytes.", 1.0, True, {}
        return "Fine.", 0.5, True, {}


class CrowdEnv(BaseEnv):
    """Two turns. The reward tells how many environments of its kind are playing at once, by marks in a directory."""

    instruction = "Say go."
    actions = ("go", "stop")

    def __init__(self, marks: str) -> None:
        self._marks = Path(marks)
        self._mark: Path | None = None
        self._left = 2

    def reset(self, seed: int | None = None, *, noise_seed: int = 0, **kwargs: Any) -> str:
        self._mark = self._marks / f"{noise_seed}"
        self._mark.touch()
        self._left = 2
        return "Say go."

    def step(self, action: str) -> Any:
        self._left -= 1
        return "Again.", float(len(list(self._marks.iterdir()))), self._left == 0, {}

    def close(self) -> None:
        if self._mark is not None:
            self._mark.unlink(missing_ok=True)
