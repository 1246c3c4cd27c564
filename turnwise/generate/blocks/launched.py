"""A block on its way through the device: its tokens, and how far it got."""

import time
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
    nearly: Mark
    """Before its last step."""
    ended: Mark


class Launched:
    """A block that runs, or ran. `tokens` waits for it."""

    def __init__(self, ids: Tensor, logprobs: Tensor, *, marks: Marks) -> None:
        self._marks = marks
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

    @property
    def ending(self) -> bool:
        """Whether it is in its last step, or over. Never where the device does not run beside the host: there is
        nothing to be in time for."""
        return self._copied is not None and self._marks.nearly.reached

    @property
    def seconds(self) -> tuple[float, float]:
        """What the device spent on prompts, copies included, and on decoding. Known once it is done."""
        marks = self._marks
        return marks.began.seconds_to(marks.prefilled), marks.prefilled.seconds_to(marks.ended)

    def tokens(self) -> tuple["np.ndarray[Any, Any]", "np.ndarray[Any, Any]"]:
        """(ids [steps + 1, slots] with -1 where none was drawn, log-probs): the prefill's draws, then the steps'."""
        if self._copied is not None and self._copied.event is not None:
            self._copied.event.synchronize()
        return self._ids.numpy(), self._logprobs.numpy()
