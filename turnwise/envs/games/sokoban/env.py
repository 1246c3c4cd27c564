"""Sokoban: push every box onto a target."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from turnwise.envs.base import BaseEnv, EnvError
from turnwise.envs.games.sokoban.engine import DIRECTIONS, Board, Level
from turnwise.envs.games.sokoban.levels import read_levels
from turnwise.envs.games.sokoban.rooms import RoomSpec, make_room, split_of
from turnwise.envs.games.sokoban.solver import (
    UNREACHABLE,
    SolverLimit,
    fewest_moves,
    push_distances,
    solve,
)
from turnwise.envs.games.sokoban.text import BoardText, ObservationFormat
from turnwise.envs.validate import refuse_keywords

EXPERT_STATES = 20_000
"""Where the expert stops searching for a solution: a few seconds of a large level."""
STEP_REWARD, BOX_REWARD, SOLVED_REWARD = -0.1, 1.0, 10.0

_MOVES = {
    spelling: index
    for index, name in enumerate(DIRECTIONS)
    for spelling in (name, name.lower(), str(index + 1))
}


class SokobanEnv(BaseEnv):
    """Sokoban on generated rooms or on level files.

    Each action costs 0.1, a box pushed onto a target earns 1, one pushed off it loses 1, and the
    last one earns 10. Rooms of a seed are made by reverse play and always solvable; train and val
    rooms, or levels of a file, are told apart by their content.

    Example:
        >>> env = SokobanEnv(levels=[["######", "#@ $.#", "######"]])
        >>> print(env.reset(seed=0))
        ######
        #P_XO#
        ######
        >>> env.step("Right")[1:4], env.step("right")[1:4]
        ((-0.1, False, False), (10.9, True, False))
    """

    instruction = (
        "You are playing Sokoban. Push every box onto a target. You move one cell at a time. You "
        "push a box by walking "
        "into it, if the cell behind it is free; you cannot pull, and you cannot push two boxes at "
        "once. A box in a "
        "corner stays there. The actions are Up, Down, Left and Right."
    )
    actions = DIRECTIONS
    expert = "solver"

    def __init__(
        self,
        *,
        dim: int | Sequence[int] = 6,
        num_boxes: int = 1,
        max_steps: int = 100,
        search_depth: int = 300,
        levels: str | Path | Sequence[Sequence[str]] | None = None,
        val_fraction: float = 0.2,
        observation: ObservationFormat = "grid",
        vocabulary: Mapping[str, str] | None = None,
    ) -> None:
        """Prepares the rooms or reads the levels.

        Args:
            dim: the room's side, or (height, width), walls included.
            max_steps: actions after which an episode is truncated.
            search_depth: pulls of the reverse play that makes a room, so also a bound on the pushes
                it needs.
            levels: a file or directory of Boxoban levels, or levels as rows of text, in place of
                generated rooms.
            val_fraction: share of the rooms or levels that validation gets. One level alone serves
                both.
            observation: grid, coord or grid_coord.
            vocabulary: other signs for wall, floor, target, box, box_on_target, player,
                player_on_target.
        """
        if max_steps < 1:
            raise ValueError(f"an episode has at least one step, got max_steps = {max_steps}")
        if not 0.0 < val_fraction < 1.0:
            raise ValueError(
                "val_fraction lies between 0 and 1 so that both splits have levels, got "
                f"{val_fraction}"
            )
        height, width = (dim, dim) if isinstance(dim, int) else _pair(dim)
        self.spec = RoomSpec(
            width=width, height=height, num_boxes=num_boxes, search_depth=search_depth
        )
        self.max_steps = max_steps
        self.val_fraction = val_fraction
        self._text = BoardText(observation, vocabulary)
        self.instruction = f"{SokobanEnv.instruction} {self._text.legend()}"
        self._levels = None if levels is None else _split_levels(levels, val_fraction)
        self._board: Board | None = None
        self._distances: tuple[Level, list[int]] | None = None
        self._plan: dict[tuple[int, bytes], int | None] = {}
        self._steps = 0
        self._done = True

    def reset(self, seed: int | None = None, *, split: str = "train", **kwargs: Any) -> str:
        """The board of this seed."""
        refuse_keywords(kwargs, name="sokoban")
        self.start(self.level_of(seed or 0, split=split))
        return self._text.of(self.board)

    def level_of(self, seed: int, *, split: str = "train") -> Level:
        """The level of a seed in one split."""
        if split not in ("train", "val"):
            raise ValueError(f"split is train or val, got {split!r}")
        if self._levels is not None:
            levels = self._levels[split]
            return levels[seed % len(levels)]
        return make_room(self.spec, seed=seed, split=split, val_fraction=self.val_fraction)

    def start(self, level: Level) -> None:
        """Begins an episode on a given level."""
        self._board = Board(level)
        self._steps = 0
        self._done = False
        self._plan = {}

    @property
    def board(self) -> Board:
        if self._board is None:
            raise EnvError(
                "an episode begins with reset(), but step() or the board was asked for before"
            )
        return self._board

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """(board, reward, solved, out of steps, info). Text that names no direction costs a step
        and moves nothing."""
        board = self.board
        if self._done:
            raise EnvError("the episode is over; call reset() before the next step")
        direction = _MOVES.get(action)
        if direction is None:
            direction = _MOVES.get(action.strip().lower()[:16])
        before = board.moves
        reward = STEP_REWARD
        if direction is not None:
            reward += BOX_REWARD * board.move(direction)
        self._steps += 1
        solved = board.on_target == board.num_boxes
        if solved:
            reward += SOLVED_REWARD
        out_of_steps = self._steps >= self.max_steps and not solved
        self._done = solved or out_of_steps
        info = {
            "success": solved,
            "action_is_valid": direction is not None,
            "action_is_effective": board.moves != before,
            "boxes_on_target": board.on_target,
        }
        return self._text.of(board), reward, solved, out_of_steps, info

    def render(self) -> str:
        """The drawn board, whatever is observed."""
        return self.board.text(self._text.signs)

    def state_key(self) -> str | None:
        """The drawn board: where the player and the boxes are, on which walls and targets."""
        return None if self._board is None else self._board.text(self._text.signs)

    def potential(self) -> float | None:
        """Minus the pushes that the boxes need, each alone to its nearest target; a stuck box
        counts as the board."""
        board = self.board
        if self._distances is None or self._distances[0] is not board.level:
            self._distances = (board.level, push_distances(board.level))
        distances = self._distances[1]
        stuck = board.level.width + board.level.height
        return -float(
            sum(stuck if distances[box] == UNREACHABLE else distances[box] for box in board.boxes())
        )

    def expert_action(self) -> str | None:
        """The next move of a solution: the shortest one in a small room, one of few pushes in a
        larger one. None where no solution exists any more, or none was found within EXPERT_STATES.

        The moves of a solution are kept by state, so that it is searched for again only where the
        play has left it.
        """
        if self._done:
            return None
        place = _place(self.board)
        if place not in self._plan:
            self._plan |= _plan_from(self.board)
        direction = self._plan[place]
        return None if direction is None else DIRECTIONS[direction]


def _place(board: Board) -> tuple[int, bytes]:
    return board.player, bytes(board.cells)


def _plan_from(board: Board) -> dict[tuple[int, bytes], int | None]:
    """The move in every state on the way of a solution; None for the board itself where there is
    none."""
    level = replace(board.level, cells=bytes(board.cells), player=board.player)
    try:
        moves = fewest_moves(level)
    except SolverLimit:
        try:
            moves = solve(level, max_states=EXPERT_STATES)
        except SolverLimit:
            moves = None
    if moves is None:
        return {_place(board): None}
    ahead, plan = Board(level), dict[tuple[int, bytes], int | None]()
    for direction in moves:
        plan[_place(ahead)] = direction
        ahead.move(direction)
    return plan


def _pair(dim: Sequence[int]) -> tuple[int, int]:
    if len(dim) != 2:
        raise ValueError(f"dim is one number or (height, width), got {list(dim)}")
    return dim[0], dim[1]


@lru_cache(maxsize=8)
def _levels_of_file(path: str) -> tuple[Level, ...]:
    return read_levels(path)


def _split_levels(
    source: str | Path | Sequence[Sequence[str]], val_fraction: float
) -> dict[str, tuple[Level, ...]]:
    if isinstance(source, str | Path):
        levels = _levels_of_file(str(source))
    else:
        levels = tuple(Level.from_rows(rows) for rows in source)
    if len({level.digest() for level in levels}) == 1:
        return {"train": levels, "val": levels}
    sides: dict[str, list[Level]] = {"train": [], "val": []}
    for level in levels:
        sides[split_of(level, val_fraction=val_fraction)].append(level)
    for name, side in sides.items():
        if not side:
            raise ValueError(
                f"{len(levels)} levels leave none for {name} with val_fraction = {val_fraction}; "
                "change val_fraction or give more levels"
            )
    return {name: tuple(side) for name, side in sides.items()}
