"""The plain ALFWorld engine on a room small enough to write every expected line out."""

import pytest

from turnwise.envs.games.alfworld.engine import PlainEngine
from turnwise.envs.games.alfworld.pddl import ground_goal, parse_problem
from turnwise.envs.games.alfworld.text import NOTHING_HAPPENS
from turnwise.envs.games.alfworld.world import build_world

ROOM = """
(define (problem room) (:domain alfred)
(:objects agent1 - agent  loc_bar_0 loc_bar_1 loc_bar_2 loc_bar_3 loc_bar_4 - location
  Apple_bar_1 Apple_bar_2 Mug_bar_1 Knife_bar_1 DeskLamp_bar_1 Pen_bar_1 - object
  CounterTop_bar_1 Shelf_bar_1 Fridge_bar_1 Microwave_bar_1 Sink_bar_1_bar_SinkBasin - receptacle)
(:init ; a comment
  (= (total-cost) 0)
  (atLocation agent1 loc_bar_0)
  (receptacleType CounterTop_bar_1 CounterTopType) (receptacleAtLocation CounterTop_bar_1 loc_bar_1)
  (receptacleType Shelf_bar_1 ShelfType) (receptacleAtLocation Shelf_bar_1 loc_bar_1)
  (receptacleType Fridge_bar_1 FridgeType) (receptacleAtLocation Fridge_bar_1 loc_bar_2) (openable Fridge_bar_1)
  (receptacleType Microwave_bar_1 MicrowaveType) (receptacleAtLocation Microwave_bar_1 loc_bar_3)
  (openable Microwave_bar_1)
  (receptacleType Sink_bar_1_bar_SinkBasin SinkBasinType) (receptacleAtLocation Sink_bar_1_bar_SinkBasin loc_bar_4)
  (objectType Apple_bar_1 AppleType) (inReceptacle Apple_bar_1 CounterTop_bar_1)
  (objectAtLocation Apple_bar_1 loc_bar_1)
  (objectType Apple_bar_2 AppleType) (inReceptacle Apple_bar_2 Fridge_bar_1) (objectAtLocation Apple_bar_2 loc_bar_2)
  (objectType Mug_bar_1 MugType) (inReceptacle Mug_bar_1 CounterTop_bar_1) (objectAtLocation Mug_bar_1 loc_bar_1)
  (objectType Knife_bar_1 KnifeType) (inReceptacle Knife_bar_1 Shelf_bar_1) (objectAtLocation Knife_bar_1 loc_bar_1)
  (objectType Pen_bar_1 PenType) (inReceptacle Pen_bar_1 Shelf_bar_1) (inReceptacle Pen_bar_1 CounterTop_bar_1)
  (objectAtLocation Pen_bar_1 loc_bar_1)
  (objectType DeskLamp_bar_1 DeskLampType) (inReceptacle DeskLamp_bar_1 Shelf_bar_1) (toggleable DeskLamp_bar_1)
  (objectAtLocation DeskLamp_bar_1 loc_bar_1)
  (pickupable Apple_bar_1) (pickupable Apple_bar_2) (pickupable Mug_bar_1) (pickupable Knife_bar_1)
  (pickupable Pen_bar_1) (isReceptacleObject Mug_bar_1)
  (cleanable Apple_bar_1) (heatable Apple_bar_1) (coolable Apple_bar_1) (sliceable Apple_bar_1)
  (sliceable Apple_bar_2)
  (canContain CounterTopType AppleType) (canContain CounterTopType KnifeType) (canContain FridgeType AppleType)
  (canContain ShelfType AppleType) (canContain ShelfType PenType) (canContain CounterTopType PenType))
(:goal (and (exists (?r - receptacle) (exists (?o - object)
  (and (heatable ?o) (objectType ?o AppleType) (receptacleType ?r FridgeType) (isHot ?o) (inReceptacle ?o ?r)))))))
"""
WALK = {
    f"go to {name}"
    for name in ("countertop 1", "fridge 1", "microwave 1", "shelf 1", "sinkbasin 1")
}
ALWAYS = {"help", "inventory", "look"}
TO_HOT_APPLE = (
    "go to countertop 1",
    "take apple 2 from countertop 1",
    "go to microwave 1",
    "heat apple 2 with microwave 1",
)


