"""The part of a game that never changes: its tables, made from a PDDL problem."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from turnwise.envs.games.alfworld.pddl import Fact, Problem, ground_goal

DYNAMIC = frozenset(
    {
        "atlocation",
        "inreceptacle",
        "objectatlocation",
        "opened",
        "holds",
        "holdsany",
        "isclean",
        "ishot",
        "iscool",
        "istoggled",
        "issliced",
    }
)
"""The predicates that actions change and that text or goals depend on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """The static tables of a game: capacities, positions and names."""

    names: Mapping[str, str]
    """Id -> display name, such as "drawer 3"."""
    agent: str
    locations: Mapping[str, str]
    """Receptacle -> where one stands to use it, sorted by receptacle."""
    nearby: Mapping[str, tuple[str, ...]]
    """Location -> the receptacles that are used from there, sorted."""
    kinds: Mapping[str, str]
    """Object or receptacle -> its type."""
    can_contain: frozenset[tuple[str, str]]
    """(receptacle type, object type)."""
    traits: frozenset[Fact]
    """Facts of one argument that never change, such as ("heatable", apple)."""
    in_object: Mapping[str, tuple[str, ...]]
    """Object that is a vessel -> what lies in it. No action of this domain changes it."""
    init: frozenset[Fact]
    """The facts of `DYNAMIC` predicates at the start."""
    goal: tuple[tuple[frozenset[Fact], ...], ...]
    """All parts must hold; a part holds where one of its sets of facts does."""


def build_world(problem: Problem) -> World:
    """The tables of a game. Raises ValueError where the plain engine cannot play it."""
    by_predicate: dict[str, list[Fact]] = {}
    for fact in sorted(problem.init):
        by_predicate.setdefault(fact[0], []).append(fact)
    agents = [name for name, kind in problem.types.items() if kind == "agent"]
    starts = by_predicate.get("atlocation", [])
    if len(agents) != 1 or len(starts) != 1:
        raise ValueError(f"a game has one agent at one place, got agents {agents} and {starts}")
    locations: dict[str, str] = {}
    nearby: dict[str, list[str]] = {}
    for _, receptacle, place in by_predicate.get("receptacleatlocation", []):
        if locations.setdefault(receptacle, place) != place:
            raise ValueError(
                f"a receptacle is used from one place, {receptacle} from several: use engine: "
                "textworld"
            )
        nearby.setdefault(place, []).append(receptacle)
    in_object: dict[str, list[str]] = {}
    for _, inner, outer in by_predicate.get("inreceptacleobject", []):
        in_object.setdefault(outer, []).append(inner)
    typed = by_predicate.get("objecttype", []) + by_predicate.get("receptacletype", [])
    return World(
        names=display_names({argument for fact in problem.init for argument in fact[1:]}),
        agent=agents[0],
        locations=locations,
        nearby={place: tuple(found) for place, found in nearby.items()},
        kinds={fact[1]: fact[2] for fact in typed},
        can_contain=frozenset((fact[1], fact[2]) for fact in by_predicate.get("cancontain", [])),
        traits=frozenset(
            fact for fact in problem.init if len(fact) == 2 and fact[0] not in DYNAMIC
        ),
        in_object={outer: tuple(inner) for outer, inner in in_object.items()},
        init=frozenset(fact for fact in problem.init if fact[0] in DYNAMIC),
        goal=ground_goal(problem, dynamic=DYNAMIC),
    )


def display_names(ids: Iterable[str]) -> dict[str, str]:
    """Id -> name with a number. Things of one kind are numbered downwards in the order of their
    ids.

    Example:
        >>> display_names(["cup_bar_1", "cup_bar_2", "sink_bar_1_bar_sinkbasin"])
        {'cup_bar_1': 'cup 2', 'cup_bar_2': 'cup 1', 'sink_bar_1_bar_sinkbasin': 'sinkbasin 1'}
    """
    by_kind: dict[str, list[str]] = {}
    for name in sorted(ids):
        kind, bar, _ = name.partition("_bar_")
        if bar:
            by_kind.setdefault(kind + "basin" if "basin" in name else kind, []).append(name)
    names: dict[str, str] = {}
    for kind, members in by_kind.items():
        for index, name in enumerate(members):
            names[name] = f"{kind} {len(members) - index}"
    return names
