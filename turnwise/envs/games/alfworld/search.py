"""A player with the knowledge of a model: it looks for things, and remembers what it was shown.

It walks to the places where the wanted thing may lie, open ones first, opens what is closed, and
once it has seen the thing does what the planner would. Demonstrations of a player who knows
everything would teach to guess.
"""

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field

from turnwise.envs.games.alfworld.engine import PlainEngine
from turnwise.envs.games.alfworld.games import Game
from turnwise.envs.games.alfworld.planner import Planner, Stuck

GO = "go to "
LOOKS = (GO, "open ", "examine ")
"""Commands that show what lies in a receptacle."""


@dataclass(slots=True)
class Memory:
    """Facts from the text of the episode so far."""

    seen: dict[str, None] = field(default_factory=dict[str, None])
    """Receptacles whose content was shown, in the order in which it was."""
    near: set[str] = field(default_factory=set[str])
    """Receptacles that are known to be in reach. Several may be used from one place, which shows
    where walking to one of them changes nothing."""

    def note(self, command: str, *, engine: PlainEngine, valid: bool) -> None:
        """Takes in what a command that was just played has shown."""
        verb = next((verb for verb in LOOKS if command.startswith(verb)), None)
        if verb is None:
            return
        name, world = command.removeprefix(verb), engine.world
        receptacle = next((r for r in world.locations if world.names[r] == name), None)
        if receptacle is None:
            return
        if valid and verb == GO:
            self.near.clear()
        if world.locations[receptacle] == engine.place:
            self.near.add(receptacle)
        if valid and engine.is_reachable(receptacle):
            self.seen[receptacle] = None


class _Chosen(Exception):
    """The next command."""


class _Searcher(Planner):
    """The planner with less knowledge. It stops at its first command, which changes nothing."""

    def __init__(self, engine: PlainEngine, game: Game, *, seen: Set[str], near: Set[str]) -> None:
        super().__init__(engine, game)
        self._seen, self._near = seen, near

    def contents(self, receptacle: str) -> Sequence[str]:
        return super().contents(receptacle) if receptacle in self._seen else ()

    def do(self, command: str) -> None:
        raise _Chosen(command)

    def go(self, receptacle: str) -> None:
        if receptacle not in self._near:
            self.do(GO + self.world.names[receptacle])

    def nearest(self, receptacles: Iterable[str]) -> str:
        """The first by effort as a model sees it, then by name and number."""

        def effort(receptacle: str) -> tuple[bool, bool, str, int]:
            name, _, number = self.world.names[receptacle].rpartition(" ")
            closed = not self.engine.is_reachable(receptacle)
            return receptacle not in self._near, closed, name, int(number)

        known = list(receptacles)
        if not known:
            raise Stuck
        return min(known, key=effort)

    def look_further(self) -> None:
        """Goes on to the next place that was not looked at."""
        world, held = self.world, self.engine.held
        sought = self.wanted
        if self.game.task_type == "look_at_obj_in_light" and held is not None:
            sought = self.game.toggle_target.lower() + "type"
        unseen = [place for place in world.locations if place not in self._seen]
        fitting = [r for r in unseen if (world.kinds.get(r), sought) in world.can_contain]
        place = self.nearest(fitting or unseen)
        self.go(place)
        closed = not self.engine.is_reachable(place)
        self.do(f"{'open' if closed else 'examine'} {world.names[place]}")


def next_command(
    game: Game, *, engine: PlainEngine, memory: Memory, sees_commands: bool
) -> str | None:
    """The command of a player with this memory, or None where it is at a loss. The engine stays
    where it is.

    Args:
        sees_commands: the admissible commands are shown, and with them what is in reach.
    """
    near = set(engine.world.nearby.get(engine.place, ())) if sees_commands else memory.near
    player = _Searcher(engine, game, seen=memory.seen.keys(), near=near)
    try:
        try:
            player.play()
        except Stuck:
            player.look_further()
    except _Chosen as chosen:
        return str(chosen)
    except Stuck:
        pass
    return None
