"""Sudoku, 2048 and the 2x2x2 cube: their rules against independent accounts, splits, experts."""

import math
from collections import deque
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.config.schema import EnvConfig
from turnwise.envs.base import BadActionError
from turnwise.envs.games.game_2048 import ACTIONS, Game2048, legal, slid
from turnwise.envs.games.rubikscube import ACTIONS as TURNS
from turnwise.envs.games.rubikscube import SOLVED, RubiksCube, is_solved, turned
from turnwise.envs.games.sudoku import EMPTY_SHARE, Sudoku
from turnwise.envs.games.sudoku_grid import candidates, is_complete, make_puzzle, solutions
from turnwise.envs.registry import find_env
from turnwise.evaluate.check_env import check_env

GAMES: list[tuple[str, dict[str, Any]]] = [
    ("sudoku", {}),
    ("sudoku", {"grid_size": 4, "difficulty": "hard", "render_format": "with_feedback"}),
    ("game_2048", {}),
    ("rubikscube", {}),
    ("rubikscube", {"scramble_depth": 1}),
]


@pytest.mark.parametrize(("name", "options"), GAMES)
def test_check_env(name: str, options: dict[str, Any]) -> None:
    report = check_env(name, seeds=20, config=EnvConfig(options=options))
    assert report.findings == (), str(report)
    assert report.noisy == (name == "game_2048")


@pytest.mark.parametrize("game", [Sudoku, Game2048, RubiksCube])
def test_train_and_val_share_no_instance(game: Any) -> None:
    env = game()
    train = {env.reset(seed=seed, split="train") for seed in range(60)}
    val = {env.reset(seed=seed, split="val") for seed in range(60)}
    assert not train & val
    assert len(train) > 10
    with pytest.raises(TypeError, match="no option 'sed'"):
        env.reset(sed=1)


@pytest.mark.parametrize(
    ("alias", "name"),
    [("SimpleSudoku", "sudoku"), ("2048", "game_2048"), ("RubiksCube", "rubikscube")],
)
def test_names(alias: str, name: str) -> None:
    assert find_env(alias).name == name


