"""Games of ALFWorld: made ones, files of them, the environment, and what is refused."""

import gzip
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from draws import examples
from hypothesis import given
from hypothesis import strategies as st

from turnwise.config.schema import EnvConfig
from turnwise.envs.adapters import as_env
from turnwise.envs.base import EnvError
from turnwise.envs.games.alfworld import (
    AlfWorldEnv,
    Game,
    GameMaker,
    check_games,
    load_games,
    save_games,
)
from turnwise.envs.games.alfworld.check import wander
from turnwise.envs.games.alfworld.env import split_games
from turnwise.envs.games.alfworld.games import TASKS
from turnwise.envs.games.alfworld.planner import find_plan
from turnwise.envs.games.alfworld.rooms import HOLDS, LAMP, load_plans, sample_plans
from turnwise.envs.games.alfworld.text import NOTHING_HAPPENS
from turnwise.types import Message

DATA = Path(os.environ.get("TURNWISE_SHARED_DATA") or Path(__file__).parents[3] / "shared" / "data")
MAKER = GameMaker(sample_plans())


def made(count: int, *, split: str = "train") -> list[Game]:
    return [MAKER.make(seed, split=split) for seed in range(count)]


@examples(20)
@given(seed=st.integers(0, 2**31), split=st.sampled_from(["train", "val"]))
def test_made_games_can_be_won_and_are_not_won_already(seed: int, split: str) -> None:
    game = MAKER.make(seed, split=split)
    assert game == GameMaker(sample_plans()).make(seed, split=split)
    engine = game.engine()
    assert not engine.reset().won
    frames = [engine.step(command) for command in game.walkthrough]
    assert [frame.won for frame in frames] == [False] * (len(frames) - 1) + [True]
    assert not any(frame.text == "Nothing happens." for frame in frames)


@examples(15)
@given(seed=st.integers(0, 20), walk=st.text(max_size=8))
def test_a_random_walk_keeps_the_world_consistent(seed: int, walk: str) -> None:
    engine = MAKER.make(seed, split="train").engine()
    known: tuple[str, ...] = ()
    for command, frame in wander(engine, seed=walk, steps=40):
        assert (frame.text == NOTHING_HAPPENS) == (bool(command) and command not in known)
        known = frame.commands
        inside = {
            (thing, receptacle) for receptacle, things in engine.inside.items() for thing in things
        }
        assert inside == {fact[1:] for fact in engine.facts if fact[0] == "inreceptacle"}
        assert all(things == sorted(things) for things in engine.inside.values())
        assert {fact[2] for fact in engine.facts if fact[0] == "holds"} == ({engine.held} - {None})
        assert [fact[2] for fact in engine.facts if fact[0] == "atlocation"] == [engine.place]


def test_made_games_cover_all_tasks_and_never_share_a_room() -> None:
    train, val = made(40), made(40, split="val")
    assert {game.task_type for game in train} == {game.task_type for game in val} == set(TASKS)
    assert not {game.floor_plan for game in train} & {game.floor_plan for game in val}
    assert len({game.pddl_problem for game in train + val}) == 80


def test_lamp_stands_where_it_can_be_reached() -> None:
    maker = GameMaker(sample_plans(), task_types=["look_at_obj_in_light"])
    for seed in range(20):
        game = maker.make(seed, split="train")
        assert game.toggle_target == LAMP
        assert game.walkthrough[-1].startswith("use desklamp")


def test_the_planner_goes_on_from_anywhere() -> None:
    for game in made(12):
        engine = game.engine()
        for command in game.walkthrough[:2]:
            engine.step(command)
        rest = find_plan(game, engine=engine)
        assert rest == game.walkthrough[2:]
        engine.step(game.walkthrough[2])
        assert find_plan(game, engine=engine) == game.walkthrough[3:]


