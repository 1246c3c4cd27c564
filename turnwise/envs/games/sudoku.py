"""Sudoku: fill a grid so that no row, column or box has a number twice."""

import hashlib
import math
import re
from functools import lru_cache
from random import Random
from typing import Any, Literal

from turnwise.envs.base import BadActionError, BaseEnv, EnvError
from turnwise.envs.games.sudoku_grid import Grid, candidates, is_complete, make_puzzle
from turnwise.envs.validate import refuse_keywords
from turnwise.seeding import derive_seed

EMPTY_SHARE = {"easy": 0.4, "medium": 0.5, "hard": 0.6}
"""The share of cells that are empty at the start."""
SHOWN_CANDIDATES = 10
"""Candidates are shown where no more cells than these are empty."""
_PLACE = re.compile(
    r"(?:place\s+)?(?P<number>\d{1,3})\s+at\s+"
    r"(?:row\s+(?P<row>\d{1,3}),?\s+col(?:umn)?\s+(?P<column>\d{1,3})"
    r"|\(?\s*(?P<i>\d{1,3})\s*,\s*(?P<j>\d{1,3})\s*\)?)",
    re.IGNORECASE,
)
_TRIPLE = re.compile(r"\(?\s*(\d{1,3})\s*,\s*(\d{1,3})\s*,\s*(\d{1,3})\s*\)?")


class Sudoku(BaseEnv):
    """Puzzles with one solution. A number of that solution pays `correct_placement_score`, another
    one that breaks no rule half of it, and the full grid `completion_bonus`. A number in another
    one's place pays the difference, so that no cell pays twice. What breaks a rule is not placed
    and costs `invalid_action_score`.

    Actions are `place 5 at row 2 col 3`, `5 at 2,3` or `2,3,5`: rows, columns and numbers count
    from 1. Puzzles of "train" and "val" differ: the puzzle itself decides where it belongs.

    Example:
        >>> env = Sudoku(grid_size=4, difficulty="easy", render_format="simple")
        >>> print(env.reset(seed=0))
        3 1 | 4 2
        4 . | 3 1
        ---------
        . . | 2 3
        . 3 | . .
        >>> env.step("place 2 at row 2 col 2")[1], env.step("4,4,2")[1]
        (1.0, -0.1)
    """

    expert = "the solution"

    def __init__(
        self,
        *,
        grid_size: int = 9,
        difficulty: Literal["easy", "medium", "hard"] = "easy",
        max_steps: int = 81,
        render_format: Literal["simple", "detailed", "with_feedback"] = "detailed",
        show_valid_numbers: bool = True,
        correct_placement_score: float = 1.0,
        invalid_action_score: float = -0.1,
        completion_bonus: float = 10.0,
    ) -> None:
        """`render_format`: the numbers alone; given numbers in brackets, with what the last action
        came to; and with the progress and, near the end, the numbers that fit."""
        if grid_size not in (4, 9, 16):
            raise ValueError(f"grid_size is 4, 9 or 16, got {grid_size}")
        if difficulty not in EMPTY_SHARE or (grid_size, difficulty) == (16, "hard"):
            levels = ", ".join(EMPTY_SHARE if grid_size < 16 else ("easy", "medium"))
            raise ValueError(f"difficulty is one of {levels}, got {difficulty!r}")
        if render_format not in ("simple", "detailed", "with_feedback"):
            raise ValueError(
                f"render_format is simple, detailed or with_feedback, got {render_format!r}"
            )
        if max_steps < 1:
            raise ValueError(f"max_steps is at least 1, got {max_steps}")
        self.size, self.difficulty, self.max_steps = grid_size, difficulty, max_steps
        self.render_format, self.show_valid_numbers = render_format, show_valid_numbers
        self.right, self.wrong, self.bonus = (
            correct_placement_score,
            invalid_action_score,
            completion_bonus,
        )
        self.instruction = (
            f"Fill the grid: every row, every column and every box of {math.isqrt(grid_size)} x "
            f"{math.isqrt(grid_size)} cells holds each number from 1 to {grid_size} once. "
            + ("" if render_format == "simple" else "Given numbers are in [brackets] and stay. ")
            + "Empty cells are dots.\n"
            "Place one number, for example: place 3 at row 2 col 4, or 2,4,3 for the same."
        )
        self._given: Grid = ()
        self._solution: Grid = ()
        self._grid: Grid = ()
        self._steps = 0
        self._said = ""

    def reset(self, seed: int | None = None, *, split: str = "train", **kwargs: Any) -> str:
        kwargs.pop("noise_seed", None)  # nothing is random after the reset
        refuse_keywords(kwargs, name="sudoku")
        self._given, self._solution = _draw(self.size, self.difficulty, seed or 0, split)
        self._grid, self._steps, self._said = self._given, 0, ""
        return self.render()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        row, column, number = _read(action, size=self.size)
        cell = (row - 1) * self.size + column - 1
        self._steps += 1
        why = self._refusal(cell, number)
        before = self._worth(cell)
        if why is None:
            self._grid = (*self._grid[:cell], number, *self._grid[cell + 1 :])
            self._said = f"{number} stands at row {row}, column {column}."
        else:
            self._said = f"{number} cannot stand at row {row}, column {column}: {why}."
        solved = is_complete(self._grid, size=self.size)
        reward = self.wrong if why else self._worth(cell) - before + solved * self.bonus
        truncated = not solved and self._steps >= self.max_steps
        info = {"success": solved, "legal": why is None, "empty": self._grid.count(0)}
        return self.render(), reward, solved, truncated, info

    def render(self) -> str:
        lines = [_drawn(self._grid, self._given, self.size, brackets=self.render_format)]
        if self.render_format != "simple" and self._said:
            lines.append(self._said)
        if self.render_format == "with_feedback":
            empty = [cell for cell, number in enumerate(self._grid) if not number]
            if self.show_valid_numbers and len(empty) <= SHOWN_CANDIDATES:
                for cell in empty:
                    fitting = ", ".join(map(str, candidates(self._grid, cell, size=self.size)))
                    row, column = divmod(cell, self.size)
                    lines.append(f"Row {row + 1}, column {column + 1}: {fitting or 'none'} fits.")
            lines.append(f"{len(empty)} cells are empty. Step {self._steps} of {self.max_steps}.")
        return "\n".join(lines)

    def state_key(self) -> str:
        return " ".join(map(str, self._grid))

    def potential(self) -> float:
        """Minus the share of cells that do not have their number yet."""
        wrong = sum(one != other for one, other in zip(self._grid, self._solution, strict=True))
        return -wrong / self.size**2

    def random_action(self, rng: Random) -> str:
        """A random number that fits an empty cell, or any number where none does."""
        empty = [cell for cell, number in enumerate(self._grid) if not number]
        rng.shuffle(empty)
        for cell in empty:
            if fitting := candidates(self._grid, cell, size=self.size):
                return self._action(cell, rng.choice(fitting))
        return self._action(rng.randrange(self.size**2), rng.randint(1, self.size))

    def expert_action(self) -> str | None:
        """The solution's number for the first cell that lacks it and takes it."""
        for cell, number in enumerate(self._solution):
            if self._grid[cell] != number and self._refusal(cell, number) is None:
                return self._action(cell, number)
        return None

    def _action(self, cell: int, number: int) -> str:
        row, column = divmod(cell, self.size)
        return f"place {number} at row {row + 1} col {column + 1}"

    def _worth(self, cell: int) -> float:
        """The reward that a cell has paid."""
        number = self._grid[cell]
        if not number or self._given[cell]:
            return 0.0
        return self.right if number == self._solution[cell] else 0.5 * self.right

    def _refusal(self, cell: int, number: int) -> str | None:
        if self._given[cell]:
            return "that number is given"
        if self._grid[cell] == number:
            return "it stands there already"
        if number not in candidates(self._grid, cell, size=self.size):
            return "its row, column or box has it"
        return None


