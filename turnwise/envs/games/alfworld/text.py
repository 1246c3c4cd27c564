"""The sentences of ALFWorld, as its players read them. Byte for byte what the original prints."""

from collections.abc import Sequence
from typing import Literal

NOTHING_HAPPENS = "Nothing happens."

_COMMANDS = (
    ("look", "look around your current location"),
    ("inventory", "check your current inventory"),
    ("go to (receptacle)", "move to a receptacle"),
    ("open (receptacle)", "open a receptacle"),
    ("close (receptacle)", "close a receptacle"),
    ("take (object) from (receptacle)", "take an object from a receptacle"),
    ("move (object) to (receptacle)", "place an object in or on a receptacle"),
    ("examine (something)", "examine a receptacle or an object"),
    ("use (object)", "use an object"),
    ("heat (object) with (receptacle)", "heat an object using a receptacle"),
    ("clean (object) with (receptacle)", "clean an object using a receptacle"),
    ("cool (object) with (receptacle)", "cool an object using a receptacle"),
    ("slice (object) with (object)", "slice an object using a sharp object"),
)


def listing(items: Sequence[str]) -> str:
    """The items as a phrase.

    Example:
        >>> listing([]), listing(["a cup 1"]), listing(["a cup 1", "a pen 2"])
        ('nothing', 'a cup 1', 'a cup 1, and a pen 2')
    """
    if not items:
        return "nothing"
    if len(items) == 1:
        return items[0]
    return ", ".join(items[:-1]) + ", and " + items[-1]


def things(names: Sequence[str]) -> str:
    """The names as a phrase, each with its article."""
    return listing([f"a {name}" for name in names])


def opening(look: str, *, task: str) -> str:
    """The opening text of a game."""
    return f"-= Welcome to TextWorld, ALFRED! =-\n\n{look}\n\nYour task is to: {task}."


def help_page() -> str:
    """The commands, one per line."""
    lines = [
        # The original sets this one line two columns short of the others.
        f"  {command}:  {meaning}\n"
        if command.startswith("move")
        else f"  {command + ':':<34}{meaning}\n"
        for command, meaning in _COMMANDS
    ]
    return "Available commands:\n" + "".join(lines)


def middle_of_room(receptacles: Sequence[str]) -> str:
    return (
        "You are in the middle of a room. Looking quickly around you, you see "
        f"{things(receptacles)}."
    )


def facing(receptacles: Sequence[str], beside: Sequence[str]) -> str:
    return f"You are facing the {listing(receptacles)}. Next to it, you see {things(beside)}."


def receptacle(
    name: str, contents: Sequence[str], *, door: Literal["open", "closed"] | None
) -> str:
    """The description of a receptacle; `door` is None where it has none.

    Example:
        >>> receptacle("drawer 1", ["pen 1"], door="open")
        'The drawer 1 is open. In it, you see a pen 1.'
        >>> receptacle("drawer 1", ["pen 1"], door="closed")
        'The drawer 1 is closed.'
    """
    if door is None:
        return f"On the {name}, you see {things(contents)}."
    if door == "closed":
        return f"The {name} is closed."
    return f"The {name} is open. In it, you see {things(contents)}."


def vessel(name: str, contents: Sequence[str]) -> str:
    return f"This is a normal {name}. In it, you see {things(contents)}."


def condition(name: str, *, clean: bool, hot: bool, cool: bool, sliced: bool, lit: bool) -> str:
    """The description of an object in the hand.

    Example:
        >>> condition("egg 1", clean=True, hot=True, cool=False, sliced=False, lit=False)
        'This is a hot and clean egg 1.'
        >>> condition("egg 1", clean=False, hot=False, cool=True, sliced=False, lit=False)
        'This is a cold egg 1.'
    """
    cut = "sliced " if sliced else ""
    warmth = "hot" if hot else "cool" if cool else ""
    if clean and warmth:
        return f"This is a {warmth} and clean {cut}{name}."
    if hot:
        return f"This is a hot {cut}{name}."
    if clean:
        return f"This is a clean {cut}{name}."
    if cool:
        return f"This is a {'cool sliced' if sliced else 'cold'} {name}."
    if lit:
        return f"This {name} is on."
    if sliced:
        return f"This is a sliced {name}."
    return f"There's nothing special about {name}."


def inventory(held: str | None) -> str:
    return "You are not carrying anything." if held is None else f"You are carrying: a {held}."


def arrive(name: str, view: str) -> str:
    return f"You arrive at {name}. {view}"


def opens(name: str, view: str) -> str:
    return f"You open the {name}. {view}"


def closes(name: str) -> str:
    return f"You close the {name}."


def takes(thing: str, name: str) -> str:
    return f"You pick up the {thing} from the {name}."


def moves(thing: str, name: str) -> str:
    return f"You move the {thing} to the {name}."


def treats(verb: str, thing: str, name: str) -> str:
    return f"You {verb} the {thing} using the {name}."


def turns_on(thing: str) -> str:
    return f"You turn on the {thing}."


def slices(thing: str, knife: str) -> str:
    return f"You sliced the {thing} with the {knife}."