def test_the_planner_puts_down_what_is_in_the_way_and_says_when_it_is_stuck() -> None:
    game = next(game for game in made(40) if game.task_type == "pick_heat_then_place_in_recep")
    engine = game.engine()
    clutter = next(
        command
        for receptacle in engine.world.locations
        if engine.is_reachable(receptacle)
        for command in engine.step(f"go to {engine.world.names[receptacle]}").commands
        if command.startswith("take") and game.object_target.lower() not in command
    )
    name = clutter.removeprefix("take ").split(" from ")[1]
    engine.step(f"go to {name}")
    engine.step(clutter)
    assert engine.held is not None
    plan = find_plan(game, engine=engine)
    assert plan is not None
    assert any(command.startswith("move") for command in plan[:-1])
    assert [engine.step(command).won for command in plan][-1]
    assert find_plan(replace(game, object_target="Unicorn")) is None


def test_games_survive_a_file(tmp_path: Path) -> None:
    games = made(5)
    for name in ("games.jsonl", "games.jsonl.gz"):
        save_games(tmp_path / name, games=games)
        assert list(load_games(tmp_path / name)) == games


def test_check_games_counts_and_explains(tmp_path: Path) -> None:
    good, wrong, silent, broken = made(4)
    rows = [
        good.to_row(),
        replace(wrong, walkthrough=("look", "fly away")).to_row(),
        replace(silent, walkthrough=()).to_row(),
        replace(broken, pddl_problem="(define)").to_row(),
    ]
    file = tmp_path / "games.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    report = check_games(file)
    assert (report.num_games, report.num_reached, report.ok) == (4, 1, False)
    reasons = {failure.game_id: failure.reason for failure in report.failures}
    assert reasons[wrong.id].endswith("the first command that is not admissible is 'fly away'")
    assert reasons[silent.id] == "no walkthrough"
    assert "has a section" in reasons[broken.id]
    save_games(file, games=[good])
    assert check_games(file).ok


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2"),
        ("[" * 100_000, "line 2 .*deep"),
        ("[1]", "line 2 cannot be read: a game's row is a JSON object"),
        ('{"split": "train"}', "line 2 cannot be read: a game's row has the fields"),
        (
            '{"split":"a","task":"b","trial":"c","task_type":"fly","pddl_params":{},"pddl_problem":""}',
            "task_type is one of",
        ),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "games.jsonl"
    file.write_text(json.dumps(made(1)[0].to_row()) + "\n" + line + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        load_games(file)


@pytest.mark.parametrize("read", [load_games, load_plans])
@pytest.mark.parametrize("content", [b"\xff\n", b"[" * 100_000, b'{"1": [2]}\n', b"[5]\n"])
@pytest.mark.parametrize("packed", ["plain", "packed", "torn"])
def test_broken_files_are_named(
    tmp_path: Path, read: Callable[[Path], object], content: bytes, packed: str
) -> None:
    file = tmp_path / ("data.json" if packed == "plain" else "data.json.gz")
    whole = content if packed == "plain" else gzip.compress(content)
    file.write_bytes(whole[:-9] + b"\xff" if packed == "torn" else whole)
    with pytest.raises(ValueError, match=re.escape(file.name)):
        read(file)


def test_files_that_are_missing_empty_or_double_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is none"):
        load_games(tmp_path / "none.jsonl")
    with pytest.raises(FileNotFoundError, match="there is none"):
        load_plans(tmp_path / "none.json")
    (tmp_path / "empty.jsonl").write_text("\n", encoding="utf-8")
    with pytest.raises(ValueError, match="at least one"):
        load_games(tmp_path / "empty.jsonl")
    save_games(tmp_path / "double.jsonl", games=made(1) * 2)
    with pytest.raises(ValueError, match="twice"):
        load_games(tmp_path / "double.jsonl")


def test_games_are_read_from_a_folder(tmp_path: Path) -> None:
    first, second, sliced, unsolvable = made(4)
    for game, task, extra in (
        (first, first.id.split("/")[0], {"solvable": True, "walkthrough": list(first.walkthrough)}),
        (second, second.id.split("/")[0], None),
        (sliced, "pick_and_place_simple-AppleSliced-None-Fridge-1", {"solvable": True}),
        (unsolvable, "unsolvable", {"solvable": False}),
    ):
        folder = tmp_path / "json" / "valid_seen" / task / game.id.split("/")[1]
        folder.mkdir(parents=True)
        row = game.to_row()
        about = {
            "task_type": row["task_type"],
            "pddl_params": row["pddl_params"],
            "scene": row["scene"],
        }
        about["turk_annotations"] = {"anns": [{"task_desc": "Tidy up."}]}
        (folder / "traj_data.json").write_text(json.dumps(about), encoding="utf-8")
        if extra is None:
            (folder / "initial_state.pddl").write_text(game.pddl_problem, encoding="utf-8")
        else:
            (folder / "game.tw-pddl").write_text(
                json.dumps({"pddl_problem": game.pddl_problem, **extra})
            )
    found = {game.id: game for game in load_games(tmp_path / "json")}
    assert found == {
        first.id: replace(first, split="valid_seen", human_tasks=("Tidy up.",)),
        second.id: replace(second, split="valid_seen", human_tasks=("Tidy up.",), walkthrough=()),
    }


def test_plans_are_read_from_a_file(tmp_path: Path) -> None:
    furniture = {
        f"{kind}|+0{i}.00|+00.00|+00.00": [i, 0, 0, 30]
        for i, kind in enumerate(("Bed", "Desk", "Drawer"))
    }
    room = {
        "receptacles": {**furniture, "Statue|1": [0, 0, 0, 0]},
        "objects": ["Book", "Pen", LAMP, "Window"],
    }
    file = tmp_path / "plans.json.gz"
    with gzip.open(file, "wt", encoding="utf-8") as out:
        json.dump({str(number): room for number in range(301, 306)}, out)
    plans = load_plans(file)
    assert [plan.held_out for plan in plans] == [False] * 4 + [True]
    assert plans[0].kinds == {"Bed", "Desk", "Drawer"}
    maker = GameMaker(plans, task_types=["look_at_obj_in_light", "pick_and_place_simple"])
    assert {maker.make(seed, split="val").object_target for seed in range(20)} == {"Book", "Pen"}
    with pytest.raises(ValueError, match="no floor plan"):
        GameMaker(plans, task_types=["pick_heat_then_place_in_recep"]).make(0, split="train")


def test_env_pays_for_winning_only() -> None:
    env = AlfWorldEnv(max_steps=30)
    for seed in range(6):
        text, info = env.reset(seed=seed, split="val")
        assert text.startswith("-= Welcome")
        assert text.endswith("Admissible actions: " + ", ".join(info["admissible_commands"]))
        assert not info["success"]
        plan = env.walkthrough()
        assert plan is not None
        steps = [env.step(command.upper() + "  ") for command in plan]
        assert [(reward, terminated) for _, reward, terminated, _, _ in steps[:-1]] == [
            (0.0, False)
        ] * (len(plan) - 1)
        _, reward, terminated, truncated, info = steps[-1]
        assert (reward, terminated, truncated, info["success"]) == (10.0, True, False, True)
        with pytest.raises(EnvError, match="reset"):
            env.step("look")


def test_env_truncates_and_answers_nonsense() -> None:
    env = AlfWorldEnv(max_steps=4, win_reward=1.0, show_admissible=False)
    env.reset(seed=0)
    for nonsense in ("x" * 10_000_000, "\x00\x1b[2J\n\n", "../../etc/passwd"):
        text, reward, terminated, truncated, info = env.step(nonsense)
        assert (text, reward, terminated, truncated) == ("Nothing happens.", 0.0, False, False)
        assert not info["action_is_valid"]
    assert env.step("look")[2:4] == (False, True)


def test_winning_with_the_last_command_is_no_truncation() -> None:
    plan = MAKER.make(0, split="train").walkthrough
    env = AlfWorldEnv(max_steps=len(plan))
    env.reset(seed=0)
    assert [env.step(command)[2:4] for command in plan][-1] == (True, False)


def test_env_potential_rises_along_the_walkthrough() -> None:
    env = AlfWorldEnv()
    env.reset(seed=5)
    plan = env.walkthrough()
    assert plan is not None
    values = [env.potential()]
    for command in plan:
        env.step(command)
        values.append(env.potential())
    assert values == pytest.approx([-0.2 * left for left in range(len(plan), -1, -1)])


def test_env_is_deterministic_and_its_splits_are_disjoint(tmp_path: Path) -> None:
    file = tmp_path / "games.jsonl"
    save_games(
        file, games=[*made(7), *(replace(g, split="valid_unseen") for g in made(3, split="val"))]
    )
    env, other = AlfWorldEnv(games=str(file)), AlfWorldEnv(games=str(file))
    seen = {
        split: {env.reset(seed=s, split=split)[1]["game"] for s in range(10)}
        for split in ("train", "val")
    }
    assert len(seen["train"]) == 7
    assert len(seen["val"]) == 3
    assert not seen["train"] & seen["val"]
    assert env.reset(seed=3) == env.reset(seed=10) == other.reset(seed=3)
    name = next(iter(seen["val"]))
    assert env.reset(game_id=name)[1]["game"] == name
    with pytest.raises(EnvError, match="no game"):
        env.reset(game_id="nobody")
    with pytest.raises(EnvError, match="colour"):
        env.reset(colour="red")


def test_a_file_with_one_split_is_divided_the_same_way_every_time() -> None:
    games = made(30)
    halves = split_games(games)
    assert (len(halves["train"]), len(halves["val"])) == (27, 3)
    assert set(halves["train"]) | set(halves["val"]) == set(games)
    assert split_games(games[::-1])["val"] == halves["val"][::-1]
    with pytest.raises(ValueError, match="val_split"):
        split_games(games, val_split="valid_seen")
    with pytest.raises(ValueError, match="at least one game each"):
        split_games(games[:1])


def test_env_plays_behind_the_protocol_and_replays_exactly() -> None:
    def play() -> list[tuple[str, float, str | None]]:
        env = as_env(AlfWorldEnv(), config=EnvConfig(), name="alfworld")
        task = env.make_task(11, "train")
        env.reset(task)
        plan = MAKER.make(task.seed, split="train").walkthrough
        shown: list[tuple[str, float, str | None]] = []
        for command in plan:
            result = env.step(
                Message(role="assistant", content=f"<think>ok</think><answer>{command}</answer>")
            )
            shown.append((result.messages[0].content, result.reward, result.state_key))
        assert result.terminated
        return shown

    first = play()
    assert first == play()
    assert first[-1][1] == 10.0


def test_options_are_checked() -> None:
    for options, message in (
        ({"engine": "unity"}, "engine"),
        ({"task_text": "poem"}, "task_text"),
        ({"max_steps": 0}, "max_steps"),
        ({"task_types": ["fly"]}, "task types"),
    ):
        with pytest.raises(ValueError, match=message):
            AlfWorldEnv(**options)  # pyright: ignore


def played_by_expert(env: AlfWorldEnv, *, seed: int, slip: int = -1) -> list[tuple[str, str, bool]]:
    """(command, what it showed, valid) of an episode; `slip`: the turn in which a random command is
    played instead."""
    shown = [("", env.reset(seed=seed)[0], True)]
    over, rng = False, random.Random(seed)
    while not over:
        command = env.random_action(rng) if len(shown) - 1 == slip else env.expert_action()
        assert command is not None
        text, _, won, truncated, info = env.step(command)
        shown.append((command, text, info["action_is_valid"]))
        over = won or truncated
    assert env.expert_action() is None
    return shown


@pytest.mark.parametrize("show_admissible", [False, True])
def test_the_expert_wins_and_uses_only_what_it_was_shown(show_admissible: bool) -> None:
    env = AlfWorldEnv(show_admissible=show_admissible)
    refused = 0
    for seed in range(30):
        episode = played_by_expert(env, seed=seed)
        assert "success" in env._info(env._frame)  # pyright: ignore
        assert env._frame.won, seed  # pyright: ignore
        read = episode[0][1]
        for command, text, valid in episode[1:]:
            verb, _, rest = command.partition(" ")
            named = re.findall(r"[a-z]+ [0-9]+", rest)
            assert named, command
            assert all(f"{name}" in read for name in named), (command, read)
            refused += not valid
            assert valid or verb == "go", command
            read += text
    assert (refused == 0) is show_admissible, "only the list of commands says what is in reach"


def test_the_expert_recovers_from_a_slip() -> None:
    env = AlfWorldEnv(show_admissible=False)
    for seed in range(12):
        played_by_expert(env, seed=seed, slip=seed % 4)
        assert env._frame.won, seed  # pyright: ignore


def floorplans(path: Path, *, count: int) -> str:
    """A file of equal rooms, each with a table, a shelf and a desk."""
    room = {
        "receptacles": {
            f"{kind}|+0{number}.00|+00.50|-01.00": [number, 0.0, 0, 30]
            for number, kind in enumerate(("DiningTable", "Shelf", "Desk"))
        },
        "objects": ["Mug", "Book", "Pen"],
    }
    path.write_text(json.dumps({str(number): room for number in range(1, count + 1)}))
    return str(path)


def test_games_are_made_in_other_rooms_than_those_of_validation(tmp_path: Path) -> None:
    plans = floorplans(tmp_path / "plans.json", count=4)
    task_types = ["pick_and_place_simple"]
    maker = GameMaker(load_plans(plans), task_types=task_types)
    games = [maker.make(seed, split="train") for seed in range(40)]
    held_out = [replace(game, split="valid_unseen") for game in games]
    held_out = [game for game in held_out if game.floor_plan in ("FloorPlan2", "FloorPlan3")]
    file = tmp_path / "games.jsonl"
    save_games(file, games=held_out)
    env = AlfWorldEnv(games=str(file), floorplans=plans, task_types=task_types)
    rooms: dict[str, set[str]] = {"train": set(), "val": set()}
    for split, seen in rooms.items():
        for seed in range(20):
            env.reset(seed=seed, split=split)
            seen.add(env._game.floor_plan)  # pyright: ignore
    assert rooms == {
        "train": {"FloorPlan1", "FloorPlan4"},
        "val": {"FloorPlan2", "FloorPlan3"},
    }
    save_games(file, games=[replace(held_out[0], floor_plan="")])
    with pytest.raises(ValueError, match="does not name its room"):
        AlfWorldEnv(games=str(file), floorplans=plans)
    save_games(file, games=games[:3])
    with pytest.raises(ValueError, match="another split than train"):
        AlfWorldEnv(games=str(file), floorplans=plans)


def test_human_wording_falls_back_on_the_template() -> None:
    game = made(1)[0]
    assert game.task(wording="human") == game.task()
    told = replace(game, human_tasks=("Warm it up. ",))
    assert told.task(wording="human") == "Warm it up"


def test_everything_that_lies_somewhere_has_a_home_and_nothing_heavy_is_imported() -> None:
    assert all(held for held in HOLDS.values())
    code = (
        "import sys, turnwise.envs.games.alfworld;"
        "print([m for m in ('torch','textworld','alfworld') if m in sys.modules])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert out.stdout.strip() == "[]"


@pytest.mark.skipif(not DATA.is_dir(), reason="shared data is not here")
def test_made_games_on_the_floor_plans_can_be_won() -> None:
    plans = load_plans(DATA / "alfworld" / "floorplans.json.gz")
    assert len(plans) == 120
    maker = GameMaker(plans)
    for seed in range(40):
        for split in ("train", "val"):
            game = maker.make(seed, split=split)
            engine = game.engine()
            assert [engine.step(command).won for command in game.walkthrough][-1]
