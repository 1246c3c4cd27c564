"""FrozenLake: cross a frozen grid to the goal. Maps are gymnasium's; text, noise and splits are
ours."""

import hashlib
from collections import deque
from collections.abc import Mapping
from functools import lru_cache
from random import Random
from typing import Any, Literal

from turnwise.envs.base import BaseEnv, EnvError
from turnwise.envs.validate import refuse_keywords
from turnwise.seeding import derive_seed

_MOVES = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
_AROUND = ("left", "down", "right", "up")
"""Neighbours in this ring are the directions that a slip may take."""
_SHOWN = str.maketrans("SFH", "__O")
_ME = {"_": "P", "O": "X", "G": "V"}
Cell = tuple[int, int]


class FrozenLake(BaseEnv):
    """The goal pays 1 and ends the episode, a hole ends it with nothing, and `max_steps` truncate
    it.

    The seed decides map and start. On slippery ice a move goes as meant with probability
    `success_rate`, else to either side of it; where it slips is drawn from `noise_seed`, so that
    members of a group have their own luck. Maps of "train" and "val" differ: the map itself decides
    where it belongs.

    Example:
        >>> env = FrozenLake(size=3)
        >>> print(env.reset(seed=4))
        P _ _
        _ O _
        _ O G
        >>> [env.step(action)[1] for action in ("right", "right", "down", "down")]
        [0.0, 0.0, 0.0, 1.0]
    """

    actions = ("left", "down", "right", "up")
    expert = "shortest path"

    def __init__(
        self,
        *,
        size: int = 4,
        p: float = 0.8,
        is_slippery: bool = False,
        success_rate: float | None = None,
        random_start: bool = False,
        random_goal: bool = False,
        observation: Literal["grid", "coordinates", "both"] = "grid",
        max_steps: int = 100,
    ) -> None:
        """`p` is the chance that a cell is frozen. `success_rate` defaults to 1/3 on slippery ice,
        as in Gymnasium; giving one below 1 makes the ice slippery. With `random_goal`, start and
        goal are any two cells, as in RAGEN."""
        if not 2 <= size <= 16:
            raise ValueError(f"size is from 2 to 16, got {size}")
        lowest = 0.5 if size <= 8 else 0.65
        if not lowest <= p <= 1.0:
            raise ValueError(
                f"p lies in [{lowest}, 1] at size {size}, or hardly any map has a way through, got "
                f"{p}"
            )
        if success_rate is not None and not 0.0 < success_rate <= 1.0:
            raise ValueError(f"success_rate lies in (0, 1], got {success_rate}")
        if observation not in ("grid", "coordinates", "both"):
            raise ValueError(f"observation is grid, coordinates or both, got {observation!r}")
        if max_steps < 1:
            raise ValueError(f"max_steps is at least 1, got {max_steps}")
        self.size, self.p, self.max_steps = size, p, max_steps
        self.success_rate = (
            success_rate if success_rate is not None else (1 / 3 if is_slippery else 1.0)
        )
        self.random_start, self.random_goal, self.observation = (
            random_start,
            random_goal,
            observation,
        )
        self.instruction = self._instruction()
        self._rows: tuple[str, ...] = ()  # S, F, H, G per cell, as gymnasium writes maps
        self._cell: Cell = (0, 0)
        self._steps = 0
        self._noise: Random | None = None  # drawn from on slippery ice alone

    def reset(
        self, seed: int | None = None, *, noise_seed: int = 0, split: str = "train", **kwargs: Any
    ) -> str:
        refuse_keywords(kwargs, name="frozen_lake")
        self._rows, self._cell = _draw(
            self.size,
            self.p,
            seed or 0,
            split,
            random_start=self.random_start,
            random_goal=self.random_goal,
        )
        slippery = self.success_rate < 1.0
        self._noise = (
            Random(derive_seed(seed or 0, "frozen-lake/slip", noise_seed)) if slippery else None
        )
        self._steps = 0
        return self._text()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        heading = self._slip(action)
        row, column = self._cell[0] + _MOVES[heading][0], self._cell[1] + _MOVES[heading][1]
        self._cell = (min(max(row, 0), self.size - 1), min(max(column, 0), self.size - 1))
        self._steps += 1
        under = self._rows[self._cell[0]][self._cell[1]]
        won, lost = under == "G", under == "H"
        truncated = not (won or lost) and self._steps >= self.max_steps
        info = {"success": won, "slipped": heading != action}
        return self._text(), float(won), won or lost, truncated, info

    def render(self) -> str:
        return _grid(self._rows, self._cell)

    def state_key(self) -> str:
        return _grid(self._rows, self._cell)

    def potential(self) -> float:
        """Minus the length of the shortest way to the goal, by the number of cells; -1 where there
        is none."""
        return -self._distance(self._cell) / self.size**2

    def expert_action(self) -> str:
        """A move along a shortest path."""
        return min(
            _MOVES,
            key=lambda move: self._distance(
                (self._cell[0] + _MOVES[move][0], self._cell[1] + _MOVES[move][1])
            ),
        )

    def _distance(self, cell: Cell) -> int:
        return _distances(self._rows).get(cell, self.size**2)

    def _slip(self, action: str) -> str:
        if action not in _MOVES:
            raise ValueError(f"{action!r} is none of {', '.join(_MOVES)}")
        if self._noise is None:
            return action
        draw = self._noise.random()
        if draw < self.success_rate:
            return action
        side = 1 if draw < (1.0 + self.success_rate) / 2 else -1
        return _AROUND[(_AROUND.index(action) + side) % 4]

    def _instruction(self) -> str:
        lines = ["You walk on a frozen lake. Reach the goal, avoid the holes."]
        if self.observation != "coordinates":
            lines.append("P you, _ ice, O hole, G goal, X you in a hole, V you at the goal.")
        if self.observation != "grid":
            lines.append(
                f"Cells are (row, column) from (0, 0) at the top left to ({self.size - 1}, "
                f"{self.size - 1})."
            )
        if self.success_rate < 1.0:
            lines.append(
                f"The ice is slippery: with chance {1 - self.success_rate:.2f} you move sideways "
                "instead."
            )
        return "\n".join(lines)

    def _text(self) -> str:
        shown: list[str] = []
        if self.observation != "coordinates":
            shown.append(_grid(self._rows, self._cell))
        if self.observation != "grid":
            shown.append(f"You: {self._cell}. {_places(self._rows)}")
        return "\n".join(shown)