def room(*commands: str) -> PlainEngine:
    """The room after these commands, each of which must be understood."""
    engine = PlainEngine(build_world(parse_problem(ROOM)), task="put a hot apple in fridge")
    for command in commands:
        assert engine.step(command).text != NOTHING_HAPPENS, command
    return engine


def test_opening_names_everything_and_the_task() -> None:
    frame = room().reset()
    assert frame.text == (
        "-= Welcome to TextWorld, ALFRED! =-\n\nYou are in the middle of a room. Looking quickly "
        "around you, you see "
        "a countertop 1, a fridge 1, a microwave 1, a shelf 1, and a sinkbasin 1.\n\n"
        "Your task is to: put a hot apple in fridge."
    )
    assert set(frame.commands) == WALK | ALWAYS
    assert list(frame.commands) == sorted(frame.commands)
    assert not frame.won


def test_looking_again_in_the_middle_of_the_room_shows_nothing() -> None:
    assert room().step("look").text == (
        "You are in the middle of a room. Looking quickly around you, you see nothing."
    )


def test_commands_at_a_place_with_two_receptacles() -> None:
    engine = room()
    frame = engine.step("go to shelf 1")
    assert (
        frame.text
        == "You arrive at shelf 1. On the shelf 1, you see a desklamp 1, a knife 1, and a pen 1."
    )
    assert set(frame.commands) == ALWAYS | WALK - {"go to shelf 1", "go to countertop 1"} | {
        "examine shelf 1",
        "examine countertop 1",
        "take apple 2 from countertop 1",
        "take mug 1 from countertop 1",
        "take pen 1 from countertop 1",
        "take pen 1 from shelf 1",
        "take knife 1 from shelf 1",
        "use desklamp 1",
    }
    assert (
        engine.step("look").text
        == "You are facing the countertop 1, and shelf 1. Next to it, you see nothing."
    )


def test_what_moved_between_neighbours_lies_next_to_them() -> None:
    engine = room("go to shelf 1", "take apple 2 from countertop 1", "move apple 2 to shelf 1")
    assert engine.step("look").text.endswith("Next to it, you see a apple 2.")
    assert engine.step("examine shelf 1").text.startswith(
        "On the shelf 1, you see a apple 2, a desklamp 1,"
    )
    for command in ("take apple 2 from shelf 1", "move apple 2 to countertop 1"):
        engine.step(command)
    # It has left the shelf now.
    assert engine.step("look").text.endswith("Next to it, you see a apple 2.")


def test_an_object_in_two_receptacles_stays_in_the_other() -> None:
    engine = room("go to shelf 1", "take pen 1 from shelf 1")
    assert (
        engine.step("examine shelf 1").text
        == "On the shelf 1, you see a desklamp 1, and a knife 1."
    )
    assert "a pen 1" in engine.step("examine countertop 1").text
    engine.step("move pen 1 to countertop 1")
    assert engine.inside["countertop_bar_1"].count("pen_bar_1") == 1


def test_doors() -> None:
    engine = room("go to fridge 1")
    assert engine.step("examine fridge 1").text == "The fridge 1 is closed."
    frame = engine.step("open fridge 1")
    assert frame.text == "You open the fridge 1. The fridge 1 is open. In it, you see a apple 1."
    assert {"close fridge 1", "take apple 1 from fridge 1"} <= set(frame.commands)
    frame = engine.step("close fridge 1")
    assert frame.text == "You close the fridge 1."
    assert "open fridge 1" in frame.commands
    assert "take apple 1 from fridge 1" not in frame.commands


