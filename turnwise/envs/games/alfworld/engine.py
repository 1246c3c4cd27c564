"""ALFWorld's household domain in plain Python: the same commands and the same text as the original,
without a compiler.

The world is a set of facts. Fifteen kinds of action change them, each with a precondition; the
commands that the agent may give are exactly the actions whose preconditions hold. Two oddities of
the original are kept because its games are played with them: an object can be examined only while
it is held, and looking around where no receptacle is near shows nothing.
"""

import hashlib
from bisect import insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from turnwise.envs.games.alfworld import text
from turnwise.envs.games.alfworld.pddl import Fact
from turnwise.envs.games.alfworld.world import World

STATIONS = (
    ("clean", "cleanable", "sinkbasintype"),
    ("heat", "heatable", "microwavetype"),
    ("cool", "coolable", "fridgetype"),
)
"""Treatments of a held object: the verb, what the object must be, the receptacle's type."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """The output of an engine after a command.

    Example:
        >>> Frame(text="Nothing happens.", commands=("look",), won=False).won
        False
    """

    text: str
    commands: tuple[str, ...]
    """The admissible commands, sorted."""
    won: bool
    """True while the goal holds."""


class Engine(Protocol):
    """Plays one game: the plain engine below, or the original (`textworld.py`)."""

    def reset(self) -> Frame:
        """The opening frame."""
        ...

    def step(self, command: str) -> Frame:
        """The frame after a command. One that is not admissible changes nothing."""
        ...

    def state_key(self) -> str:
        """Names the current state: equal for equal states of one game."""
        ...

    def close(self) -> None:
        """Releases everything. May be called twice."""
        ...


Action = tuple[Callable[..., str], tuple[str, ...]]


class PlainEngine:
    """Plays one game.

    `step` takes exactly the commands of the last frame (surrounding space aside); anything else
    answers "Nothing happens." and leaves the world as it was.
    """

    def __init__(self, world: World, *, task: str) -> None:
        self.world = world
        self._task = task
        self._travel: dict[str, dict[str, Action]] = {}
        self.reset()

    def reset(self) -> Frame:
        """The opening frame: the room at a glance and the task."""
        world = self.world
        self.facts: set[Fact] = set(world.init)
        self.inside: dict[str, list[str]] = {}
        self.place = ""
        self.held: str | None = None
        self._left: set[tuple[str, str]] = set()
        for fact in sorted(world.init):
            if fact[0] == "inreceptacle":
                self.inside.setdefault(fact[2], []).append(fact[1])
            elif fact[0] == "atlocation":
                self.place = fact[2]
            elif fact[0] == "holds":
                self.held = fact[2]
        return self._frame(text.opening(self._look(opening=True), task=self._task))

    def step(self, command: str) -> Frame:
        """The frame after `command`."""
        action = self._actions.get(command.strip())
        if action is None:
            return Frame(text=text.NOTHING_HAPPENS, commands=self._commands, won=self.won())
        function, arguments = action
        return self._frame(function(*arguments))

    def won(self) -> bool:
        """True while the goal holds."""
        return all(any(facts <= self.facts for facts in part) for part in self.world.goal)

    def state_key(self) -> str:
        """Names the state: a digest of all facts that actions change."""
        state = "\n".join(sorted(map(" ".join, self.facts)))
        return hashlib.blake2b(state.encode(), digest_size=16).hexdigest()

    def copy(self) -> "PlainEngine":
        """An independent copy of the engine in the same state."""
        other = PlainEngine(self.world, task=self._task)
        other.facts = set(self.facts)
        other.inside = {receptacle: list(contents) for receptacle, contents in self.inside.items()}
        other.place, other.held, other._left = self.place, self.held, set(self._left)
        other._frame("")
        return other

    def close(self) -> None:
        """Nothing to release."""

    def is_reachable(self, receptacle: str) -> bool:
        """True where things can be put in and taken out: it has no door, or the door is open."""
        return not self._has("openable", receptacle) or ("opened", receptacle) in self.facts

    def _frame(self, feedback: str) -> Frame:
        self._actions = self._admissible()
        self._commands = tuple(sorted(self._actions))
        return Frame(text=feedback, commands=self._commands, won=self.won())

    def _has(self, trait: str, thing: str) -> bool:
        return (trait, thing) in self.world.traits

    def _name(self, thing: str) -> str:
        return self.world.names[thing]

    def _named(self, things: Iterable[str]) -> list[str]:
        return [self.world.names[thing] for thing in things]

    # Which commands there are

    def _admissible(self) -> dict[str, Action]:
        actions = dict(self._routes())
        for receptacle in self.world.nearby.get(self.place, ()):
            name = self._name(receptacle)
            actions[f"examine {name}"] = (self._examine_receptacle, (receptacle,))
            if self._has("openable", receptacle):
                if ("opened", receptacle) in self.facts:
                    actions[f"close {name}"] = (self._close, (receptacle,))
                else:
                    actions[f"open {name}"] = (self._open, (receptacle,))
            for thing in self.inside.get(receptacle, ()):
                if self._has("toggleable", thing):
                    actions[f"use {self._name(thing)}"] = (self._use, (thing,))
            if self.held is not None:
                self._add_uses_of_held(actions, receptacle=receptacle, held=self.held)
            elif ("holdsany", self.world.agent) not in self.facts and self.is_reachable(receptacle):
                for thing in self.inside.get(receptacle, ()):
                    if self._has("pickupable", thing):
                        actions[f"take {self._name(thing)} from {name}"] = (
                            self._take,
                            (thing, receptacle),
                        )
        if self.held is not None:
            actions[f"examine {self._name(self.held)}"] = (self._examine_object, (self.held,))
            if self.world.kinds.get(self.held) in ("knifetype", "butterknifetype"):
                for fact in self.facts:
                    if (
                        fact[0] == "objectatlocation"
                        and fact[2] == self.place
                        and self._has("sliceable", fact[1])
                    ):
                        command = f"slice {self._name(fact[1])} with {self._name(self.held)}"
                        actions[command] = (self._slice, (fact[1], self.held))
        return actions

    def _routes(self) -> dict[str, Action]:
        """Commands that depend on nothing but the place; made once per place."""
        routes = self._travel.get(self.place)
        if routes is None:
            routes = dict[str, Action]()
            routes |= {
                "look": (self._look, ()),
                "inventory": (self._inventory, ()),
                "help": (text.help_page, ()),
            }
            for receptacle, place in self.world.locations.items():
                if place != self.place:
                    routes[f"go to {self._name(receptacle)}"] = (self._go, (receptacle,))
            self._travel[self.place] = routes
        return routes

    def _add_uses_of_held(self, actions: dict[str, Action], *, receptacle: str, held: str) -> None:
        kinds, name, object_name = self.world.kinds, self._name(receptacle), self._name(held)
        if (
            self.is_reachable(receptacle)
            and (kinds.get(receptacle), kinds.get(held)) in self.world.can_contain
        ):
            actions[f"move {object_name} to {name}"] = (self._put, (held, receptacle))
        for verb, trait, kind in STATIONS:
            if kinds.get(receptacle) == kind and self._has(trait, held):
                actions[f"{verb} {object_name} with {name}"] = (
                    self._treat,
                    (verb, held, receptacle),
                )

    # What they do

    def _go(self, receptacle: str) -> str:
        self.facts.discard(("atlocation", self.world.agent, self.place))
        self.place = self.world.locations[receptacle]
        self.facts.add(("atlocation", self.world.agent, self.place))
        return text.arrive(self._name(receptacle), self._examine_receptacle(receptacle))

    def _open(self, receptacle: str) -> str:
        self.facts.add(("opened", receptacle))
        return text.opens(self._name(receptacle), self._examine_receptacle(receptacle))

    def _close(self, receptacle: str) -> str:
        self.facts.discard(("opened", receptacle))
        return text.closes(self._name(receptacle))

    def _take(self, thing: str, receptacle: str) -> str:
        agent = self.world.agent
        self.facts -= {("inreceptacle", thing, receptacle), ("objectatlocation", thing, self.place)}
        self.facts |= {("holds", agent, thing), ("holdsany", agent)}
        self.inside[receptacle].remove(thing)
        self._left.add((thing, receptacle))
        self.held = thing
        return text.takes(self._name(thing), self._name(receptacle))

    def _put(self, thing: str, receptacle: str) -> str:
        agent = self.world.agent
        self.facts -= {("holds", agent, thing), ("holdsany", agent)}
        self.facts |= {("inreceptacle", thing, receptacle), ("objectatlocation", thing, self.place)}
        contents = self.inside.setdefault(receptacle, [])
        if thing not in contents:
            insort(contents, thing)
        self._left.discard((thing, receptacle))
        self.held = None
        return text.moves(self._name(thing), self._name(receptacle))

    def _treat(self, verb: str, thing: str, receptacle: str) -> str:
        if verb == "clean":
            self.facts.add(("isclean", thing))
        elif verb == "heat":
            self.facts.add(("ishot", thing))
            self.facts.discard(("iscool", thing))
        else:
            self.facts.add(("iscool", thing))
            self.facts.discard(("ishot", thing))
        return text.treats(verb, self._name(thing), self._name(receptacle))

    def _use(self, thing: str) -> str:
        self.facts.add(("istoggled", thing))
        return text.turns_on(self._name(thing))

    def _slice(self, thing: str, knife: str) -> str:
        self.facts.add(("issliced", thing))
        return text.slices(self._name(thing), self._name(knife))

    # What they show

    def _examine_receptacle(self, receptacle: str) -> str:
        contents = self._named(self.inside.get(receptacle, ()))
        openable = self._has("openable", receptacle)
        return text.receptacle(
            self._name(receptacle),
            contents,
            door=None
            if not openable
            else "open"
            if ("opened", receptacle) in self.facts
            else "closed",
        )

    def _examine_object(self, thing: str) -> str:
        if self._has("isreceptacleobject", thing):
            return text.vessel(self._name(thing), self._named(self.world.in_object.get(thing, ())))
        return text.condition(
            self._name(thing),
            clean=("isclean", thing) in self.facts,
            hot=("ishot", thing) in self.facts,
            cool=("iscool", thing) in self.facts,
            sliced=("issliced", thing) in self.facts,
            lit=("istoggled", thing) in self.facts and self._has("toggleable", thing),
        )

    def _inventory(self) -> str:
        return text.inventory(None if self.held is None else self._name(self.held))

    def _look(self, *, opening: bool = False) -> str:
        near = self.world.nearby.get(self.place, ())
        if not near:
            return text.middle_of_room(self._named(self.world.locations) if opening else ())
        # Only what was taken from a receptacle here and put into another one here counts as lying
        # beside it.
        beside = sorted(
            (thing, receptacle)
            for thing, receptacle in self._left
            if receptacle in near and ("objectatlocation", thing, self.place) in self.facts
        )
        return text.facing(self._named(near), self._named(thing for thing, _ in beside))
