"""A train sampler that knows the next generations in advance: it draws its order one epoch
early."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import Sampler


class LookaheadSampler(Sampler[int]):
    """Wraps TRL's train sampler: yields the same rows, and can also return upcoming ones.

    It is below the data loader, so that skipping batches on resume, sharding and prefetching work
    unchanged.

    Args:
        batch_size: rows of one generation over all processes.
        repeats: how often the sampler yields each generation's rows in a row.

    Example: two rows per generation, each generation yielded twice
        >>> sampler = LookaheadSampler([0, 0, 0, 0, 1, 1, 1, 1], batch_size=2, repeats=2)
        >>> list(sampler)
        [0, 0, 0, 0, 1, 1, 1, 1]
        >>> sampler.locate([0, 0]), sampler.rows((0, 1))
        ((0, 0), (1, 1))
        >>> sampler.after((0, 0)), sampler.after((0, 1))
        ((0, 1), (1, 0))
    """

    def __init__(self, sampler: Any, *, batch_size: int, repeats: int) -> None:
        self._sampler = sampler
        self._batch_size = batch_size
        self._repeats = repeats
        self._epochs: dict[int, list[tuple[int, ...]]] = {}
        self._where: dict[int, int] = {}
        self._epoch = -1
        self._drawn: list[list[int]] = []

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[int]:
        order = self._drawn.pop(0) if self._drawn else list(self._sampler)
        self._epoch += 1
        self._epochs = {self._epoch: self._batches(order)}
        self._where = {
            row: number for number, rows in enumerate(self._epochs[self._epoch]) for row in rows
        }
        return iter(order)

    def locate(self, rows: Sequence[int]) -> tuple[int, int] | None:
        """(epoch, number of the generation) that these rows belong to, None where they are not of
        this epoch."""
        number = self._where.get(rows[0])
        return None if number is None else (self._epoch, number)

    def after(self, place: tuple[int, int]) -> tuple[int, int] | None:
        """The place of the next generation, in the next epoch after this one's last."""
        epoch, number = place
        if number + 1 < len(self._epochs.get(epoch, ())):
            return epoch, number + 1
        return (epoch + 1, 0) if epoch + 1 <= self._epoch + 1 else None

    def rows(self, place: tuple[int, int]) -> tuple[int, ...]:
        """The rows of a generation, over all processes."""
        epoch, number = place
        if epoch == self._epoch + 1 and epoch not in self._epochs:
            # Drawn now instead of when the epoch starts, from the same generator.
            order = list(self._sampler)
            self._drawn.append(order)
            self._epochs[epoch] = self._batches(order)
        return self._epochs[epoch][number]

    def _batches(self, order: list[int]) -> list[tuple[int, ...]]:
        step = self._batch_size * self._repeats
        return [
            tuple(order[start : start + self._batch_size]) for start in range(0, len(order), step)
        ]
