"""RubiksCube: turn the faces of a 2x2x2 cube until each has one colour."""

import hashlib
from functools import cache, lru_cache
from random import Random
from typing import Any

from turnwise.envs.base import BaseEnv, EnvError
from turnwise.envs.validate import refuse_keywords
from turnwise.seeding import derive_seed

Vector = tuple[int, int, int]
Sticker = tuple[Vector, Vector]
"""The corner that it is on, and the direction that it faces: x to the right, y up, z to the
front."""

# Face: the direction of its normal, of its rows (downwards) and of its columns (to the right), as
# it is seen from outside. The top is seen with the front below it, the bottom with the front above.
_FACES: dict[str, tuple[Vector, Vector, Vector]] = {
    "U": ((0, 1, 0), (0, 0, 1), (1, 0, 0)),
    "L": ((-1, 0, 0), (0, -1, 0), (0, 0, 1)),
    "F": ((0, 0, 1), (0, -1, 0), (1, 0, 0)),
    "R": ((1, 0, 0), (0, -1, 0), (0, 0, -1)),
    "B": ((0, 0, -1), (0, -1, 0), (-1, 0, 0)),
    "D": ((0, -1, 0), (0, 0, -1), (1, 0, 0)),
}
_COLOURS = dict(zip(_FACES, "WOGRBY", strict=True))
_NAMES = {"U": "Up", "L": "Left", "F": "Front", "R": "Right", "B": "Back", "D": "Down"}
SOLVED = "".join(4 * colour for colour in _COLOURS.values())
"""The stickers of all faces, four each, row by row."""
ACTIONS = tuple(face + sign for face in "UDLRFB" for sign in ("", "'"))


class RubiksCube(BaseEnv):
    """The cube is turned `scramble_depth` times at random; solving it pays 1 and ends the episode.

    A letter turns that face by a quarter, clockwise as seen from outside; a letter with ' turns it
    back. Cubes of "train" and "val" differ: the cube itself decides where it belongs.

    Example:
        >>> env = RubiksCube(scramble_depth=1)
        >>> print(env.reset(seed=3))
        Up    G W / G W
        Left  O O / O O
        Front Y G / Y G
        Right R R / R R
        Back  B W / B W
        Down  B Y / B Y
        >>> env.step("L")[1:3]
        (1.0, True)
    """

    actions = ACTIONS
    expert = "fewest quarter turns"
    instruction = (
        "You have a 2x2x2 cube of the colours W, O, G, R, B and Y. Turn its faces until each face "
        "has one colour.\n"
        "U, L, F, R, B and D turn the up, left, front, right, back and down face by a quarter, "
        "clockwise as seen from outside. With ' behind the letter it is counter-clockwise.\n"
        "Each face is shown as its first row / its second row, seen from outside; the up face with "
        "the front below it, the down face with the front above it."
    )

    def __init__(self, *, scramble_depth: int = 5, max_steps: int = 20) -> None:
        if not 1 <= scramble_depth <= 100:
            raise ValueError(f"scramble_depth is from 1 to 100, got {scramble_depth}")
        if max_steps < 1:
            raise ValueError(f"max_steps is at least 1, got {max_steps}")
        self.scramble_depth, self.max_steps = scramble_depth, max_steps
        self._cube = SOLVED
        self._steps = 0

    def reset(self, seed: int | None = None, *, split: str = "train", **kwargs: Any) -> str:
        kwargs.pop("noise_seed", None)  # nothing is random after the reset
        refuse_keywords(kwargs, name="rubikscube")
        self._cube = _draw(self.scramble_depth, seed or 0, split)
        self._steps = 0
        return self.render()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if action not in ACTIONS:
            raise ValueError(f"{action!r} is none of {', '.join(ACTIONS)}")
        self._cube = turned(self._cube, action)
        self._steps += 1
        won = is_solved(self._cube)
        truncated = not won and self._steps >= self.max_steps
        return self.render(), float(won), won, truncated, {"success": won}

    def render(self) -> str:
        faces = [self._cube[start : start + 4] for start in range(0, 24, 4)]
        return "\n".join(
            f"{_NAMES[name]:5} {four[0]} {four[1]} / {four[2]} {four[3]}"
            for name, four in zip(_FACES, faces, strict=True)
        )

    def state_key(self) -> str:
        return self._cube

    def expert_action(self) -> str:
        """A turn of a shortest solution."""
        wanted = _next_held(_held(self._cube))
        return next(move for move in ACTIONS if _held(turned(self._cube, move)) == wanted)


def turned(cube: str, move: str) -> str:
    """The cube after a move.

    Example:
        >>> turned(turned(SOLVED, "R"), "R'") == SOLVED, turned(SOLVED, "U")[:12]
        (True, 'WWWWGGOORRGG')
    """
    return "".join([cube[index] for index in _order(move)])


