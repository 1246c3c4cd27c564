"""The rules of Sokoban on a flat array of small integers. No rendering, no text of the task, no
randomness.

A level is one byte per cell, row after row, with one extra byte at the end of each row that stands
for the line break: so a board becomes text in a single pass. Levels are closed by walls, which is
checked when they are made, so a move never needs a bounds check.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

FLOOR, WALL, TARGET, BOX, PLAYER, BREAK = 0, 1, 2, 4, 8, 16
"""Bits of a cell. BREAK marks the end of a row and comes together with WALL."""

DIRECTIONS = ("Up", "Down", "Left", "Right")

XSB = {
    FLOOR: " ",
    WALL: "#",
    TARGET: ".",
    BOX: "$",
    BOX | TARGET: "*",
    PLAYER: "@",
    PLAYER | TARGET: "+",
    WALL | BREAK: "\n",
}
"""The characters of level files."""
_CELLS = {char: cell for cell, char in XSB.items()}


class Signs:
    """How each cell is drawn. Bytes are translated in one pass; signs beyond ASCII stand in as one
    byte until then.

    Example:
        >>> Board(Level.from_rows(["#####", "#@$.#", "#####"])).text(Signs({**XSB, BOX: "[]"}))
        '#####\\n#@[].#\\n#####\\n'
    """

    __slots__ = ("replacements", "table")

    def __init__(self, signs: Mapping[int, str]) -> None:
        table = bytearray(256)
        replacements: list[tuple[str, str]] = []
        for cell, sign in signs.items():
            if len(sign) == 1 and sign.isascii():
                table[cell] = ord(sign)
            else:
                table[cell] = 0x80 + cell
                replacements.append((chr(0x80 + cell), sign))
        self.table = bytes(table)
        self.replacements = tuple(replacements)


class LevelError(ValueError):
    """A level that cannot be played."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """A board before the first move. Always closed, with one player and as many boxes as targets.

    Example:
        >>> level = Level.from_rows(["#####", "#@$.#", "#####"])
        >>> level.width, level.height, level.num_boxes, Board(level).move(3)
        (5, 3, 1, 1)
    """

    width: int
    height: int
    cells: bytes  # [height * (width + 1)]
    """Walls, targets and boxes."""
    player: int
    """The index of the player's cell."""

    @classmethod
    def from_rows(cls, rows: Sequence[str]) -> "Level":
        """The level that these rows draw with the characters of level files. Short rows are filled
        with floor.

        Raises:
            LevelError: a character, the player, the boxes or the walls are not as they must be.
        """
        width = max((len(row) for row in rows), default=0)
        cells = bytearray()
        players: list[int] = []
        for number, row in enumerate(rows, start=1):
            for column, char in enumerate(row.ljust(width), start=1):
                cell = _CELLS.get(char, BREAK)
                if cell & BREAK:
                    raise LevelError(
                        f"a level is drawn with '#', '@', '+', '$', '*', '.' and spaces, "
                        f"got {char!r} in row {number}, column {column}"
                    )
                if cell & PLAYER:
                    players.append(len(cells))
                cells.append(cell & ~PLAYER)
            cells.append(WALL | BREAK)
        if len(players) != 1:
            raise LevelError(
                f"a level has exactly one player ('@', or '+' on a target), got {len(players)}"
            )
        level = cls(width=width, height=len(rows), cells=bytes(cells), player=players[0])
        level._check()
        return level

    @property
    def stride(self) -> int:
        return self.width + 1

    @property
    def offsets(self) -> tuple[int, int, int, int]:
        """Offset of a move in cell indices, in the order of DIRECTIONS."""
        return (-self.stride, self.stride, -1, 1)

    @property
    def num_boxes(self) -> int:
        return sum(1 for cell in self.cells if cell & BOX)

    @property
    def targets(self) -> tuple[int, ...]:
        return tuple(index for index, cell in enumerate(self.cells) if cell & TARGET)

    def text(self) -> str:
        """The level as rows of a level file."""
        cells = bytearray(self.cells)
        cells[self.player] |= PLAYER
        return "".join(map(XSB.__getitem__, cells))

    def digest(self) -> bytes:
        """A hash of the content: equal levels have equal digests, wherever they came from."""
        return hashlib.blake2b(self.text().encode(), digest_size=16).digest()

    def reachable(self) -> set[int]:
        """The cells that the player could walk to if there were no boxes.

        Raises:
            LevelError: there is a way out of the level.
        """
        seen = {self.player}
        open_cells = [self.player]
        while open_cells:
            cell = open_cells.pop()
            row, column = divmod(cell, self.stride)
            if row in (0, self.height - 1) or column in (0, self.width - 1):
                raise LevelError(
                    f"a level is closed by walls, but the player can leave it at row {row + 1}, "
                    f"column {column + 1}"
                )
            for offset in self.offsets:
                ahead = cell + offset
                if ahead not in seen and not self.cells[ahead] & WALL:
                    seen.add(ahead)
                    open_cells.append(ahead)
        return seen

    def _check(self) -> None:
        num_boxes, num_targets = self.num_boxes, len(self.targets)
        if num_boxes == 0 or num_boxes != num_targets:
            raise LevelError(
                f"a level has as many boxes as targets, and at least one, "
                f"got {num_boxes} boxes and {num_targets} targets"
            )
        reachable = self.reachable()
        if all(cell & TARGET for cell in self.cells if cell & BOX):
            raise LevelError("a level has something to do, but every box is on a target already")
        for index, cell in enumerate(self.cells):
            if cell & (BOX | TARGET) and cell != BOX | TARGET and index not in reachable:
                row, column = divmod(index, self.stride)
                raise LevelError(
                    f"boxes and targets can be reached, but the one at row {row + 1}, column "
                    f"{column + 1} cannot"
                )


