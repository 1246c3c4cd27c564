"""Sokoban: rules, rewards, rooms that can be solved, level files, and the text."""

import gzip
import os
import random
from pathlib import Path

import pytest
from draws import examples
from hypothesis import given
from hypothesis import strategies as st

from turnwise.config.schema import EnvConfig
from turnwise.envs.adapters import as_env
from turnwise.envs.base import EnvError, hint_of
from turnwise.envs.games.sokoban import (
    Board,
    Level,
    LevelError,
    RoomSpec,
    SokobanEnv,
    SolverLimit,
    check_levels,
    make_room,
    read_levels,
    solve,
)
from turnwise.envs.games.sokoban.engine import BOX, DIRECTIONS
from turnwise.envs.games.sokoban.rooms import split_of
from turnwise.envs.games.sokoban.solver import push_distances
from turnwise.envs.games.sokoban.text import BoardText
from turnwise.evaluate.check_env import check_env

DATA = (
    Path(os.environ.get("TURNWISE_SHARED_DATA", Path(__file__).parents[3] / "shared" / "data"))
    / "sokoban"
)
UP, DOWN, LEFT, RIGHT = range(4)


def level(*rows: str) -> Level:
    return Level.from_rows(rows)


def test_rules_of_pushing() -> None:
    board = Board(level("#######", "#@$ . #", "# $$. #", "#  .  #", "#######"))
    board.move(DOWN)
    assert board.move(RIGHT) == 0  # two boxes in a row do not move
    assert board.player == board.level.player + board.level.stride
    board.move(UP)
    assert board.move(UP) == 0
    assert board.player == board.level.player  # a wall stops
    assert [board.move(RIGHT) for _ in range(3)] == [0, 1, -1]
    assert board.move(RIGHT) == 0  # the box is against the wall
    assert (board.moves, board.pushes) == (5, 3)


def test_rewards_are_ragens() -> None:
    env = SokobanEnv(levels=[["########", "#@$.$. #", "########"]])
    env.reset(seed=0)
    rewards = [env.step(action)[1] for action in ("Left", "Right", "sideways")]
    assert rewards == pytest.approx([-0.1, 0.9, -0.1])
    env = SokobanEnv(levels=[["#######", "#@$. *#", "#######"]])
    env.reset(seed=0)
    _, reward, terminated, truncated, info = env.step("Right")
    assert reward == pytest.approx(-0.1 + 1 + 10)
    assert (terminated, truncated, info["success"]) == (True, False, True)
    with pytest.raises(EnvError, match="over"):
        env.step("Right")
    env = SokobanEnv(levels=[["########", "#@* $. #", "########"]])
    env.reset(seed=0)
    assert env.step("Right")[1] == pytest.approx(-1.1)  # off a target


def test_truncated_is_not_terminated() -> None:
    env = SokobanEnv(levels=[["######", "#@ $.#", "######"]], max_steps=2)
    env.reset(seed=0)
    assert env.step("Left")[2:4] == (False, False)
    assert env.step("Left")[2:4] == (False, True)
    env.reset(seed=0)
    env.step("Right")
    assert env.step("Right")[2:4] == (True, False)  # solved in the last step


@pytest.mark.parametrize(("dim", "num_boxes"), [(6, 1), (6, 2), (8, 2)])
def test_rooms_are_solvable_within_the_depth(dim: int, num_boxes: int) -> None:
    spec = RoomSpec(width=dim, height=dim, num_boxes=num_boxes, search_depth=40)
    for seed in range(25):
        room = make_room(spec, seed=seed)
        assert Level.from_rows(room.text().splitlines()) == room  # passes every check of a level
        moves = solve(room)
        assert moves is not None
        board = Board(room)
        for move in moves:
            board.move(move)
        assert board.solved
        assert board.pushes <= spec.search_depth
        assert not any(cell == BOX | 2 for cell in room.cells)


@examples(25)
@given(seed=st.integers(0, 2**63 - 1), height=st.integers(5, 9), width=st.integers(5, 9))
def test_rooms_repeat_and_splits_are_disjoint(seed: int, height: int, width: int) -> None:
    spec = RoomSpec(width=width, height=height, num_boxes=1, search_depth=30)
    train, val = make_room(spec, seed=seed, split="train"), make_room(spec, seed=seed, split="val")
    make_room.cache_clear()
    assert make_room(spec, seed=seed, split="train") == train
    assert split_of(train, val_fraction=0.2) == "train"
    assert split_of(val, val_fraction=0.2) == "val"
    assert train.digest() != val.digest()