@pytest.mark.parametrize(
    ("game", "options", "message"),
    [
        (Sudoku, {"grid_size": 6}, "grid_size is 4, 9 or 16"),
        (Sudoku, {"grid_size": 16, "difficulty": "hard"}, "one of easy, medium, got 'hard'"),
        (Sudoku, {"render_format": "text"}, "render_format is simple, detailed"),
        (Game2048, {"size": 2}, "size is from 3 to 8"),
        (Game2048, {"two_prob": 2.0}, "a probability"),
        (RubiksCube, {"scramble_depth": 0}, "from 1 to 100"),
        (RubiksCube, {"max_steps": 0}, "max_steps is at least 1"),
    ],
)
def test_wrong_options(game: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        game(**options)


@pytest.mark.parametrize(
    ("env", "total"),
    [
        (Sudoku(difficulty="hard"), 48 + 10.0),
        (Sudoku(grid_size=4, correct_placement_score=2.0, completion_bonus=0.0), 12.0),
        (RubiksCube(scramble_depth=4), 1.0),
    ],
)
def test_the_expert_wins(env: Any, total: float) -> None:
    for seed in range(3):
        env.reset(seed=seed)
        paid, over = 0.0, False
        while not over:
            _, reward, over, truncated, info = env.step(env.expert_action())
            assert not truncated
            paid += reward
        assert info["success"]
        assert paid == pytest.approx(total)


# Sudoku


def broken(grid: tuple[int, ...], size: int) -> bool:
    """Whether a row, a column or a box has a number twice: written out over the units."""
    box = math.isqrt(size)
    rows = [[(i, j) for j in range(size)] for i in range(size)]
    columns = [[(i, j) for i in range(size)] for j in range(size)]
    boxes = [
        [(i + a, j + b) for a in range(box) for b in range(box)]
        for i in range(0, size, box)
        for j in range(0, size, box)
    ]
    for unit in rows + columns + boxes:
        numbers = [grid[i * size + j] for i, j in unit if grid[i * size + j]]
        if len(numbers) != len(set(numbers)):
            return True
    return False


@pytest.mark.parametrize("size", [4, 9])
def test_sudoku_puzzles_have_one_solution(size: int) -> None:
    for seed, (level, share) in enumerate(EMPTY_SHARE.items()):
        env = Sudoku(grid_size=size, difficulty=level)  # pyright: ignore[reportArgumentType]
        env.reset(seed=seed)
        assert env._given.count(0) == int(size * size * share)
        assert not broken(env._solution, size)
        assert list(solutions(env._given, size=size)) == [env._solution]


@given(st.integers(0, 10**6))
def test_sudoku_candidates_are_the_numbers_that_break_nothing(seed: int) -> None:
    rng = Random(seed)
    found = make_puzzle(4, empty=9, rng=rng)
    assert found is not None
    grid, solution = found
    for cell in (cell for cell in range(16) if not grid[cell]):
        fitting = [n for n in range(1, 5) if not broken((*grid[:cell], n, *grid[cell + 1 :]), 4)]
        assert candidates(grid, cell, size=4) == fitting
    assert is_complete(solution, size=4)
    assert not is_complete(grid, size=4)


def test_sudoku_pays_a_cell_once() -> None:
    """The grid is 3 1 4 2 / 4 . 3 1 / . . 2 3 / . 3 . . and two of its cells are made wrong."""
    env = Sudoku(grid_size=4, render_format="simple")
    env.reset(seed=0)
    assert env._solution[8:10] == (1, 4)
    assert env.step("3,2,1")[1:2] == (-0.1,)  # column 2 has a 1
    first = env.step("place 2 at row 2 col 2")
    again = env.step("place 2 at (2, 2)")
    assert (first[1], again[1]) == (1.0, -0.1)
    env._solution = (*env._solution[:12], 4, *env._solution[13:])
    half = env.step("2 at 4,1")
    assert half[1] == 0.5
    assert env.step("4,1,1")[1] == 0.0  # another wrong one: nothing more
    assert env.step("1,1,3")[4]["legal"] is False  # given


@pytest.mark.parametrize(
    "action",
    ["place 2 at row 2 col 2", "Place 2 at row 2, column 2", "place 2 at (2,2)", "2 at 2, 2",
     "2,2,2", "( 2, 2 , 2 )"],
)  # fmt: skip
def test_sudoku_reads_actions(action: str) -> None:
    env = Sudoku(grid_size=4)
    env.reset(seed=0)
    assert env.step(action)[4]["legal"]


@pytest.mark.parametrize("action", ["two", "2,2", "place 2", "0,1,1", "5,1,1", "9" * 5000])
def test_sudoku_refuses_what_it_cannot_read(action: str) -> None:
    env = Sudoku(grid_size=4)
    env.reset(seed=0)
    with pytest.raises(BadActionError):
        env.step(action)


def test_sudoku_shows_what_fits_near_the_end() -> None:
    env = Sudoku(grid_size=4, render_format="with_feedback")
    text = env.reset(seed=0)
    assert "[3] [1] | [4] [2]" in text
    assert "Row 2, column 2: 2 fits." in text
    assert text.endswith("6 cells are empty. Step 0 of 81.")
    assert "stands at row 2, column 2." in env.step("2,2,2")[0]


# 2048


def naive(line: list[int]) -> list[int]:
    """A line slid to its start, pair by pair."""
    tiles = [tile for tile in line if tile]
    out: list[int] = []
    index = 0
    while index < len(tiles):
        pair = index + 1 < len(tiles) and tiles[index] == tiles[index + 1]
        out.append(tiles[index] * (2 if pair else 1))
        index += 2 if pair else 1
    return out + [0] * (len(line) - len(out))


tiles = st.sampled_from([0, 0, 2, 2, 4, 8])
boards = st.lists(st.tuples(tiles, tiles, tiles, tiles), min_size=4, max_size=4).map(tuple)


@given(boards, st.sampled_from(ACTIONS))
def test_2048_slides_as_its_rules_say(board: Any, action: str) -> None:
    lines = [list(row) for row in (zip(*board, strict=True) if action in "UpDown" else board)]
    back = action in ("Down", "Right")
    moved = [naive(line[::-1])[::-1] if back else naive(line) for line in lines]
    wanted = list(zip(*moved, strict=True)) if action in "UpDown" else [tuple(m) for m in moved]
    found, points = slid(board, action)
    assert list(found) == wanted
    assert sum(map(sum, found)) == sum(map(sum, board))  # nothing is lost
    assert points == 0 or points % 4 == 0
    assert (action in legal(board)) == (found != board)


def test_2048_pays_what_is_merged_and_ends_when_nothing_moves() -> None:
    env = Game2048(size=3)
    env.reset(seed=0)
    env._board = ((2, 2, 4), (4, 0, 4), (8, 16, 32))
    assert env.step("Left")[1] == pytest.approx(0.1 * math.log2(4 + 8 + 1))
    plain = Game2048(size=3, use_log_reward=False)
    plain.reset(seed=0)
    plain._board = ((2, 4, 8), (16, 32, 64), (2, 4, 0))
    _, reward, over, _, info = plain.step("Left")
    assert (reward, over, info["score"]) == (-0.1, False, 0)  # nothing moved, nothing appeared
    assert plain._board == ((2, 4, 8), (16, 32, 64), (2, 4, 0))
    plain._board = ((2, 4, 8), (16, 32, 64), (1024, 1024, 0))
    _, reward, over, _, info = plain.step("Left")
    assert (reward, info["success"], info["max_tile"]) == (2048.0, True, 2048)
    stuck = Game2048(size=3, two_prob=1.0)
    stuck.reset(seed=0)
    stuck._board = ((8, 4, 8), (4, 8, 4), (0, 8, 4))  # the 2 that appears fits nowhere
    assert stuck.step("Left")[2]


def test_2048_members_of_a_group_have_their_own_tiles() -> None:
    env = Game2048()
    seen = set()
    for noise_seed in range(20):
        first = env.reset(seed=3, noise_seed=noise_seed)
        seen.add(env.step("Down")[0])
        assert env.reset(seed=3) == first
    assert len(seen) > 3
    env.reset(seed=3, noise_seed=1)
    again = [env.step("Down")[0], env.step("Left")[0]]
    env.reset(seed=3, noise_seed=1)
    assert [env.step("Down")[0], env.step("Left")[0]] == again


# The cube


def test_the_cube_turns_as_a_cube_does() -> None:
    """Four turns are none, a turn and its inverse are none, opposite faces commute, and the known
    orders of sequences hold."""

    def order(moves: str) -> int:
        cube, count = SOLVED, 0
        while count == 0 or cube != SOLVED:
            for move in moves.split():
                cube = turned(cube, move)
            count += 1
        return count

    for face in "UDLRFB":
        assert order(face) == 4
        assert turned(turned(SOLVED, face), face + "'") == SOLVED
    for one, other in ("UD", "LR", "FB"):
        assert turned(turned(SOLVED, one), other) == turned(turned(SOLVED, other), one)
        held = turned(turned(SOLVED, one), other + "'")
        assert is_solved(held)  # the whole cube in another position
        assert held != SOLVED
    assert order("R U R' U'") == 6  # on the corners alone
    assert order("R U") == 15
    for move in TURNS:  # no turn makes or loses a colour
        assert sorted(turned(SOLVED, move)) == sorted(SOLVED)


def test_the_corners_of_the_cube_stay_whole() -> None:
    """Its eight corners are always the same eight triples of colours, in the same sense of
    rotation."""
    corners = [(0, 4, 17), (1, 16, 13), (2, 8, 5), (3, 12, 9),
               (20, 7, 10), (21, 11, 14), (22, 19, 6), (23, 15, 18)]  # fmt: skip

    def pieces(cube: str) -> set[str]:
        found = set()
        for corner in corners:
            colours = "".join(cube[index] for index in corner)
            found.add(min(colours[i:] + colours[:i] for i in range(3)))
        return found

    rng, cube = Random(0), SOLVED
    for _ in range(60):
        cube = turned(cube, rng.choice(TURNS))
        assert pieces(cube) == pieces(SOLVED)


def test_the_experts_way_is_a_shortest() -> None:
    """Against a search over all twelve turns."""
    distance, queue = {SOLVED: 0}, deque([SOLVED])
    solved = {SOLVED}
    while queue:  # every way to hold the solved cube
        cube = queue.popleft()
        for one, other in (("U", "D'"), ("R", "L'"), ("F", "B'")):
            held = turned(turned(cube, one), other)
            if held not in solved:
                solved.add(held)
                queue.append(held)
    assert len(solved) == 24
    distance, queue = dict.fromkeys(solved, 0), deque(solved)
    while queue:
        cube = queue.popleft()
        if distance[cube] < 3:
            for move in TURNS:
                after = turned(cube, move)
                if after not in distance:
                    distance[after] = distance[cube] + 1
                    queue.append(after)
    for seed in range(8):
        env = RubiksCube(scramble_depth=3)
        env.reset(seed=seed)
        left = distance[env._cube]
        while left:
            env.step(env.expert_action())
            left -= 1
            assert distance[env._cube] == left


def test_the_cube_is_never_solved_at_the_start_and_has_a_limit() -> None:
    for seed in range(100):
        env = RubiksCube(scramble_depth=2, max_steps=1)
        env.reset(seed=seed)
        assert not is_solved(env._cube)
        wrong = next(move for move in TURNS if not is_solved(turned(env._cube, move)))
        assert env.step(wrong)[2:4] == (False, True)
