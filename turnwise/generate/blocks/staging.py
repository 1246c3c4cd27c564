"""Asynchronous transfer of numbers from the host to the device."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


class Staged:
    """A pinned host buffer that is reused."""

    def __init__(self, size: int, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self._device = device
        self._tensor = torch.empty(size, dtype=torch.int64, pin_memory=cuda)
        self._sent = torch.cuda.Event() if cuda else None
        self._num = 0
        self.lent = False

    @property
    def free(self) -> bool:
        """True if the buffer is free: no writer, and the device has read its content."""
        return not self.lent and (self._sent is None or self._sent.query())

    def lend(self, num: int) -> "Staged":
        self.lent, self._num = True, num
        return self

    @property
    def values(self) -> "np.ndarray[Any, np.dtype[np.int64]]":
        """The buffer to write the values into."""
        return self._tensor.numpy()[: self._num]

    def send(self, out: Tensor | None = None) -> Tensor:
        """The values on the device, in `out` if given. Does not synchronize."""
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
    """Transfers numbers to the device without synchronizing, unlike torch.tensor(...,
    device="cuda"). Pinned buffers are reused, because pinning memory takes milliseconds.

    Example:
        >>> staging = Staging(torch.device("cpu"))
        >>> staging.send([3, 4]).tolist()
        [3, 4]
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pieces: dict[int, list[Staged]] = {}

    def take(self, num: int) -> Staged:
        """A buffer for this many numbers."""
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
