"""Numbers on their way from the host to the device."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


class Staged:
    """A piece of the host's memory that the device can read from, on loan."""

    def __init__(self, size: int, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self._device = device
        self._tensor = torch.empty(size, dtype=torch.int64, pin_memory=cuda)
        self._sent = torch.cuda.Event() if cuda else None
        self._num = 0
        self.lent = False

    @property
    def free(self) -> bool:
        """Whether nobody writes to it, and the device has read what was written."""
        return not self.lent and (self._sent is None or self._sent.query())

    def lend(self, num: int) -> "Staged":
        self.lent, self._num = True, num
        return self

    @property
    def values(self) -> "np.ndarray[Any, np.dtype[np.int64]]":
        """What is to be sent, to be written."""
        return self._tensor.numpy()[: self._num]

    def send(self, out: Tensor | None = None) -> Tensor:
        """The values on the device, in `out` where it is given. Nothing is waited for."""
        values = self._tensor[: self._num]
        if out is not None:
            out.copy_(values, non_blocking=True)
        elif self._sent is None:
            out = values.clone()
        else:
            out = values.to(self._device, non_blocking=True)
        if self._sent is not None:
            self._sent.record()
        self.lent = False
        return out


class Staging:
    """Numbers on their way from the host to the device, without the host waiting for what the device is doing (as a
    plain torch.tensor(..., device="cuda") does), and without pinning memory every time, which takes the driver
    milliseconds: what the device has read is used again.

    Example:
        >>> staging = Staging(torch.device("cpu"))
        >>> staging.send([3, 4]).tolist()
        [3, 4]
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pieces: dict[int, list[Staged]] = {}

    def take(self, num: int) -> Staged:
        """Room for so many numbers, to be written and sent."""
        size = max(1024, 1 << (num - 1).bit_length())
        pieces = self._pieces.setdefault(size, [])
        found = next((piece for piece in pieces if piece.free), None)
        if found is None:
            found = Staged(size, self._device)
            pieces.append(found)
        return found.lend(num)

    def send(self, numbers: Sequence[int]) -> Tensor:
        """The numbers on the device."""
        staged = self.take(len(numbers))
        staged.values[:] = numbers
        return staged.send()