@examples(25)
@given(seed=st.integers(0, 10**6), moves=st.lists(st.integers(0, 3), max_size=60))
def test_play_conserves_boxes_and_counts_targets(seed: int, moves: list[int]) -> None:
    board = Board(make_room(RoomSpec(width=7, height=7, num_boxes=2, search_depth=30), seed=seed))
    total = 0
    for move in moves:
        total += board.move(move)
        assert len(board.boxes()) == board.num_boxes
        assert board.on_target == sum(1 for box in board.boxes() if board.cells[box] & 2) == total
        assert not board.cells[board.player] & (BOX | 1)


def test_solver_tells_unsolvable_and_gives_up() -> None:
    assert solve(level("#####", "#$ .#", "# @ #", "#####")) is None  # a box in a corner
    # Four boxes in a block.
    assert solve(level("######", "#@ ..#", "#$$  #", "#$$  #", "#  ..#", "######")) is None
    with pytest.raises(SolverLimit):
        solve(make_room(RoomSpec(width=9, height=9, num_boxes=3), seed=1), max_states=3)


def test_potential_falls_by_one_per_push_and_never_overestimates() -> None:
    env = SokobanEnv(levels=[["########", "#@ $  .#", "########"]])
    env.reset(seed=0)
    assert env.potential() == -3.0
    env.step("Right")
    assert env.potential() == -3.0
    env.step("Right")
    assert env.potential() == -2.0
    room = make_room(RoomSpec(width=7, height=7), seed=5)
    moves = solve(room)
    assert moves is not None
    board = Board(room)
    start = sum(push_distances(room)[box] for box in board.boxes())
    for move in moves:
        board.move(move)
    assert start <= board.pushes


def test_text_formats_tell_the_same_board() -> None:
    board = Board(level("######", "#+$ ##", "# #. #", "#  $*#", "#    #", "######"))
    grid = BoardText("grid").of(board)
    assert grid.splitlines()[1] == "#SX_##"
    assert grid.splitlines()[3] == "#__X\u221a#"
    coord = BoardText("coord").of(board)
    assert (
        "Player: (1, 1). Boxes: (1, 2), (3, 3), (3, 4). Targets: (1, 1), (2, 3), (3, 4)." in coord
    )
    assert "Walls inside: (1, 4), (2, 2)." in coord
    assert BoardText("grid_coord").of(board) == f"{grid}\n{coord}"


def test_legend_follows_the_vocabulary() -> None:
    env = SokobanEnv(vocabulary={"wall": "W", "player": "@"}, levels=[["#####", "#@$.#", "#####"]])
    text = env.reset(seed=0)
    assert "W wall, _ floor" in env.instruction
    assert "@ player," in env.instruction
    assert text == "WWWWW\nW@XOW\nWWWWW"
    with pytest.raises(ValueError, match="sign of its own"):
        SokobanEnv(vocabulary={"wall": "_"})
    with pytest.raises(ValueError, match="keys"):
        SokobanEnv(vocabulary={"walls": "W"})


def test_state_key_changes_with_the_state_alone() -> None:
    env = SokobanEnv()
    env.reset(seed=4)
    first = env.state_key()
    env.reset(seed=4)
    assert env.state_key() == first
    keys = {first}
    for action in DIRECTIONS:
        env.step(action)
        keys.add(env.state_key())
    assert len(keys) > 1


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["#####", "# $.#", "#####"], "exactly one player"),
        (["######", "#@@$.#", "######"], "exactly one player"),
        (["#####", "#@$ #", "#####"], "as many boxes as targets"),
        (["#####", "#@  #", "#####"], "at least one"),
        (["#####", "#@$. ", "#####"], "closed by walls"),
        (["#####", "#@* #", "#####"], "every box is on a target"),
        (["#####", "#@$?#", "#####"], r"'\?' in row 2, column 4"),
        (["########", "#@ #$. #", "########"], "can be reached"),
    ],
)
def test_levels_that_cannot_be_played_are_refused(rows: list[str], message: str) -> None:
    with pytest.raises(LevelError, match=message):
        Level.from_rows(rows)


def test_level_files(tmp_path: Path) -> None:
    text = "; 0\n#####\n#@$.#\n#####\n\n; 1\n######\n#@ $.#\n######\n\n; 7\n#####\n#@$.#\n#####\n"
    plain, packed = tmp_path / "a.txt", tmp_path / "b.txt.gz"
    plain.write_text(text)
    packed.write_bytes(gzip.compress(text.encode()))
    assert read_levels(plain) == read_levels(packed)
    assert len(read_levels(tmp_path)) == 6
    report = check_levels(packed)
    assert (report.ok, report.num_levels, report.duplicates, report.boxes) == (True, 3, 1, (1,))


