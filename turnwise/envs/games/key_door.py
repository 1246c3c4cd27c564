"""KeyDoor: fetch the key, then open the door. Nothing is paid before the door opens."""

import hashlib
from collections import deque
from functools import lru_cache
from random import Random
from typing import Any

from turnwise.envs.base import BaseEnv, EnvError
from turnwise.envs.validate import refuse_keywords
from turnwise.seeding import derive_seed

_MOVES = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
Cell = tuple[int, int]
Layout = tuple[Cell, Cell, Cell]
"""Player, key and door."""


class KeyDoor(BaseEnv):
    """A room with a key and a locked door. Reaching the door with the key pays 1 and ends the
    episode. Without the key the door is a wall. The key is picked up by walking over it.

    The shortest way takes at least `min_moves` moves, and only its last move is rewarded: what
    made the difference, turning to the key first, lies several turns back. Rooms of "train" and
    "val" differ: the room itself decides where it belongs.

    Example:
        >>> env = KeyDoor(rows=3, columns=3)
        >>> print(env.reset(seed=1))
        _ _ P
        _ _ D
        K _ _
        >>> [env.step(move)[1] for move in ("left", "left", "down", "down", "right", "right", "up")]
        [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    """

    actions = ("left", "down", "right", "up")
    expert = "shortest path"
    instruction = (
        "You are in a room. Fetch the key, then go to the door.\n"
        "P you, Q you with the key, K key, D door, _ floor."
    )

    def __init__(
        self, *, rows: int = 3, columns: int = 4, min_moves: int = 6, max_steps: int = 100
    ) -> None:
        if not (3 <= rows <= 9 and 3 <= columns <= 9):
            raise ValueError(f"rows and columns are from 3 to 9, got {rows} and {columns}")
        longest = 2 * (rows + columns - 2) - 2
        if not 2 <= min_moves <= longest:
            raise ValueError(
                f"min_moves is from 2 to {longest} in {rows} rows of {columns}, got {min_moves}"
            )
        if max_steps < 1:
            raise ValueError(f"max_steps is at least 1, got {max_steps}")
        self.shape, self.min_moves, self.max_steps = (rows, columns), min_moves, max_steps
        self._at: Cell = (0, 0)
        self._key: Cell | None = None  # None: the player has it
        self._door: Cell = (0, 0)
        self._steps = 0

    def reset(self, seed: int | None = None, *, split: str = "train", **kwargs: Any) -> str:
        kwargs.pop("noise_seed", None)  # nothing is random after the reset
        refuse_keywords(kwargs, name="key_door")
        self._at, self._key, self._door = _draw(self.shape, self.min_moves, seed or 0, split)
        self._steps = 0
        return self.render()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if action not in _MOVES:
            raise ValueError(f"{action!r} is none of {', '.join(_MOVES)}")
        cell = _move(self._at, action)
        if _inside(cell, self.shape) and (cell != self._door or self._key is None):
            self._at = cell
        if self._at == self._key:
            self._key = None
        self._steps += 1
        won = self._at == self._door
        truncated = not won and self._steps >= self.max_steps
        return self.render(), float(won), won, truncated, {"success": won}

    def render(self) -> str:
        shown = {self._door: "D", self._at: "P" if self._key else "Q"}
        if self._key is not None:
            shown[self._key] = "K"
        rows, columns = map(range, self.shape)
        return "\n".join(
            " ".join(shown.get((row, column), "_") for column in columns) for row in rows
        )

    def state_key(self) -> str:
        return self.render()

    def potential(self) -> float:
        """Minus the number of moves left, by twice the number of cells."""
        return -self._moves_left(self._at) / (2 * self.shape[0] * self.shape[1])

    def expert_action(self) -> str:
        """A move along a shortest way."""
        allowed = [
            move
            for move in _MOVES
            if _inside(cell := _move(self._at, move), self.shape)
            and (self._key is None or cell != self._door)
        ]
        return min(allowed, key=lambda move: self._moves_left(_move(self._at, move)))

    def _moves_left(self, at: Cell) -> int:
        if self._key is None:
            moves = _distance(at, self._door, self.shape, wall=None)
        else:
            moves = _way((at, self._key, self._door), self.shape)
        return 2 * self.shape[0] * self.shape[1] if moves is None else moves


def _move(cell: Cell, action: str) -> Cell:
    return cell[0] + _MOVES[action][0], cell[1] + _MOVES[action][1]


def _inside(cell: Cell, shape: Cell) -> bool:
    return 0 <= cell[0] < shape[0] and 0 <= cell[1] < shape[1]


@lru_cache(maxsize=65536)
def _distance(start: Cell, end: Cell, shape: Cell, *, wall: Cell | None) -> int | None:
    """Moves from start to end around the wall, None where there is no way."""
    found, queue = {start: 0}, deque([start])
    while queue:
        cell = queue.popleft()
        if cell == end:
            return found[cell]
        for action in _MOVES:
            near = _move(cell, action)
            if _inside(near, shape) and near != wall and near not in found:
                found[near] = found[cell] + 1
                queue.append(near)
    return None


def _way(layout: Layout, shape: Cell) -> int | None:
    """Moves to the key and on to the door, None where the door bars the way to the key."""
    at, key, door = layout
    to_key, to_door = (
        _distance(at, key, shape, wall=door),
        _distance(key, door, shape, wall=None),
    )
    return None if to_key is None or to_door is None else to_key + to_door


@lru_cache(maxsize=4096)
def _draw(shape: Cell, min_moves: int, seed: int, split: str) -> Layout:
    """The first of this seed's rooms that belongs to the split and is far enough."""
    cells = [(row, column) for row in range(shape[0]) for column in range(shape[1])]
    rng = Random(derive_seed(seed, "key-door/room"))
    for _ in range(10_000):
        at, key, door = rng.sample(cells, 3)
        layout = (at, key, door)
        moves = _way(layout, shape)
        if moves is not None and moves >= min_moves and _is_val(layout) == (split != "train"):
            return layout
    raise EnvError(
        f"key_door: none of 10000 rooms of {shape[0]} x {shape[1]} takes {min_moves} moves and "
        f"belongs to split {split!r}; lower min_moves"
    )


def _is_val(layout: Layout) -> bool:
    """True for a fifth of all rooms, decided by what the room is."""
    return hashlib.blake2b(repr(layout).encode(), digest_size=4).digest()[0] % 5 == 0