def is_solved(cube: str) -> bool:
    """Whether every face has one colour; how the cube is held does not count."""
    return all(len(set(cube[start : start + 4])) == 1 for start in range(0, 24, 4))


@cache
def _stickers() -> tuple[Sticker, ...]:
    """The place of each of the 24 stickers."""
    places: list[Sticker] = []
    for normal, down, right in _FACES.values():
        for row in (-1, 1):
            for column in (-1, 1):
                corner = tuple(
                    n + row * d + column * r for n, d, r in zip(normal, down, right, strict=True)
                )
                places.append(((corner[0], corner[1], corner[2]), normal))
    return tuple(places)


def _quarter(vector: Vector, axis: Vector) -> Vector:
    """The vector after a quarter turn, clockwise as seen from the axis' end."""
    (x, y, z), (a, b, c) = vector, axis
    along = x * a + y * b + z * c
    return y * c - z * b + a * along, z * a - x * c + b * along, x * b - y * a + c * along


@cache
def _order(move: str) -> tuple[int, ...]:
    """For each place, the place that its sticker comes from."""
    axis = _FACES[move[0]][0]
    goes: dict[Sticker, int] = {}
    for index, (corner, normal) in enumerate(_stickers()):
        in_layer = sum(one * other for one, other in zip(corner, axis, strict=True)) > 0
        place = (_quarter(corner, axis), _quarter(normal, axis)) if in_layer else (corner, normal)
        goes[place] = index
    clockwise = tuple(goes[place] for place in _stickers())
    return _inverse(clockwise) if move.endswith("'") else clockwise


def _inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(order.index(index) for index in range(24))


@cache
def _rotations() -> tuple[tuple[int, ...], ...]:
    """The 24 ways to hold the cube, each as an order of places."""

    def rotated(axis: Vector) -> tuple[int, ...]:
        goes = {
            (_quarter(corner, axis), _quarter(normal, axis)): index
            for index, (corner, normal) in enumerate(_stickers())
        }
        return tuple(goes[place] for place in _stickers())

    turns = [rotated(_FACES[face][0]) for face in "UF"]
    found = {tuple(range(24))}
    while True:
        more = {tuple(order[index] for index in turn) for order in found for turn in turns} - found
        if not more:
            return tuple(sorted(found))
        found |= more


_DOWN_BACK_LEFT = tuple(
    index for index, (corner, _) in enumerate(_stickers()) if corner == (-1, -1, -1)
)
_HELD_BY = tuple(SOLVED[index] for index in _DOWN_BACK_LEFT)


@lru_cache(maxsize=65536)
def _held(cube: str) -> str:
    """The same cube, held so that its orange, blue and yellow corner is in its own place."""
    for order in _rotations():
        if tuple(cube[order[index]] for index in _DOWN_BACK_LEFT) == _HELD_BY:
            return "".join([cube[index] for index in order])
    raise EnvError(f"rubikscube: {cube} is no cube")


_THREE = ("U", "U'", "R", "R'", "F", "F'")


@lru_cache(maxsize=4096)
def _next_held(cube: str) -> str:
    """The next cube of a shortest solution, held as `_held` says. Searched from both ends: turns of
    three faces are enough where the corner of the other three stays."""
    first = {cube: ""}  # a cube on the way -> the first step towards it
    front, goals, edge = [cube], {SOLVED}, {SOLVED}
    while True:
        layer: list[str] = []
        for state in front:
            for after in (turned(state, move) for move in _THREE):
                if after not in first:
                    first[after] = first[state] or after
                    layer.append(after)
        front = layer
        if met := [state for state in front if state in goals]:
            return first[min(met)]
        edge = {turned(state, move) for state in edge for move in _THREE} - goals
        goals |= edge
        if met := [state for state in front if state in edge]:
            return first[min(met)]


@lru_cache(maxsize=4096)
def _draw(depth: int, seed: int, split: str) -> str:
    """The first of this seed's cubes that is not solved and belongs to the split."""
    rng = Random(derive_seed(seed, "rubikscube/turns"))
    for _ in range(10_000):
        cube = SOLVED
        for _ in range(depth):
            cube = turned(cube, rng.choice(ACTIONS))
        if not is_solved(cube) and _is_val(cube) == (split != "train"):
            return cube
    raise EnvError(
        f"rubikscube: none of 10000 cubes after {depth} turns belongs to split {split!r}; raise "
        "scramble_depth"
    )


def _is_val(cube: str) -> bool:
    """True for about a fifth of all cubes, decided by what the cube is."""
    return hashlib.blake2b(cube.encode(), digest_size=4).digest()[0] % 5 == 0
