"""Solutions of levels: few pushes by A*, or the fewest moves by breadth. For tests, demonstrations
and potentials; never called while training."""

import heapq
from collections import deque
from collections.abc import Sequence

from turnwise.envs.games.sokoban.engine import BOX, WALL, Level

UNREACHABLE = -1


class SolverLimit(RuntimeError):
    """The search stopped at its limit, so nothing is known about the level."""


def push_distances(level: Level) -> list[int]:
    """How many pushes a lone box needs from each cell to the nearest target; UNREACHABLE where none
    will do.

    Found by pulling a box away from all targets at once. Other boxes are ignored, so it never
    overestimates.

    Example:
        >>> level = Level.from_rows(["#######", "#@ $ .#", "#######"])
        >>> push_distances(level)[9:15]
        [-1, 3, 2, 1, 0, -1]
    """
    distances = [UNREACHABLE] * len(level.cells)
    queue = deque(level.targets)
    for target in level.targets:
        distances[target] = 0
    while queue:
        box = queue.popleft()
        for offset in level.offsets:
            source, player = box - offset, box - 2 * offset
            if (
                level.cells[source] & WALL
                or level.cells[player] & WALL
                or distances[source] != UNREACHABLE
            ):
                continue
            distances[source] = distances[box] + 1
            queue.append(source)
    return distances


def solve(level: Level, *, max_states: int = 200_000) -> list[int] | None:
    """Directions that solve the level with few pushes, or None where no solution exists.

    Raises:
        SolverLimit: `max_states` states were looked at and it is still open.

    Example:
        >>> solve(Level.from_rows(["######", "#@ $.#", "######"]))
        [3, 3]
    """
    distances = push_distances(level)
    targets = frozenset(level.targets)
    start = frozenset(index for index, cell in enumerate(level.cells) if cell & BOX)
    if any(distances[box] == UNREACHABLE for box in start):
        return None
    estimate = sum(distances[box] for box in start)
    # An entry: (pushes + estimate, tie-breaker, pushes, boxes, player, trail).
    counter = 0
    queue: list[tuple[int, int, int, frozenset[int], int, _Trail | None]] = [
        (estimate, counter, 0, start, level.player, None)
    ]
    seen: set[tuple[frozenset[int], int]] = set()
    while queue:
        _, _, pushes, boxes, player, trail = heapq.heappop(queue)
        area = walkable(level, boxes, player)
        key = (boxes, min(area))
        if key in seen:
            continue
        seen.add(key)
        if boxes == targets:
            return _moves(level, trail)
        if len(seen) >= max_states:
            raise SolverLimit(
                f"no solution among the first {max_states} states; raise max_states to search on"
            )
        for box in boxes:
            for direction, offset in enumerate(level.offsets):
                ahead = box + offset
                if box - offset not in area or ahead in boxes or distances[ahead] == UNREACHABLE:
                    continue
                counter += 1
                moved = (boxes - {box}) | {ahead}
                cost = pushes + 1 + sum(distances[other] for other in moved)
                step = _Trail(trail, boxes, player, box - offset, direction)
                heapq.heappush(queue, (cost, counter, pushes + 1, moved, box, step))
    return None


def fewest_moves(level: Level, *, max_states: int = 20_000) -> list[int] | None:
    """Directions that solve the level with the fewest moves, or None where no solution exists.

    It looks at every place of the player and the boxes, so it is for small rooms: beyond those,
    `solve` finds a solution where this one stops.

    Raises:
        SolverLimit: `max_states` states were looked at and it is still open.

    Example:
        >>> fewest_moves(Level.from_rows(["######", "#@ $.#", "######"]))
        [3, 3]
    """
    distances = push_distances(level)
    targets = frozenset(level.targets)
    start = level.player, frozenset(i for i, cell in enumerate(level.cells) if cell & BOX)
    came: dict[_State, tuple[_State, int] | None] = {start: None}
    queue = deque([start])
    while queue:
        state = queue.popleft()
        player, boxes = state
        if boxes == targets:
            return _back(came, state)
        if len(came) >= max_states:
            raise SolverLimit(
                f"no solution among the first {max_states} states; raise max_states to search on"
            )
        for direction, offset in enumerate(level.offsets):
            ahead, beyond, moved = player + offset, player + 2 * offset, boxes
            if level.cells[ahead] & WALL:
                continue
            if ahead in boxes:
                if beyond in boxes or distances[beyond] == UNREACHABLE:
                    continue
                moved = (boxes - {ahead}) | {beyond}
            if (after := (ahead, moved)) not in came:
                came[after] = state, direction
                queue.append(after)
    return None


_State = tuple[int, frozenset[int]]
"""The player's cell and those of the boxes."""


def _back(came: dict[_State, tuple[_State, int] | None], state: _State) -> list[int]:
    moves: list[int] = []
    while (step := came[state]) is not None:
        state, direction = step
        moves.append(direction)
    return moves[::-1]


class _Trail:
    """One push and the way to it."""

    __slots__ = ("boxes", "direction", "parent", "player", "stand")

    def __init__(
        self,
        parent: "_Trail | None",
        boxes: frozenset[int],
        player: int,
        stand: int,
        direction: int,
    ) -> None:
        self.parent = parent
        self.boxes = boxes
        self.player = player
        self.stand = stand
        self.direction = direction


def walkable(level: Level, boxes: frozenset[int], player: int) -> set[int]:
    """The cells that the player can walk to without pushing."""
    cells, offsets = level.cells, level.offsets
    seen = {player}
    open_cells = [player]
    while open_cells:
        cell = open_cells.pop()
        for offset in offsets:
            ahead = cell + offset
            if ahead not in seen and not cells[ahead] & WALL and ahead not in boxes:
                seen.add(ahead)
                open_cells.append(ahead)
    return seen


def _walk(level: Level, boxes: frozenset[int], start: int, goal: int) -> Sequence[int]:
    came: dict[int, tuple[int, int]] = {}
    queue = deque([start])
    while goal != start and goal not in came:
        cell = queue.popleft()
        for direction, offset in enumerate(level.offsets):
            ahead = cell + offset
            if (
                ahead != start
                and ahead not in came
                and not level.cells[ahead] & WALL
                and ahead not in boxes
            ):
                came[ahead] = (cell, direction)
                queue.append(ahead)
    moves: list[int] = []
    cell = goal
    while cell != start:
        cell, direction = came[cell]
        moves.append(direction)
    return moves[::-1]


def _moves(level: Level, trail: _Trail | None) -> list[int]:
    pushes: list[_Trail] = []
    while trail is not None:
        pushes.append(trail)
        trail = trail.parent
    moves: list[int] = []
    for push in reversed(pushes):
        moves += _walk(level, push.boxes, push.player, push.stand)
        moves.append(push.direction)
    return moves