def _read(action: str, *, size: int) -> tuple[int, int, int]:
    """(row, column, number) of an action, each from 1 to the size."""
    text = action.strip()
    if (match := _PLACE.fullmatch(text)) is not None:
        row, column = match["row"] or match["i"], match["column"] or match["j"]
        found = (int(row), int(column), int(match["number"]))
    elif (triple := _TRIPLE.fullmatch(text)) is not None:
        found = (int(triple[1]), int(triple[2]), int(triple[3]))
    else:
        raise BadActionError("Write it like this: place 3 at row 2 col 4, or 2,4,3.")
    if not all(1 <= number <= size for number in found):
        raise BadActionError(f"Rows, columns and numbers are from 1 to {size}.")
    return found


def _drawn(grid: Grid, given: Grid, size: int, *, brackets: str) -> str:
    """The grid, with bars between boxes."""
    box, width = math.isqrt(size), len(str(size))

    def cell(index: int) -> str:
        number = f"{grid[index] or '.':>{width}}"
        if brackets == "simple":
            return number
        return f"[{number}]" if given[index] else f" {number} "

    def line(row: int) -> str:
        parts = [
            " ".join(cell(row * size + column) for column in range(start, start + box))
            for start in range(0, size, box)
        ]
        return " | ".join(parts)

    lines: list[str] = []
    for row in range(size):
        if row and row % box == 0:
            lines.append("-" * len(line(row)))
        lines.append(line(row).rstrip())
    return "\n".join(lines)


@lru_cache(maxsize=1024)
def _draw(size: int, difficulty: str, seed: int, split: str) -> tuple[Grid, Grid]:
    """(puzzle, solution): the first of this seed's puzzles that belongs to the split."""
    empty = int(size * size * EMPTY_SHARE[difficulty])
    for attempt in range(1000):
        rng = Random(derive_seed(seed, f"sudoku/{size}/{difficulty}", attempt))
        found = make_puzzle(size, empty=empty, rng=rng)
        if found is not None and _is_val(found[0]) == (split != "train"):
            return found
    raise EnvError(f"sudoku: none of 1000 puzzles belongs to split {split!r}")


def _is_val(puzzle: Grid) -> bool:
    """True for about a fifth of all puzzles, decided by what the puzzle is."""
    return hashlib.blake2b(bytes(puzzle), digest_size=4).digest()[0] % 5 == 0
