"""Environments with injected faults, for tests."""

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from turnwise.envs.base import BaseEnv
from turnwise.seeding import derive_seed

FAULTS = ("kill", "hang", "raise", "garbage", "nan", "slow")
"""Default behaviour of FaultyEnv."""

DEADLY = ("kill", "terminate", "abort", "leave", "deaf")
"""They take their process with them."""
RAISED: dict[str, type[BaseException]] = {
    "raise": RuntimeError,
    "base": BaseException,
    "exit": SystemExit,
    "interrupt": KeyboardInterrupt,
    "generator_exit": GeneratorExit,
    "cancelled": asyncio.CancelledError,
    "stop_iteration": StopIteration,
    "memory": MemoryError,
    "recursion": RecursionError,
    "system": OSError,
}
WRONG: dict[str, Callable[[], Any]] = {
    "garbage": lambda: ("only", "two"),
    "nothing": lambda: None,
    "nan": lambda: ("Not a number.", float("nan"), False, {}),
    "infinite": lambda: ("Infinite.", float("-inf"), False, {}),
    "huge": lambda: ("More than float32 holds.", 1e39, False, {}),
    "text_reward": lambda: ("A text.", "1.0", False, {}),
    "text_flag": lambda: ("A text.", 1.0, "false", {}),
    "number_text": lambda: (7, 1.0, False, {}),
    "bytes_text": lambda: (b"bytes", 1.0, False, {}),
    "list_info": lambda: ("A list.", 1.0, False, [1]),
    "rude": lambda: ("Rude.", Rude(), False, {}),
}
"""Results that no step may return."""
ODD: dict[str, Callable[[], Any]] = {
    "half_sign": lambda: "\ud83c",
    "long_integer": lambda: 10**5000,
    "cycle": lambda: _cycle(),
    "long_info": lambda: "x" * 500_000,
    "rude_info": lambda: Rude(),
}
"""Values that info may have, and that are converted."""
EVERY_FAULT = (*DEADLY, "hang", *RAISED, *WRONG, *ODD, "rude_error", "slow")


class Rude:
    """Raises on every access."""

    def _leave(self) -> Any:
        raise SystemExit("nobody looks at this")

    __repr__ = __str__ = __float__ = __bool__ = __len__ = __iter__ = _leave


def _cycle() -> dict[str, Any]:
    loop: dict[str, Any] = {}
    loop["self"] = [loop, loop]
    return loop


class FaultyEnv(BaseEnv):
    """Count to three with "go". A share of the episodes has a fault, at a random step, drawn from
    the noise seed.

    A fault happens at an episode's first attempt only: the marker file that it leaves in `marks`,
    with the fault's name in it, keeps it from happening again, so that a retry can be compared with
    a run that had no faults.

    Args:
        share: how many episodes have a fault, 0 to 1.
        faults: which ones, of EVERY_FAULT.
        marks: a directory for the marker files. None: a fault happens again at every attempt.
        hang_seconds: how long a hang lasts unless the process is killed.
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
        unknown = set(faults) - set(EVERY_FAULT)
        if unknown:
            raise ValueError(
                f"unknown faults {sorted(unknown)}; there are {', '.join(EVERY_FAULT)}"
            )
        self._share = share
        self._faults = tuple(faults)
        self._marks = Path(marks) if marks else None
        self._hang_seconds = hang_seconds
        self._random = random.Random(0)
        self._fault: tuple[str, int] | None = None
        self._noise_seed = 0
        self._count = 0

    def reset(self, seed: int | None = None, noise_seed: int = 0, **kwargs: Any) -> Any:
        self._count = 0
        self._noise_seed = noise_seed
        self._random = random.Random(derive_seed(noise_seed, "faulty/reward"))
        fate = random.Random(derive_seed(noise_seed, "faulty"))
        broken = fate.random() < self._share
        kind, moment = fate.choice(self._faults), fate.randrange(4)
        self._fault = (kind, moment) if broken else None
        text = f"Task {(seed or 0) % 1000}."
        return self._break_if_due((text, {}))

    def step(self, action: str) -> Any:
        self._count += 1
        reward = float(action == "go") + 0.01 * self._random.random()
        done = self._count >= 3
        return self._break_if_due((f"{self._count} of 3.", reward, done, {"success": done}))

    def _break_if_due(self, sound: tuple[Any, ...]) -> Any:
        """The sound answer, unless this is the moment of the episode's fault."""
        if self._fault is None or self._fault[1] != self._count:
            return sound
        kind = self._fault[0]
        if self._marks is not None:
            try:
                with open(self._marks / f"{self._noise_seed}", "x") as mark:
                    mark.write(kind)
            except FileExistsError:
                return sound
        if kind in DEADLY:
            _die(kind)
        if kind in RAISED:
            raise RAISED[kind]("this environment was told to break, half a sign: \ud83c")
        if kind in WRONG:
            return WRONG[kind]()
        if kind in ODD:
            return (*sound[:-1], {**sound[-1], "odd": ODD[kind]()})
        if kind == "rude_error":
            raise ValueError(Rude())
        time.sleep(self._hang_seconds if kind == "hang" else 0.05)
        return sound


def _die(kind: str) -> None:
    match kind:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "terminate":
            os.kill(os.getpid(), signal.SIGTERM)
        case "abort":
            os.abort()
        case "leave":
            os._exit(0)
        case _:
            os.closerange(3, 1024)  # no message of this process arrives any more
    time.sleep(60.0)  # a signal takes a moment


class GreedyEnv(BaseEnv):
    """One turn. "go" is fine; "stop" takes `megabytes` of memory, which a worker's memory limit
    must not allow."""

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
    """Two turns. The reward tells how many environments of its kind are playing at once, by marks
    in a directory."""

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
