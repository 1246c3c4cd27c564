"""Random rooms that are always solvable, because each is made by playing backwards from its
solution.

The floor is dug by a walk; targets are chosen and boxes set on them; then boxes are pulled away,
one random pull after the other, never twice into the same state. The state in which the boxes got
farthest becomes the room. Pushing the pulls back in reverse order solves it.
"""

import random
from dataclasses import dataclass
from functools import lru_cache

from turnwise.envs.games.sokoban.engine import BOX, BREAK, FLOOR, TARGET, WALL, Level
from turnwise.envs.games.sokoban.solver import walkable
from turnwise.seeding import derive_seed

MAX_ATTEMPTS = 2000
MAX_RESTARTS = 6
"""Walks that got stuck before the depth was used up and began again from the solution."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoomSpec:
    """Requirements for a room.

    Example:
        >>> RoomSpec(width=6, height=6, num_boxes=1).search_depth
        300
    """

    width: int = 6
    height: int = 6
    num_boxes: int = 1
    search_depth: int = 300
    """Pulls of reverse play, at most: no room needs more pushes than this."""

    def __post_init__(self) -> None:
        if not (5 <= self.width <= 64 and 5 <= self.height <= 64):
            raise ValueError(
                f"a room is 5 to 64 cells wide and high, walls included, got {self.width} x "
                f"{self.height}; change dim"
            )
        room = (self.width - 2) * (self.height - 2) // 4
        if not 1 <= self.num_boxes <= room:
            raise ValueError(
                f"a room of {self.width} x {self.height} has 1 to {room} boxes, got num_boxes = "
                f"{self.num_boxes}"
            )
        if self.search_depth < 1:
            raise ValueError(
                f"reverse play makes at least one pull, got search_depth = {self.search_depth}"
            )


def split_of(level: Level, *, val_fraction: float) -> str:
    """ "val" or "train", decided by the level's content alone, so that equal levels are never on
    both sides."""
    share = int.from_bytes(level.digest()[:7], "big") / (1 << 56)
    return "val" if share < val_fraction else "train"


@lru_cache(maxsize=4096)
def make_room(
    spec: RoomSpec, *, seed: int, split: str = "train", val_fraction: float = 0.2
) -> Level:
    """The room of this seed on this side of the split. The same arguments give the same room
    everywhere.

    Example:
        >>> room = make_room(RoomSpec(), seed=3)
        >>> room.num_boxes
        1
        >>> room == make_room(RoomSpec(), seed=3), room == make_room(RoomSpec(), seed=4)
        (True, False)
    """
    for attempt in range(MAX_ATTEMPTS):
        rng = random.Random(derive_seed(seed, "sokoban.room", attempt))
        level = _try_room(spec, rng)
        if level is not None and split_of(level, val_fraction=val_fraction) == split:
            return level
    raise ValueError(
        f"no {split} room found in {MAX_ATTEMPTS} attempts for {spec}; "
        "use fewer boxes, a larger room or more search_depth"
    )


def _try_room(spec: RoomSpec, rng: random.Random) -> Level | None:
    cells = _dig(spec, rng)
    floor = [index for index, cell in enumerate(cells) if cell == FLOOR]
    if len(floor) < 3 * spec.num_boxes + 2:
        return None
    targets = rng.sample(floor, spec.num_boxes)
    for target in targets:
        cells[target] = TARGET
    player = rng.choice([index for index in floor if index not in targets])
    empty = Level(width=spec.width, height=spec.height, cells=bytes(cells), player=player)
    found = _play_backwards(empty, frozenset(targets), rng, depth=spec.search_depth)
    if found is None:
        return None
    boxes, player = found
    for box in boxes:
        cells[box] |= BOX
    return Level(width=spec.width, height=spec.height, cells=bytes(cells), player=player)


def _dig(spec: RoomSpec, rng: random.Random) -> bytearray:
    """Walls with a connected floor of 45 to 80 % of the inside, dug by a walk that carves a bit
    beside its way."""
    stride = spec.width + 1
    cells = bytearray([WALL] * spec.width + [WALL | BREAK]) * spec.height
    wanted = round((spec.width - 2) * (spec.height - 2) * rng.uniform(0.45, 0.8))
    row, column = rng.randrange(1, spec.height - 1), rng.randrange(1, spec.width - 1)
    step = rng.choice(((-1, 0), (1, 0), (0, -1), (0, 1)))
    carved = 0
    while True:
        beside = (row + step[1], column + step[0])
        for r, c in ((row, column), beside if rng.random() < 0.5 else (row, column)):
            if 0 < r < spec.height - 1 and 0 < c < spec.width - 1 and cells[r * stride + c] == WALL:
                cells[r * stride + c] = FLOOR
                carved += 1
        if carved >= wanted:
            return cells
        if rng.random() < 0.35:
            step = rng.choice(((-1, 0), (1, 0), (0, -1), (0, 1)))
        row = min(max(row + step[0], 1), spec.height - 2)
        column = min(max(column + step[1], 1), spec.width - 2)


def _play_backwards(
    empty: Level, targets: frozenset[int], rng: random.Random, *, depth: int
) -> tuple[frozenset[int], int] | None:
    """(boxes, player) of the farthest state with no box on a target, or None where pulling led to
    none."""
    boxes, player, last = targets, empty.player, -1
    away = _distances(empty, targets)
    seen: set[tuple[frozenset[int], int]] = set()
    best: tuple[float, frozenset[int], list[int]] | None = None
    changes = 0
    restarts = MAX_RESTARTS
    for _ in range(depth):
        area = walkable(empty, boxes, player)
        seen.add((boxes, min(area)))
        pulls: list[tuple[int, int, int]] = []  # (box, where it goes, where the player ends)
        for box in sorted(boxes):
            for offset in empty.offsets:
                stand, back = box + offset, box + 2 * offset
                if stand in area and not empty.cells[back] & WALL and back not in boxes:
                    pulls.append((box, stand, back))
        rng.shuffle(pulls)
        # Most pulls go on with the same box and away from the targets, as in a solution; some do
        # not.
        pulls.sort(
            key=lambda pull: (pull[0] == last) + (away[pull[1]] > away[pull[0]]) + rng.random() * 2,
            reverse=True,
        )
        for box, stand, back in pulls:
            moved = (boxes - {box}) | {stand}
            region = walkable(empty, moved, back)
            if (moved, min(region)) not in seen:
                changes += box != last
                boxes, player, last = moved, back, stand
                break
        else:
            if restarts == 0:
                break
            restarts -= 1
            boxes, player, last, changes = targets, empty.player, -1, 0
            seen.clear()
            continue
        if not boxes & targets:
            score = sum(away[box] for box in boxes) + 0.5 * changes + 0.01 * rng.random()
            if best is None or score > best[0]:
                best = (score, boxes, sorted(region))
    return (best[1], rng.choice(best[2])) if best else None


def _distances(level: Level, targets: frozenset[int]) -> dict[int, int]:
    """Rows plus columns to the nearest target."""
    places = [divmod(target, level.stride) for target in sorted(targets)]
    distances: dict[int, int] = {}
    for index in range(len(level.cells)):
        row, column = divmod(index, level.stride)
        distances[index] = min(abs(row - r) + abs(column - c) for r, c in places)
    return distances
