"""What the device drew for all slots, kept until the requests that it was drawn for ask for it."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = "np.ndarray[Any, Any]"


class Tape:
    """What was drawn, step by step for all slots, as far back as a request that runs began.

    Example:
        >>> tape = Tape(2)
        >>> for ids in ([[5, -1], [6, 9]], [[7, -1], [-1, 8]]):
        ...     number = np.array(ids, dtype=np.int32)
        ...     tape.append(number, -number / 10, begins=np.array([5 in ids[0]] * 2), live=np.array([True, True]))
        >>> [ids for ids, logprobs in tape.take([1, 0])], tape.take([1])
        ([[9, 8], [5, 6, 7]], [([], [])])
    """

    def __init__(self, slots: int) -> None:
        self._ids = np.zeros((64, slots), dtype=np.int32)
        self._logprobs = np.zeros((64, slots), dtype=np.float32)
        self._first = np.zeros(slots, dtype=np.int64)
        """By slot: the first step that was not taken yet."""
        self._end = 0

    def append(
        self,
        ids: Array,  # [steps, slots], -1 where none was drawn
        logprobs: Array,
        *,
        begins: Array,  # [slots] the slot's request begins with these steps
        live: Array,  # [slots] it has one
    ) -> None:
        num = len(ids)
        if self._end + num > len(self._ids):
            self._make_room(num, live & ~begins)
        self._first[begins] = self._end
        self._ids[self._end : self._end + num] = ids
        self._logprobs[self._end : self._end + num] = logprobs
        self._end += num

    def take(self, slots: Sequence[int]) -> list[tuple[list[int], list[float]]]:
        """(ids, log-probs) that were drawn for each of the slots since it began, or since they were last taken."""
        if not slots:
            return []
        first = self._first[slots]
        start = int(first.min())
        ids = self._ids[start : self._end, slots].T  # [slots, steps]
        drawn = (ids >= 0) & (np.arange(start, self._end) >= first[:, None])
        self._first[slots] = self._end
        all_ids, all_logprobs = ids[drawn].tolist(), self._logprobs[start : self._end, slots].T[drawn].tolist()
        ends: list[int] = drawn.sum(1).cumsum().tolist()
        return [(all_ids[at:end], all_logprobs[at:end]) for at, end in pairwise((0, *ends))]

    def _make_room(self, num: int, live: Array) -> None:
        """Forgets the steps that no request needs, and grows where that is not enough for a long while."""
        oldest = int(self._first[live].min(initial=self._end))
        kept = self._end - oldest
        size = len(self._ids)
        while 2 * (kept + num) > size:
            size *= 2
        self._ids = _moved(self._ids[oldest : self._end], size)
        self._logprobs = _moved(self._logprobs[oldest : self._end], size)
        self._first -= oldest
        self._end = kept


def _moved(steps: Array, size: int) -> Array:
    """The steps at the beginning of an array with room for `size`."""
    new = np.zeros((size, steps.shape[1]), dtype=steps.dtype)
    new[: len(steps)] = steps
    return new
