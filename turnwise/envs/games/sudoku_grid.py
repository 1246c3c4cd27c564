"""Grids of sudoku: what may be placed, whether a puzzle has one solution, and puzzles that do."""

import math
from collections.abc import Iterator
from functools import cache
from random import Random

Grid = tuple[int, ...]
"""The numbers row by row, 0 for an empty cell."""
MAX_NODES = 300
"""Cells that a search fills before it gives up."""


@cache
def peers(size: int) -> tuple[tuple[int, ...], ...]:
    """For each cell, those that share its row, column or box.

    Example:
        >>> peers(4)[0]
        (1, 2, 3, 4, 5, 8, 12)
    """
    box = math.isqrt(size)
    cells = [divmod(index, size) for index in range(size * size)]

    def meet(one: tuple[int, int], other: tuple[int, int]) -> bool:
        (i, j), (k, l) = one, other  # noqa: E741
        return i == k or j == l or (i // box, j // box) == (k // box, l // box)

    return tuple(
        tuple(index for index, other in enumerate(cells) if other != cell and meet(cell, other))
        for cell in cells
    )


def candidates(grid: Grid, cell: int, *, size: int) -> list[int]:
    """The numbers that no cell of the same row, column or box has."""
    taken = {grid[peer] for peer in peers(size)[cell]}
    return [number for number in range(1, size + 1) if number not in taken]


def is_complete(grid: Grid, *, size: int) -> bool:
    """Whether every cell has a number that may stand there."""
    return all(
        number and all(grid[peer] != number for peer in peers(size)[cell])
        for cell, number in enumerate(grid)
    )


class SearchEnded(Exception):
    """A search filled MAX_NODES cells without an end."""


def solutions(grid: Grid, *, size: int) -> Iterator[Grid]:
    """The solutions, one after the other. The cell with the fewest candidates is filled first.

    Raises:
        SearchEnded: the search takes too long.

    Example:
        >>> next(solutions((1, 2, 3, 4, 3, 4, 1, 2, 2, 1, 4, 3, 0, 0, 0, 0), size=4))[-4:]
        (4, 3, 2, 1)
    """
    cells = list(grid)
    left = [cell for cell, number in enumerate(cells) if not number]
    whole = (1 << size) - 1
    nodes = 0

    def open_numbers(cell: int) -> int:
        """The candidates as bits."""
        taken = 0
        for peer in peers(size)[cell]:
            if cells[peer]:
                taken |= 1 << (cells[peer] - 1)
        return whole & ~taken

    def search() -> Iterator[Grid]:
        nonlocal nodes
        if not left:
            yield tuple(cells)
            return
        nodes += 1
        if nodes > MAX_NODES:
            raise SearchEnded
        best, fewest = -1, 0
        for place, cell in enumerate(left):
            numbers = open_numbers(cell)
            if best < 0 or numbers.bit_count() < fewest.bit_count():
                best, fewest = place, numbers
                if numbers.bit_count() < 2:
                    break
        cell = left.pop(best)
        for number in range(size):
            if fewest >> number & 1:
                cells[cell] = number + 1
                yield from search()
        cells[cell] = 0
        left.insert(best, cell)

    return search()


def make_puzzle(size: int, *, empty: int, rng: Random) -> tuple[Grid, Grid] | None:
    """(puzzle, its only solution) with this many empty cells; None where these cells cannot be
    emptied."""
    solution = _full_grid(size, rng)
    grid = list(solution)
    order = list(range(size * size))
    rng.shuffle(order)
    for cell in order:
        if not empty:
            break
        grid[cell] = 0
        if _has_one(tuple(grid), cell, solution[cell], size=size):
            empty -= 1
        else:
            grid[cell] = solution[cell]
    return None if empty else (tuple(grid), solution)


def _has_one(grid: Grid, cell: int, number: int, *, size: int) -> bool:
    """Whether no solution has another number in the cell that was emptied last; before that there
    was one solution."""
    for other in candidates(grid, cell, size=size):
        if other == number:
            continue
        trial = (*grid[:cell], other, *grid[cell + 1 :])
        try:
            if next(solutions(trial, size=size), None) is not None:
                return False
        except SearchEnded:
            return False
    return True


def _full_grid(size: int, rng: Random) -> Grid:
    """A random full grid: a regular one with its numbers, rows and columns exchanged as the rules
    allow."""
    box = math.isqrt(size)

    def lines() -> list[int]:
        bands = rng.sample(range(box), box)
        return [band * box + line for band in bands for line in rng.sample(range(box), box)]

    rows, columns = lines(), lines()
    numbers = rng.sample(range(1, size + 1), size)
    return tuple(
        numbers[(row % box * box + row // box + column) % size]
        for row in rows
        for column in columns
    )
