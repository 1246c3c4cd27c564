"""Short thoughts for demonstrations, by template: what is sought, where the player has looked, and
what it does next. They tell only what the text of the episode has shown."""

from collections.abc import Mapping, Sequence
from random import Random

from turnwise.envs.games.alfworld.engine import PlainEngine
from turnwise.envs.games.alfworld.games import Game
from turnwise.envs.games.alfworld.planner import TREATMENTS
from turnwise.envs.games.alfworld.search import GO, Memory

LOOKED_AT = 3
"""Places that a thought names at most."""

WORDINGS: Mapping[str, tuple[str, ...]] = {
    "search": (
        "I need {one}. {looked} Next I try the {place}.",
        "The task is to {task}, and I have not found {one}. {looked} Let me look at the {place}.",
        "Where is {one}? {looked} It could be at the {place}.",
    ),
    "look in": (
        "The {place} is closed. What I need could be inside: {one}. I open it.",
        "I still look for {one}. I open the {place} to see what is in it.",
        "To know whether the {place} has {one}, I open it.",
    ),
    "look at": (
        "I have not seen yet what the {place} has. I examine it.",
        "I look for {one}, so I examine the {place}.",
    ),
    "fetch": (
        "I saw {one} at the {place}. I get it from there.",
        "The {place} has {one}, which I need. I go back to it.",
        "To {task}, I get {one} from the {place}.",
    ),
    "take": (
        "Here is the {object}. I need it to {task}, so I take it.",
        "I found the {object}. I pick it up.",
        "The {object} is what I look for. I take it from the {place}.",
    ),
    "treat": (
        "I have the {held}. I have to {verb} it first, which the {place} is for.",
        "Before I bring the {held} to the {target}, I {verb} it with the {place}.",
        "The task is to {task}. Next I {verb} the {held} with the {place}.",
    ),
    "deliver": (
        "I have the {held}. Now it has to go to the {place}.",
        "The {held} is ready. I bring it to the {place}.",
        "What is left: the {held} belongs in the {place}.",
    ),
    "light": (
        "I hold the {held}, and the {thing} is at the {place}. I use it there.",
        "I have the {held}. Now I need the light of the {thing} at the {place}.",
        "The task is to {task}. The {thing} at the {place} gives the light.",
    ),
    "use": (
        "I hold the {held} and the {object} is here. I turn it on.",
        "The {object} is here, so I use it to look at the {held}.",
    ),
    "put down": (
        "I do not need the {held}. I put it down at the {place} to have a free hand.",
        "The {held} is not what I look for. The {place} can take it.",
    ),
}
"""Why a command is given -> how the thought may be worded."""


def thought(
    command: str, *, game: Game, engine: PlainEngine, memory: Memory, rng: Random
) -> str | None:
    """The thought before this command of the searching player; None for a command that it never
    gives. At most 40 words."""
    world = engine.world
    by_name = {name: thing for thing, name in world.names.items()}
    place, thing = _place_and_thing(command, by_name)
    if place is None and thing is None:
        return None
    held = engine.held
    verb = TREATMENTS.get(game.task_type, ("",))[0]
    why = _reason(command, place, game=game, engine=engine, memory=memory)
    needs_lamp = bool(game.toggle_target) and held is not None and why != "put down"
    sought = (game.toggle_target if needs_lamp else game.object_target).lower()
    brought = any(
        world.kinds.get(place) == game.parent_target.lower() + "type"
        and any(world.kinds.get(one) == sought + "type" for one in engine.inside.get(place, ()))
        for place in memory.seen
    )
    return rng.choice(WORDINGS[why]).format(
        task=game.wording(0),
        thing=sought,
        one=f"{'another' if brought else 'an' if sought[0] in 'aeiou' else 'a'} {sought}",
        object="" if thing is None else world.names[thing],
        place="" if place is None else world.names[place],
        held="" if held is None else world.names[held],
        target=game.parent_target.lower(),
        verb=verb,
        looked=_looked([world.names[one] for one in memory.seen]),
    )


def _place_and_thing(command: str, by_name: Mapping[str, str]) -> tuple[str | None, str | None]:
    """(the receptacle, the object) that a command names."""
    verb, _, rest = command.partition(" ")
    if command.startswith(GO):
        return by_name.get(command.removeprefix(GO)), None
    if verb == "use":
        return None, by_name.get(rest)
    for word in (" from ", " to ", " with "):
        if word in rest:
            thing, _, place = rest.partition(word)
            return by_name.get(place), by_name.get(thing)
    return by_name.get(rest), None


def _reason(
    command: str, place: str | None, *, game: Game, engine: PlainEngine, memory: Memory
) -> str:
    """Why the player gives a command: a key of WORDINGS."""
    verb, world, held = command.partition(" ")[0], engine.world, engine.held
    if verb in ("take", "use"):
        return verb
    if verb in ("clean", "heat", "cool"):
        return "treat"
    known = engine.inside.get(place or "", ()) if place in memory.seen else ()
    kinds = {world.kinds.get(thing) for thing in known}
    wanted, kind = game.object_target.lower() + "type", world.kinds.get(place or "")
    if held is None and wanted in kinds:
        return "fetch"
    if held is not None and world.kinds.get(held) == wanted:
        _, _, result, station = TREATMENTS.get(game.task_type, ("", "", "", ""))
        untreated = bool(station) and (result, held) not in engine.facts
        if untreated and kind == station:
            return "treat"
        if game.toggle_target and game.toggle_target.lower() + "type" in kinds:
            return "light"
        if kind == game.parent_target.lower() + "type" and not untreated:
            return "deliver"
    elif held is not None:
        return "put down"
    return {"open": "look in", "examine": "look at"}.get(verb, "search")


def _looked(names: Sequence[str]) -> str:
    """Where the player has looked, the last places by name.

    Example:
        >>> _looked(["shelf 1", "desk 1", "bed 1", "safe 1"])
        'I looked at desk 1, bed 1, safe 1 and 1 place before.'
        >>> _looked(["desk 1"]), _looked([])
        ('I looked at desk 1.', 'I have looked nowhere yet.')
    """
    if not names:
        return "I have looked nowhere yet."
    more = len(names) - LOOKED_AT
    before = f" and {more} place{'s' if more > 1 else ''} before" if more > 0 else ""
    return f"I looked at {', '.join(names[-LOOKED_AT:])}{before}."
