"""Text observations of a board: a grid, coordinates, or both."""

from collections.abc import Mapping
from typing import Literal

from turnwise.envs.games.sokoban.engine import (
    BOX,
    BREAK,
    FLOOR,
    PLAYER,
    TARGET,
    WALL,
    Board,
    Level,
    Signs,
)

ObservationFormat = Literal["grid", "coord", "grid_coord"]
FORMATS: tuple[ObservationFormat, ...] = ("grid", "coord", "grid_coord")

NAMES: Mapping[str, int] = {
    "wall": WALL,
    "floor": FLOOR,
    "target": TARGET,
    "box": BOX,
    "box_on_target": BOX | TARGET,
    "player": PLAYER,
    "player_on_target": PLAYER | TARGET,
}
DEFAULT_VOCABULARY: Mapping[str, str] = {
    "wall": "#",
    "floor": "_",
    "target": "O",
    "box": "X",
    "box_on_target": "\u221a",  # a check mark
    "player": "P",
    "player_on_target": "S",
}


class BoardText:
    """Boards as text, in one format and one alphabet. The legend always matches what is drawn.

    Example:
        >>> from turnwise.envs.games.sokoban.engine import Level
        >>> board = Board(Level.from_rows(["#####", "#@$.#", "#####"]))
        >>> print(BoardText("grid_coord").of(board))
        #####
        #PXO#
        #####
        Board: 3 rows, 5 columns, counted from 0. Player: (1, 1). Boxes: (1, 2). Targets: (1, 3).
        Walls inside: none.
    """

    def __init__(
        self, style: ObservationFormat = "grid", vocabulary: Mapping[str, str] | None = None
    ) -> None:
        if style not in FORMATS:
            raise ValueError(f"observation is one of {', '.join(FORMATS)}, got {style!r}")
        names = {**DEFAULT_VOCABULARY, **(vocabulary or {})}
        unknown = sorted(set(names) - set(NAMES))
        if unknown:
            raise ValueError(
                f"a vocabulary has the keys {', '.join(NAMES)}, got {', '.join(unknown)}"
            )
        if len(set(names.values())) < len(names) or not all(
            char and "\n" not in char for char in names.values()
        ):
            raise ValueError(
                f"each thing on the board has a sign of its own on one line, got {names}"
            )
        self.style = style
        self.names = names
        self.signs = Signs(
            {WALL | BREAK: "\n"} | {cell: names[name] for name, cell in NAMES.items()}
        )
        # Targets and walls never move: their part of the text is kept for the level that was told
        # last.
        self._fixed: tuple[Level | None, str] = (None, "")

    def legend(self) -> str:
        """The meaning of the signs, or how positions are given."""
        places = "Places are given as (row, column); row 0 is at the top, column 0 at the left."
        if self.style == "coord":
            return places
        drawn = ", ".join(f"{self.names[name]} {name.replace('_', ' ')}" for name in NAMES)
        return f"Signs: {drawn}." + (f" {places}" if self.style == "grid_coord" else "")

    def of(self, board: Board) -> str:
        """The board in this format."""
        if self.style == "grid":
            return board.text(self.signs)[:-1]
        if self.style == "coord":
            return self._coordinates(board)
        return board.text(self.signs) + self._coordinates(board)

    def _coordinates(self, board: Board) -> str:
        level = board.level
        if self._fixed[0] is not level:
            inside = [
                index
                for index, cell in enumerate(level.cells)
                if cell == WALL
                and 0 < index // level.stride < level.height - 1
                and 0 < index % level.stride < level.width - 1
            ]
            fixed = (
                f"Targets: {_places(level.targets, level.stride)}.\nWalls inside: "
                f"{_places(inside, level.stride)}."
            )
            self._fixed = (level, fixed)
        return (
            f"Board: {level.height} rows, {level.width} columns, counted from 0. "
            f"Player: {_places((board.player,), level.stride)}. Boxes: "
            f"{_places(board.boxes(), level.stride)}. "
            f"{self._fixed[1]}"
        )


def _places(cells: list[int] | tuple[int, ...], stride: int) -> str:
    return ", ".join([f"({cell // stride}, {cell % stride})" for cell in cells]) or "none"
