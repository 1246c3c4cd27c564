"""A launched block: its tokens and its progress on the device."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(kw_only=True, slots=True)
class Mark:
    """A timestamp on the device, or on the host for synchronous devices."""

    event: torch.cuda.Event | None
    time: float

    @classmethod
    def now(cls, device: torch.device) -> "Mark":
        """After everything that was launched so far."""
        event: torch.cuda.Event | None = None
        if device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        return cls(event=event, time=time.perf_counter())

    @property
    def reached(self) -> bool:
        return self.event is None or self.event.query()

    def seconds_to(self, later: "Mark") -> float:
        if self.event is None or later.event is None:
            return later.time - self.time
        return self.event.elapsed_time(later.event) / 1e3


@dataclass(kw_only=True, slots=True)
class Marks:
    """The timestamps of a block."""

    began: Mark
    prefilled: Mark
    steps: Sequence[Mark]
    """After each of its decode steps, of which there is at least one."""


class Launched:
    """A running or finished block. `tokens` waits for it."""

    def __init__(self, ids: Tensor, logprobs: Tensor, *, marks: Marks) -> None:
        self._marks = marks
        self._reached = 0
        self._copied: Mark | None = None
        if ids.device.type == "cuda":
            self._ids = torch.empty(ids.shape, dtype=ids.dtype, pin_memory=True)
            self._logprobs = torch.empty(logprobs.shape, pin_memory=True)
            self._ids.copy_(ids, non_blocking=True)
            self._logprobs.copy_(logprobs, non_blocking=True)
            self._copied = Mark.now(ids.device)
        else:
            self._ids, self._logprobs = ids.clone(), logprobs.clone()

    @property
    def done(self) -> bool:
        """True if `tokens` would not block."""
        return self._copied is None or self._copied.reached

    def remaining(self, step_seconds: float) -> float:
        """Estimated seconds until the block ends, from the seconds per step. Infinite on
        synchronous devices: a launch cannot be late."""
        if self._copied is None:
            return math.inf
        steps = self._marks.steps
        while self._reached < len(steps) and steps[self._reached].reached:
            self._reached += 1
        return (len(steps) - self._reached) * step_seconds

    @property
    def seconds(self) -> tuple[float, float]:
        """Device seconds spent on prompts, copies included, and on decoding. Available once the
        block is done."""
        marks = self._marks
        return marks.began.seconds_to(marks.prefilled), marks.prefilled.seconds_to(marks.steps[-1])

    def tokens(self) -> tuple["np.ndarray[Any, Any]", "np.ndarray[Any, Any]"]:
        """(ids [steps + 1, slots] with -1 where none was drawn, log-probs): the prefill's draws,
        then the steps'."""
        if self._copied is not None and self._copied.event is not None:
            self._copied.event.synchronize()
        return self._ids.numpy(), self._logprobs.numpy()