class Board:
    """A level being played. `move` is the whole of the rules.

    Example:
        >>> board = Board(Level.from_rows(["######", "#@ $.#", "######"]))
        >>> [board.move(3) for _ in range(3)], board.solved
        ([0, 1, 0], True)
    """

    __slots__ = ("cells", "level", "moves", "num_boxes", "offsets", "on_target", "player", "pushes")

    def __init__(self, level: Level) -> None:
        self.level = level
        self.cells = bytearray(level.cells)
        self.offsets = level.offsets
        self.player = level.player
        self.num_boxes = level.num_boxes
        self.on_target = sum(1 for cell in level.cells if cell & BOX and cell & TARGET)
        self.moves = 0
        """Moves that changed something."""
        self.pushes = 0

    @property
    def solved(self) -> bool:
        return self.on_target == self.num_boxes

    def move(self, direction: int) -> int:
        """By how much the number of boxes on targets changed. A move against a wall or a stuck box
        does nothing."""
        cells = self.cells
        offset = self.offsets[direction]
        ahead = self.player + offset
        cell = cells[ahead]
        if cell & WALL:
            return 0
        change = 0
        if cell & BOX:
            beyond = ahead + offset
            other = cells[beyond]
            if other & 5:  # WALL | BOX
                return 0
            cells[ahead] = cell ^ BOX
            cells[beyond] = other | BOX
            change = ((other & TARGET) - (cell & TARGET)) >> 1
            self.on_target += change
            self.pushes += 1
        self.player = ahead
        self.moves += 1
        return change

    def text(self, signs: "Signs") -> str:
        """The board drawn with these signs, a line break after every row."""
        cells = self.cells
        player = self.player
        cells[player] |= PLAYER
        drawn = cells.translate(signs.table).decode("latin-1")
        cells[player] ^= PLAYER
        for stand_in, sign in signs.replacements:
            drawn = drawn.replace(stand_in, sign)
        return drawn

    def boxes(self) -> list[int]:
        return [index for index, cell in enumerate(self.cells) if cell & BOX]
