"""A player with full knowledge of the world: finds commands that reach a game's goal, if there are
any.

Used to check that generated games can be won, to write walkthroughs, and to measure the distance to
the goal. Every place is one command away from every other, so a plan is short and no search is
needed.
"""

from collections.abc import Iterable, Sequence

from turnwise.envs.games.alfworld import text
from turnwise.envs.games.alfworld.engine import PlainEngine
from turnwise.envs.games.alfworld.games import Game

TREATMENTS = {
    "pick_clean_then_place_in_recep": ("clean", "cleanable", "isclean", "sinkbasintype"),
    "pick_heat_then_place_in_recep": ("heat", "heatable", "ishot", "microwavetype"),
    "pick_cool_then_place_in_recep": ("cool", "coolable", "iscool", "fridgetype"),
}
"""Task -> the verb, what an object must be for it, what it is afterwards, and where it is done."""


class Stuck(Exception):
    """No command makes progress."""


def find_plan(game: Game, *, engine: PlainEngine | None = None) -> tuple[str, ...] | None:
    """Commands that win the game from the engine's state (the start, without one), or None where
    none were found.

    The engine itself stays where it is.
    """
    player = Planner(game.engine() if engine is None else engine.copy(), game)
    try:
        if not player.engine.won():
            player.play()
    except Stuck:
        return None
    return tuple(player.commands) if player.engine.won() else None


class Planner:
    """Plays a game to its end, and notes the commands."""

    def __init__(self, engine: PlainEngine, game: Game) -> None:
        self.engine = engine
        self.world = engine.world
        self.game = game
        self.commands: list[str] = []
        self.wanted = game.object_target.lower() + "type"
        self.target = game.parent_target.lower() + "type"

    def play(self) -> None:
        if self.game.task_type == "look_at_obj_in_light":
            self.look_in_light()
        elif self.game.task_type == "pick_two_obj_and_place":
            self.bring_two()
        else:
            self.bring_one()

    def look_in_light(self) -> None:
        self.hold(self.things_of(self.wanted))
        lamps = self.things_of(self.game.toggle_target.lower() + "type")
        spots = [
            r
            for lamp in lamps
            for r in self.receptacles_with(lamp)
            if ("toggleable", lamp) in self.world.traits
        ]
        receptacle = self.nearest(spots)
        lamp = next(thing for thing in self.contents(receptacle) if thing in lamps)
        self.go(receptacle)
        if not self.engine.won():
            self.do(f"use {self.world.names[lamp]}")

    def bring_one(self) -> None:
        things = self.things_of(self.wanted)
        treatment = TREATMENTS.get(self.game.task_type)
        if treatment is None:
            self.hold(things)
        else:
            verb, trait, result, station = treatment
            things = [thing for thing in things if (trait, thing) in self.world.traits]
            ready = [thing for thing in things if (result, thing) in self.engine.facts]
            held = self.hold(ready or things)
            if held not in ready:
                place = self.nearest(self.receptacles_of(station))
                self.go(place)
                self.do(f"{verb} {self.world.names[held]} with {self.world.names[place]}")
        self.put(self.nearest(self.receptacles_of(self.target)))

    def bring_two(self) -> None:
        things = set(self.things_of(self.wanted))
        receptacles = self.receptacles_of(self.target)
        if not receptacles:
            raise Stuck
        there = {receptacle: things & set(self.contents(receptacle)) for receptacle in receptacles}
        best = max(len(found) for found in there.values())
        target = self.nearest([r for r in receptacles if len(there[r]) == best])
        for _ in range(2 - best):
            self.hold(sorted(things - set(self.contents(target))))
            self.put(target)

    def hold(self, things: Iterable[str]) -> str:
        """Takes one of the things, the nearest, after putting down whatever else is in the hand."""
        choice = list(things)
        held = self.engine.held
        if held is not None and held in choice:
            return held
        if held is not None:
            self.put_down()
        sources = {
            r: thing
            for thing in choice
            for r in self.receptacles_with(thing)
            if self.is_pickupable(thing)
        }
        receptacle = self.nearest(sources)
        self.reach(receptacle)
        self.do(f"take {self.world.names[sources[receptacle]]} from {self.world.names[receptacle]}")
        return sources[receptacle]

    def put_down(self) -> None:
        kinds, held = self.world.kinds, self.engine.held
        fitting = [
            r
            for r in self.world.locations
            if (kinds[r], kinds[held or ""]) in self.world.can_contain
        ]
        self.put(self.nearest(fitting))

    def put(self, receptacle: str) -> None:
        self.reach(receptacle)
        self.do(
            f"move {self.world.names[self.engine.held or '']} to {self.world.names[receptacle]}"
        )

    def reach(self, receptacle: str) -> None:
        self.go(receptacle)
        if not self.engine.is_reachable(receptacle):
            self.do(f"open {self.world.names[receptacle]}")

    def go(self, receptacle: str) -> None:
        if self.world.locations[receptacle] != self.engine.place:
            self.do(f"go to {self.world.names[receptacle]}")

    def do(self, command: str) -> None:
        if self.engine.step(command).text == text.NOTHING_HAPPENS:
            raise Stuck
        self.commands.append(command)

    def nearest(self, receptacles: Iterable[str]) -> str:
        """The receptacle that costs the fewest commands to get at; the first by id among equals."""
        known = sorted(receptacles)
        if not known:
            raise Stuck
        return min(
            known,
            key=lambda r: (
                (self.world.locations[r] != self.engine.place) + (not self.engine.is_reachable(r))
            ),
        )

    def is_pickupable(self, thing: str) -> bool:
        return ("pickupable", thing) in self.world.traits

    def things_of(self, kind: str) -> list[str]:
        return sorted(thing for thing, found in self.world.kinds.items() if found == kind)

    def receptacles_of(self, kind: str) -> list[str]:
        return [
            receptacle
            for receptacle in self.world.locations
            if self.world.kinds.get(receptacle) == kind
        ]

    def receptacles_with(self, thing: str) -> list[str]:
        return [
            r for r in self.engine.inside if thing in self.contents(r) and r in self.world.locations
        ]

    def contents(self, receptacle: str) -> Sequence[str]:
        """The contents of a receptacle, as far as the player knows."""
        return self.engine.inside.get(receptacle, ())
