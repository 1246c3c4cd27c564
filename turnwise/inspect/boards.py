"""Grids that environments draw in text."""

import re
from collections.abc import Sequence

MIN_LINES, MIN_CELLS = 2, 2
MAX_SIDE = 64
MAX_DIGITS = 6
_DRAWN = re.compile(r"\S {2,}\S|(?<!\|)\|(?!\|)")
"""Columns or frames; board.js draws such lines in signs of one width."""


def find_board(text: str) -> str | None:
    """The largest block of lines in a text that all have the same number of cells; None where the
    text draws nothing.

    Cells are words of one or two characters, numbers, or single characters in lines without
    spaces.

    Example:
        >>> print(find_board("You are P.\\nP _ O\\n_ _ G\\nYour move?"))
        P _ O
        _ _ G
        >>> print(find_board("###\\n#P#\\n###"))
        ###
        #P#
        ###
        >>> print(find_board("Score: 132\\n. 2 4\\n16 128 ."))
        . 2 4
        16 128 .
        >>> find_board("Choose an arm.\\nWhich one?") is None
        True
    """
    best: list[str] = []
    block: list[str] = []
    cells = 0
    for line in [*text.split("\n"), ""]:
        found = _cells(line)
        if found and (not block or found == cells):
            block.append(line.rstrip())
        else:
            if len(block) >= MIN_LINES and len(block) > len(best):
                best = block
            block = [line.rstrip()] if found else []
        cells = found
    return "\n".join(best) if best and len(best) <= MAX_SIDE else None


def shown_state(rendered: str, contents: Sequence[str]) -> str | None:
    """What the page shows beside a game: the board that the environment draws or wrote last, else
    its drawing, or what it renders beyond its last message. None where there is nothing to add.

    Args:
        rendered: what the environment's `render` returned.
        contents: its messages so far.

    Example:
        >>> print(shown_state("P _\\n_ G", ["You: (0, 0). Goal: (1, 1)."]))
        P _
        _ G
        >>> shown_state("A shop. Search.", ["Welcome.", "A shop. Search."]) is None
        True
    """
    if board := find_board(rendered):
        return board
    drawn = sum(bool(_DRAWN.search(line)) for line in rendered.split("\n")) >= MIN_LINES
    said = contents[-1] if contents else ""
    if rendered.strip() and (drawn or rendered.strip() not in said):
        return rendered
    return last_board(contents)


def last_board(contents: Sequence[str]) -> str | None:
    """The board of the last message that has one."""
    return next((board for text in reversed(contents) if (board := find_board(text))), None)


def _cells(line: str) -> int:
    """How many cells the line has, 0 if it is no line of a grid."""
    line = line.strip()
    words = line.split()
    if len(words) >= MIN_CELLS and all(
        len(word) <= 2 or (len(word) <= MAX_DIGITS and word.isdecimal()) for word in words
    ):
        count = len(words)
    elif len(words) == 1 and len(line) > MIN_CELLS and not line.isalnum():
        count = len(line)
    else:
        return 0
    return count if count <= MAX_SIDE else 0
