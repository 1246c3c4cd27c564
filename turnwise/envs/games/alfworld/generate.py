"""Generates games: a floor plan, objects placed on it, and a feasible task. Deterministic in the
seed."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from turnwise.envs.games.alfworld import rooms
from turnwise.envs.games.alfworld.games import TASKS, Game
from turnwise.envs.games.alfworld.planner import TREATMENTS, find_plan
from turnwise.envs.games.alfworld.rooms import FloorPlan, Receptacle
from turnwise.seeding import derive_seed

TREATED_AT = {"clean": "SinkBasin", "heat": "Microwave", "cool": "Fridge"}
_SUITABLE = {"clean": rooms.CLEANABLE, "heat": rooms.HEATABLE, "cool": rooms.COOLABLE}
_TRAITS = {
    "cleanable": rooms.CLEANABLE,
    "heatable": rooms.HEATABLE,
    "coolable": rooms.COOLABLE,
    "sliceable": rooms.FOOD,
    "isReceptacleObject": rooms.VESSELS,
}
_KNOWN_OBJECTS = sorted({thing for held in rooms.HOLDS.values() for thing in held} | {rooms.LAMP})
_IN_PLACE = "(objectType ?o {obj}Type) (receptacleType ?r {recep}Type) (inReceptacle ?o ?r)"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Thing:
    id: str
    kind: str
    receptacle: Receptacle


class GameMaker:
    """Makes endless games on floor plans. Those of "train" and "val" never share a floor plan.

    Example:
        >>> maker = GameMaker(rooms.sample_plans())
        >>> game = maker.make(7, split="train")
        >>> game == maker.make(7, split="train"), game.task_type in TASKS, len(game.walkthrough) > 1
        (True, True, True)
    """

    def __init__(
        self, plans: Iterable[FloorPlan], *, task_types: Sequence[str] = tuple(TASKS)
    ) -> None:
        unknown = sorted(set(task_types) - set(TASKS))
        if unknown or not task_types:
            raise ValueError(f"task types are some of {sorted(TASKS)}, got {unknown or 'none'}")
        # Kept by split and task, as asking every plan again would take longer than making the game.
        self._plans: dict[tuple[str, str], list[FloorPlan]] = {}
        for plan in plans:
            for task_type in task_types:
                if targets(plan, task_type):
                    self._plans.setdefault(
                        ("val" if plan.held_out else "train", task_type), []
                    ).append(plan)
        self._task_types = tuple(sorted(set(task_types)))

    def make(self, seed: int, *, split: str) -> Game:
        """The game of this seed, with a walkthrough. It can be won and is not won at the start."""
        if split not in ("train", "val"):
            raise ValueError(f"made games belong to the split 'train' or 'val', got {split!r}")
        rng = random.Random(derive_seed(seed, f"alfworld {split}"))
        task_type = rng.choice(self._task_types)
        choices = self._plans.get((split, task_type))
        if not choices:
            raise ValueError(
                f"no floor plan for {split} allows the task {task_type}: give more plans or other "
                "task_types"
            )
        plan = rng.choice(choices)
        obj, parent = rng.choice(targets(plan, task_type))
        game = _lay_out(
            plan, task_type=task_type, obj=obj, parent=parent, trial=f"{split}_{seed}", rng=rng
        )
        walkthrough = find_plan(game)
        if not walkthrough:
            raise RuntimeError(
                f"a made game is never won at the start and always winnable, {game.id} is not"
            )
        return replace(game, split=split, walkthrough=walkthrough)


def targets(plan: FloorPlan, task_type: str) -> tuple[tuple[str, str], ...]:
    """The (object type, receptacle type) pairs that make the task possible on this plan, and not
    won from the start.

    For the lamp the receptacle type is empty. The object must have somewhere else to lie than where
    it is to be brought, and a treatment is not asked for in the very place where it is done.
    """
    kinds = plan.kinds
    movable = sorted(
        thing for thing in plan.objects if any(thing in rooms.HOLDS[kind] for kind in kinds)
    )
    if task_type == "look_at_obj_in_light":
        if rooms.LAMP in plan.objects and kinds & rooms.LAMP_STANDS_ON:
            return tuple((thing, "") for thing in movable)
        return ()
    station = ""
    if task_type in TREATMENTS:
        verb = TREATMENTS[task_type][0]
        station = TREATED_AT[verb]
        if station not in kinds:
            return ()
        movable = [thing for thing in movable if thing in _SUITABLE[verb]]
    return tuple(
        (thing, parent)
        for thing in movable
        for parent in sorted(kinds - {station})
        if thing in rooms.HOLDS[parent]
        and any(thing in rooms.HOLDS[kind] for kind in kinds - {parent})
    )


def _lay_out(
    plan: FloorPlan, *, task_type: str, obj: str, parent: str, trial: str, rng: random.Random
) -> Game:
    things: list[_Thing] = []

    def strew(kind: str, count: int) -> None:
        barred = parent if kind == obj else ""
        spots = [r for r in plan.receptacles if r.kind != barred and kind in rooms.HOLDS[r.kind]]
        if kind == rooms.LAMP:
            spots = [r for r in plan.receptacles if r.kind in rooms.LAMP_STANDS_ON]
        for spot in rng.choices(spots, k=count) if spots else ():
            where = "|".join(
                f"{rng.choice('+-')}{rng.randrange(400) / 100:05.2f}" for _ in range(3)
            )
            things.append(_Thing(id=f"{kind}|{where}|{len(things)}", kind=kind, receptacle=spot))

    strew(obj, rng.randint(2 if task_type == "pick_two_obj_and_place" else 1, 3))
    for kind in sorted(plan.objects - {obj, rooms.LAMP}):
        if any(kind in held for held in rooms.HOLDS.values()):
            strew(kind, rng.choice((0, 1, 1, 2)))
    if rooms.LAMP in plan.objects:
        strew(rooms.LAMP, 1)
    toggle = rooms.LAMP if task_type == "look_at_obj_in_light" else ""
    return Game(
        id=f"{task_type}-{obj}-None-{parent or toggle}-{plan.name}/{trial}",
        split="",
        task_type=task_type,
        object_target=obj,
        parent_target=parent,
        toggle_target=toggle,
        pddl_problem=_problem(plan, things, goal=_goal(task_type, obj=obj, recep=parent)),
        floor_plan=plan.name,
    )


def _goal(task_type: str, *, obj: str, recep: str) -> str:
    if task_type == "look_at_obj_in_light":
        return (
            "(exists (?t - object ?r - receptacle ?a - agent ?l - location) (and (objectType ?t "
            f"{rooms.LAMP}Type)"
            " (toggleable ?t) (isToggled ?t) (receptacleAtLocation ?r ?l) (atLocation ?a ?l) "
            "(inReceptacle ?t ?r)))"
            f" (exists (?o - object ?a - agent) (and (objectType ?o {obj}Type) (holds ?a ?o)))"
        )
    one = _IN_PLACE.format(obj=obj, recep=recep)
    if task_type == "pick_two_obj_and_place":
        other = f"(exists (?p - object) (and (not (= ?o ?p)) {one.replace('?o', '?p')}))"
        return f"(exists (?r - receptacle) (exists (?o - object) (and {one} {other})))"
    if task_type in TREATMENTS:
        _, trait, _, _ = TREATMENTS[task_type]
        state = {"cleanable": "isClean", "heatable": "isHot", "coolable": "isCool"}[trait]
        one += f" ({trait} ?o) ({state} ?o)"
    return f"(exists (?r - receptacle) (exists (?o - object) (and {one})))"


def _problem(plan: FloorPlan, things: Sequence[_Thing], *, goal: str) -> str:
    """The game as PDDL, which the original reads too."""
    places = sorted({receptacle.place for receptacle in plan.receptacles})
    objects = ["agent1 - agent", *(f"{kind}Type - otype" for kind in _KNOWN_OBJECTS)]
    objects += [f"{kind}Type - rtype" for kind in sorted(rooms.HOLDS)]
    objects += [f"{_mangle(place)} - location" for place in ["loc|0|0|0|0", *places]]
    facts = ["atLocation agent1 " + _mangle("loc|0|0|0|0")]
    for receptacle in plan.receptacles:
        name = _mangle(receptacle.id)
        objects.append(f"{name} - receptacle")
        facts += [
            f"receptacleType {name} {receptacle.kind}Type",
            f"receptacleAtLocation {name} {_mangle(receptacle.place)}",
        ]
        if receptacle.kind in rooms.OPENABLE:
            facts.append(f"openable {name}")
    for thing in things:
        name = _mangle(thing.id)
        objects.append(f"{name} - object")
        facts += [
            f"objectType {name} {thing.kind}Type",
            f"inReceptacle {name} {_mangle(thing.receptacle.id)}",
        ]
        facts.append(f"objectAtLocation {name} {_mangle(thing.receptacle.place)}")
        facts.append(f"toggleable {name}" if thing.kind == rooms.LAMP else f"pickupable {name}")
        facts += [f"{trait} {name}" for trait, kinds in _TRAITS.items() if thing.kind in kinds]
    present = {thing.kind for thing in things}
    for kind in sorted(plan.kinds):
        facts += [
            f"canContain {kind}Type {held}Type" for held in sorted(rooms.HOLDS[kind] & present)
        ]
    lines = "\n".join(f"  ({fact})" for fact in facts)
    declared = "\n".join(f"  {line}" for line in objects)
    return (
        f"(define (problem made)\n(:domain alfred)\n(:objects\n{declared})\n"
        f"(:init\n{lines})\n(:goal (and {goal})))\n"
    )


def _mangle(name: str) -> str:
    """The name in the letters that PDDL allows."""
    return (
        name.replace("|", "_bar_")
        .replace("+", "_plus_")
        .replace("-", "_minus_")
        .replace(".", "_dot_")
    )
