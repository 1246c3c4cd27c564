"""Game2048: slide tiles, merge equal ones, and reach 2048."""

import hashlib
import math
from functools import lru_cache
from random import Random
from typing import Any

from turnwise.envs.base import BaseEnv, EnvError
from turnwise.envs.validate import refuse_keywords
from turnwise.seeding import derive_seed

Board = tuple[tuple[int, ...], ...]
GOAL = 2048
ACTIONS = ("Up", "Right", "Down", "Left")
NOTHING_MOVED = -0.1
"""The reward of a move that changes nothing, where merged points are paid as they are."""


class Game2048(BaseEnv):
    """Every move slides all tiles; two equal ones that meet become one of twice the value. Then a 2
    (with probability `two_prob`) or a 4 appears on an empty cell. The game is over when no move
    changes the board.

    A move pays 0.1 * log2(points + 1), where points are the values of the merged tiles; with
    `use_log_reward: false` it pays the points, and -0.1 where nothing moved. The seed decides the
    first two tiles; those that appear later are drawn from `noise_seed`, so that members of a
    group have their own luck. Boards of "train" and "val" differ in their first two tiles.

    Example:
        >>> env = Game2048()
        >>> print(env.reset(seed=1))
        . . . .
        . . . 2
        . . . .
        . . . 2
        Score: 0. Moves that change the board: Up, Down, Left.
    """

    actions = ACTIONS
    instruction = (
        f"You play 2048. A move slides all tiles Up, Right, Down or Left; two equal tiles that "
        f"meet become one of twice the value. Reach {GOAL}. After a move that changes the board a "
        "new 2 or 4 appears. Empty cells are dots."
    )

    def __init__(
        self,
        *,
        size: int = 4,
        two_prob: float = 0.9,
        use_log_reward: bool = True,
        max_steps: int = 2000,
    ) -> None:
        if not 3 <= size <= 8:
            raise ValueError(f"size is from 3 to 8, got {size}")
        if not 0.0 <= two_prob <= 1.0:
            raise ValueError(f"two_prob is a probability, got {two_prob}")
        if max_steps < 1:
            raise ValueError(f"max_steps is at least 1, got {max_steps}")
        self.size, self.two_prob, self.max_steps = size, two_prob, max_steps
        self.use_log_reward = use_log_reward
        self._board: Board = ()
        self._score = self._steps = 0
        self._noise = Random(0)

    def reset(
        self, seed: int | None = None, *, noise_seed: int = 0, split: str = "train", **kwargs: Any
    ) -> str:
        refuse_keywords(kwargs, name="game_2048")
        self._board = _draw(self.size, self.two_prob, seed or 0, split)
        self._noise = Random(derive_seed(seed or 0, "2048/tiles", noise_seed))
        self._score = self._steps = 0
        return self.render()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if action not in ACTIONS:
            raise ValueError(f"{action!r} is none of {', '.join(ACTIONS)}")
        board, points = slid(self._board, action)
        moved = board != self._board
        if moved:
            self._board = _with_tile(board, self._noise, two_prob=self.two_prob)
        self._score += points
        self._steps += 1
        reward = 0.1 * math.log2(points + 1)
        if not self.use_log_reward:
            reward = float(points) if moved else NOTHING_MOVED
        over = not legal(self._board)
        truncated = not over and self._steps >= self.max_steps
        largest = max(map(max, self._board))
        info = {"success": largest >= GOAL, "score": self._score, "max_tile": largest}
        return self.render(), reward, over, truncated, info

    def render(self) -> str:
        width = max(len(str(tile)) for row in self._board for tile in row) if self._board else 1
        rows = [" ".join(f"{tile or '.':>{width}}" for tile in row) for row in self._board]
        moves = ", ".join(legal(self._board)) or "none"
        return "\n".join([*rows, f"Score: {self._score}. Moves that change the board: {moves}."])

    def state_key(self) -> str:
        return "/".join(" ".join(map(str, row)) for row in self._board)

    def random_action(self, rng: Random) -> str:
        """A random move that changes the board."""
        return rng.choice(legal(self._board) or ACTIONS)


def slid(board: Board, action: str) -> tuple[Board, int]:
    """(the board after a move, without a new tile, and the points of its merged tiles).

    Example:
        >>> slid(((2, 2, 4), (0, 4, 0), (2, 2, 2)), "Left")
        (((4, 4, 0), (4, 0, 0), (4, 2, 0)), 8)
        >>> slid(((2, 2, 4), (0, 4, 0), (2, 2, 2)), "Down")[0]
        ((0, 2, 0), (0, 4, 4), (4, 2, 2))
    """
    upright = action in ("Up", "Down")
    back = action in ("Right", "Down")
    lines = list(zip(*board, strict=True)) if upright else list(board)
    points = 0
    found: list[tuple[int, ...]] = []
    for line in lines:
        merged, gained = _merged(line[::-1] if back else line)
        found.append(merged[::-1] if back else merged)
        points += gained
    return tuple(zip(*found, strict=True)) if upright else tuple(found), points


@lru_cache(maxsize=65536)
def _merged(line: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    """(the line slid to its start, the points). A merged tile does not merge again."""
    tiles = [tile for tile in line if tile]
    kept: list[int] = []
    points = 0
    while tiles:
        tile = tiles.pop(0)
        if tiles and tiles[0] == tile:
            tile += tiles.pop(0)
            points += tile
        kept.append(tile)
    return (*kept, *[0] * (len(line) - len(kept))), points


@lru_cache(maxsize=4096)
def legal(board: Board) -> tuple[str, ...]:
    """The moves that change the board."""
    return tuple(action for action in ACTIONS if slid(board, action)[0] != board)


def _with_tile(board: Board, rng: Random, *, two_prob: float) -> Board:
    """The board with a new tile on an empty cell."""
    empty = [(i, j) for i, row in enumerate(board) for j, tile in enumerate(row) if not tile]
    at = rng.choice(empty)
    value = 2 if rng.random() < two_prob else 4
    return tuple(
        tuple(value if (i, j) == at else tile for j, tile in enumerate(row))
        for i, row in enumerate(board)
    )


@lru_cache(maxsize=4096)
def _draw(size: int, two_prob: float, seed: int, split: str) -> Board:
    """The first of this seed's boards that belongs to the split."""
    rng = Random(derive_seed(seed, "2048/board"))
    for _ in range(1000):
        board: Board = tuple((0,) * size for _ in range(size))
        for _ in range(2):
            board = _with_tile(board, rng, two_prob=two_prob)
        if _is_val(board) == (split != "train"):
            return board
    raise EnvError(f"game_2048: none of 1000 boards belongs to split {split!r}; make size larger")


def _is_val(board: Board) -> bool:
    """True for about a fifth of all boards, decided by what the board is."""
    return hashlib.blake2b(repr(board).encode(), digest_size=4).digest()[0] % 5 == 0