def test_bad_level_files_are_told_level_by_level(tmp_path: Path) -> None:
    file = tmp_path / "bad.txt"
    file.write_text(
        "; 0\n#####\n#@$.#\n#####\n\n; 1\n#####\n# $.#\n#####\n\n; 2\n######\n#$@.##\n######\n"
    )
    report = check_levels(file)
    assert not report.ok
    assert [(problem.level, problem.line) for problem in report.problems] == [("1", 7), ("2", 12)]
    assert "player" in report.problems[0].message
    assert "stuck" in report.problems[1].message
    assert report.lines()[-1].endswith("1 of 3 levels are playable (5x3; 1 boxes; 0 duplicates)")
    with pytest.raises(LevelError, match="line 7, level 1"):
        SokobanEnv(levels=file)
    file.write_text("nothing here? \n")
    assert not check_levels(file).ok
    file.write_text("\n\n")
    assert not check_levels(file).ok
    file.write_bytes(b"\x1f\x8bnot gzip")
    with pytest.raises(LevelError, match="cannot be unpacked"):
        check_levels(file)
    file.write_bytes(b"\xff\x00#")
    with pytest.raises(LevelError, match="ASCII"):
        check_levels(file)
    with pytest.raises(FileNotFoundError, match="no level file"):
        SokobanEnv(levels=tmp_path / "absent.txt")


def test_a_file_is_split_by_content(tmp_path: Path) -> None:
    rooms = [
        make_room(RoomSpec(), seed=seed, split="train" if seed % 3 else "val") for seed in range(30)
    ]
    file = tmp_path / "levels.txt"
    file.write_text("\n".join(f"; {n}\n{room.text()}" for n, room in enumerate([*rooms, *rooms])))
    env = SokobanEnv(levels=file)
    train = {env.level_of(seed, split="train").digest() for seed in range(200)}
    val = {env.level_of(seed, split="val").digest() for seed in range(200)}
    assert train
    assert val
    assert not train & val
    assert len(train | val) == len({room.digest() for room in rooms})


def test_hostile_actions_cost_a_step() -> None:
    env = SokobanEnv()
    env.reset(seed=0)
    before = env.state_key()
    for action in ("x" * 10_000_000, "\x00\x1b[2J", "", "UpDown", "\u0440", "9**9**9**9"):
        _, reward, terminated, _, info = env.step(action)
        assert (reward, terminated, info["action_is_valid"]) == (-0.1, False, False)
    assert env.state_key() == before
    assert env.step(" up ")[4]["action_is_valid"]
    assert env.step("3")[4]["action_is_valid"]


def test_the_environment_keeps_its_contract() -> None:
    report = check_env("sokoban", seeds=5)
    assert not report.findings, str(report)


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="num_boxes"):
        SokobanEnv(num_boxes=5)
    with pytest.raises(ValueError, match="dim"):
        SokobanEnv(dim=4)
    with pytest.raises(ValueError, match="max_steps"):
        SokobanEnv(max_steps=0)
    with pytest.raises(ValueError, match="observation"):
        SokobanEnv(observation="pixels")  # pyright: ignore[reportArgumentType]
    with pytest.raises(EnvError, match="reset"):
        SokobanEnv().step("Up")


def test_play_of_a_seed_repeats() -> None:
    actions = [random.Random(3).choice(DIRECTIONS) for _ in range(30)]

    def play() -> list[object]:
        env = SokobanEnv(dim=(7, 8), num_boxes=2)
        out: list[object] = [env.reset(seed=11)]
        return out + [env.step(action) for action in actions]

    assert play() == play()


@pytest.mark.skipif(
    not DATA.exists(), reason="the Boxoban files are not at hand (TURNWISE_SHARED_DATA)"
)
def test_boxoban_files_load_and_play() -> None:
    file = DATA / "boxoban" / "unfiltered" / "test" / "000.txt.gz"
    report = check_levels(file)
    assert report.ok
    assert (report.num_levels, report.sizes, report.boxes) == (1000, ((10, 10),), (4,))
    solved = 0
    for number in (0, 2, 6, 7, 9):
        board = Board(read_levels(file)[number])
        try:
            moves = solve(board.level, max_states=5000)
        except SolverLimit:
            continue
        assert moves is not None
        for move in moves:
            board.move(move)
        assert board.solved
        solved += 1
    assert solved >= 2


def test_a_board_is_drawn_whatever_is_observed() -> None:
    env = as_env(SokobanEnv(observation="coord"), config=EnvConfig(), name="sokoban")
    opening = env.reset(env.make_task(seed=1, split="train"))
    assert "####" not in opening.messages[-1].content
    drawn = hint_of(env, "board", 0)
    assert isinstance(drawn, str)
    assert drawn.splitlines()[0] == "#" * len(drawn.splitlines()[0])