@lru_cache(maxsize=16384)
def _grid(rows: tuple[str, ...], cell: Cell) -> str:
    """The map with the player on it."""
    lines = [" ".join(row.translate(_SHOWN)) for row in rows]
    if lines:
        row, column = cell
        line = lines[row]
        lines[row] = f"{line[: 2 * column]}{_ME[line[2 * column]]}{line[2 * column + 1 :]}"
    return "\n".join(lines)


@lru_cache(maxsize=4096)
def _places(rows: tuple[str, ...]) -> str:
    """Where goal and holes are."""
    goal, *_ = _cells(rows, "G")
    return f"Goal: {goal}. Holes: {', '.join(map(str, _cells(rows, 'H'))) or 'none'}."


def _cells(rows: tuple[str, ...], kind: str) -> list[Cell]:
    return [(i, j) for i, row in enumerate(rows) for j, cell in enumerate(row) if cell == kind]


def _starts(rows: tuple[str, ...]) -> tuple[Cell, ...]:
    """The cells other than the goal that have a way to it."""
    return tuple(sorted(cell for cell, distance in _distances(rows).items() if distance > 0))


@lru_cache(maxsize=4096)
def _distances(rows: tuple[str, ...]) -> Mapping[Cell, int]:
    """Steps to the goal from every cell that has a way to it, holes left out."""
    goal = next((i, j) for i, row in enumerate(rows) for j, cell in enumerate(row) if cell == "G")
    found, queue = {goal: 0}, deque([goal])
    while queue:
        i, j = queue.popleft()
        for di, dj in _MOVES.values():
            cell = (i + di, j + dj)
            inside = 0 <= cell[0] < len(rows) and 0 <= cell[1] < len(rows)
            if inside and cell not in found and rows[cell[0]][cell[1]] != "H":
                found[cell] = found[i, j] + 1
                queue.append(cell)
    return found


@lru_cache(maxsize=4096)
def _draw(
    size: int, p: float, seed: int, split: str, *, random_start: bool, random_goal: bool
) -> tuple[tuple[str, ...], Cell]:
    """(map, start): the first of this seed's maps that belongs to the split. Kept, because the
    members of a group, and every evaluation, ask for the same ones."""
    from gymnasium.envs.toy_text.frozen_lake import generate_random_map

    for attempt in range(1000):
        map_seed = derive_seed(seed, "frozen-lake/map", attempt) % 2**31
        rows = (
            _goal_anywhere(size, p, map_seed)
            if random_goal
            else tuple(generate_random_map(size, p, map_seed))
        )
        if _is_val(rows) == (split != "train"):
            anywhere = random_start or random_goal
            return rows, Random(map_seed).choice(_starts(rows)) if anywhere else (0, 0)
    raise EnvError(
        f"frozen_lake: none of 1000 maps of size {size} with p={p} belongs to split {split!r}; "
        f"there are too few different ones, make the lake larger or p smaller"
    )


def _goal_anywhere(size: int, p: float, seed: int) -> tuple[str, ...]:
    """A map whose goal is any cell. Two cells at least lead to it, so that there is a choice of
    starts."""
    rng = Random(seed)
    while True:
        cells = ["F" if rng.random() < p else "H" for _ in range(size * size)]
        cells[rng.randrange(size * size)] = "G"
        rows = tuple("".join(cells[i : i + size]) for i in range(0, size * size, size))
        if len(_distances(rows)) > 2:
            return rows


def _is_val(rows: tuple[str, ...]) -> bool:
    """True for a fifth of all maps, by a hash of the map."""
    return hashlib.blake2b("\n".join(rows).encode(), digest_size=4).digest()[0] % 5 == 0