def test_hand_and_treatments() -> None:
    engine = room("go to countertop 1")
    assert engine.step("inventory").text == "You are not carrying anything."
    frame = engine.step("take apple 2 from countertop 1")
    assert frame.text == "You pick up the apple 2 from the countertop 1."
    assert not [command for command in frame.commands if command.startswith("take")]
    assert engine.step("inventory").text == "You are carrying: a apple 2."
    assert engine.step("examine apple 2").text == "There's nothing special about apple 2."
    engine.step("go to sinkbasin 1")
    assert (
        engine.step("clean apple 2 with sinkbasin 1").text
        == "You clean the apple 2 using the sinkbasin 1."
    )
    assert engine.step("examine apple 2").text == "This is a clean apple 2."
    engine.step("go to fridge 1")
    assert (
        engine.step("cool apple 2 with fridge 1").text == "You cool the apple 2 using the fridge 1."
    )
    assert engine.step("examine apple 2").text == "This is a cool and clean apple 2."
    engine.step("go to microwave 1")
    assert (
        engine.step("heat apple 2 with microwave 1").text
        == "You heat the apple 2 using the microwave 1."
    )
    assert engine.step("examine apple 2").text == "This is a hot and clean apple 2."
    assert ("iscool", "apple_bar_1") not in engine.facts
    engine.step("go to fridge 1")
    assert ("ishot", "apple_bar_1") not in room(
        *TO_HOT_APPLE, "go to fridge 1", "cool apple 2 with fridge 1"
    ).facts
    assert "move apple 2 to fridge 1" not in engine.step("look").commands
    engine.step("open fridge 1")
    frame = engine.step("move apple 2 to fridge 1")
    assert frame.text == "You move the apple 2 to the fridge 1."
    assert frame.won


def test_knife_slices_what_is_at_the_place_even_behind_a_door() -> None:
    engine = room("go to shelf 1")
    frame = engine.step("take knife 1 from shelf 1")
    assert "slice apple 2 with knife 1" in frame.commands
    assert (
        engine.step("slice apple 2 with knife 1").text == "You sliced the apple 2 with the knife 1."
    )
    assert "slice apple 1 with knife 1" in engine.step("go to fridge 1").commands


def test_lamp_and_vessel() -> None:
    engine = room("go to shelf 1")
    for _ in range(2):
        assert engine.step("use desklamp 1").text == "You turn on the desklamp 1."
    engine.step("take mug 1 from countertop 1")
    assert engine.step("examine mug 1").text == "This is a normal mug 1. In it, you see nothing."


def test_help_page() -> None:
    lines = room().step("help").text.split("\n")
    assert lines[0] == "Available commands:"
    assert lines[1] == "  look:                             look around your current location"
    assert lines[6] == "  take (object) from (receptacle):  take an object from a receptacle"
    assert lines[7] == "  move (object) to (receptacle):  place an object in or on a receptacle"
    assert len(lines) == 15
    assert lines[-1] == ""


@pytest.mark.parametrize(
    "command", ["", "dance", "go to fridge 2", "Look", "look\x00", "take apple 1 from fridge 1"]
)
def test_what_is_not_admissible_changes_nothing(command: str) -> None:
    engine = room("go to fridge 1")
    before, key = engine.step("look").commands, engine.state_key()
    frame = engine.step(command)
    assert (frame.text, frame.commands, engine.state_key()) == (NOTHING_HAPPENS, before, key)


def test_copy_goes_its_own_way() -> None:
    engine = room("go to shelf 1", "take pen 1 from shelf 1")
    key = engine.state_key()
    other = engine.copy()
    assert other.state_key() == key
    other.step("move pen 1 to countertop 1")
    assert engine.state_key() == key != other.state_key()
    assert engine.reset().text == room().reset().text


def test_goal_is_grounded_to_facts_that_change() -> None:
    (part,) = ground_goal(parse_problem(ROOM), dynamic=frozenset({"ishot", "inreceptacle"}))
    assert part == (
        frozenset({("ishot", "apple_bar_1"), ("inreceptacle", "apple_bar_1", "fridge_bar_1")}),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hello", r"starts with \(define"),
        ("(define (:objects a) (:init)", "1 parentheses open"),
        ("(define))", "never opened"),
        ("(define (:objects a) (:init))", "has a section"),
        ("(define (:objects) (:init (a (b))) (:goal (and)))", "a fact is"),
        ("(" * 100, "deep"),
    ],
)
def test_bad_problems_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_problem(text)


def test_goals_beyond_the_plain_engine_are_refused() -> None:
    problem = parse_problem("(define (:objects a) (:init) (:goal (or (held a) (seen a))))")
    with pytest.raises(ValueError, match="engine: textworld"):
        ground_goal(problem, dynamic=frozenset({"held"}))
