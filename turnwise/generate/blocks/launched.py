"""A block on its way through the device: its tokens, and how far it got."""

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
    """A moment on the device's clock, or on the host's where the device has none."""

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
    """The moments of a block."""

    began: Mark
    prefilled: Mark
    steps: Sequence[Mark]
    """After each of its decode steps, of which there is at least one."""


class Launched:
    """A block that runs, or ran. `tokens` waits for it."""

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
        """Whether `tokens` would not have to wait."""
        return self._copied is None or self._copied.reached

    def remaining(self, step_seconds: float) -> float:
        """Seconds until it is over, at so many a step. Infinite where the device does not run beside the host: there is
        nothing to be in time for."""
        if self._copied is None:
            return math.inf
        steps = self._marks.steps
        while self._reached < len(steps) and steps[self._reached].reached:
            self._reached += 1
        return (len(steps) - self._reached) * step_seconds

    @property
    def seconds(self) -> tuple[float, float]:
        """What the device spent on prompts, copies included, and on decoding. Known once it is done."""
        marks = self._marks
        return marks.began.seconds_to(marks.prefilled), marks.prefilled.seconds_to(marks.steps[-1])

    def tokens(self) -> tuple["np.ndarray[Any, Any]", "np.ndarray[Any, Any]"]:
        """(ids [steps + 1, slots] with -1 where none was drawn, log-probs): the prefill's draws, then the steps'."""
        if self._copied is not None and self._copied.event is not None:
            self._copied.event.synchronize()
        return self._ids.numpy(), self._logprobs.numpy()
