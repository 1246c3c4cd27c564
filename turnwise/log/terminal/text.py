"""Text of models, environments and files as a terminal may show it."""

import re
import unicodedata
from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size
from rich.text import Text

MOST_CHARACTERS = 8000
"""Shown of one text; a pane holds fewer."""
_STRING = r"(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c\n]{0,4096}(?:\x07|\x1b\\|\x9c)"
_CSI = r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
_OTHER = r"\x1b[ -/]*[0-~]"
ESCAPES = re.compile(f"{_STRING}|{_CSI}|{_OTHER}")
"""Whole escape sequences: titles, hyperlinks and clipboards; colours and cursor; the rest."""
_LINE_ENDS = re.compile("\r\n|[\r\x85\u2028\u2029]")
_NOT_SHOWN = {"Cc", "Cf", "Co", "Cs", "Cn", "Zl", "Zp"}
_MOST_MARKS = 2
"""Accents kept on one letter: piles of them cover the lines above."""


def clean(text: str, *, most: int = MOST_CHARACTERS) -> str:
    """The text without escape sequences, control characters and invisible ones; line breaks stay.

    A model may write what a terminal would obey: another title, a hidden link, a cleared screen.
    Direction marks and zero-width characters go too, because they show text that is not there.

    Example:
        >>> clean("up\\x1b]0;title\\x07 \\x1b[31mred\\x1b[0m\\x07\\ta\\u202eb")
        'up red  ab'
    """
    text = _LINE_ENDS.sub("\n", ESCAPES.sub("", text[:most]))
    if text.isascii() and text.replace("\n", "").replace("\t", "").isprintable():
        return text.expandtabs(4)
    kept: list[str] = []
    marks = 0
    for letter in text:
        kind = unicodedata.category(letter)
        marks = marks + 1 if kind in ("Mn", "Me") else 0
        if letter in "\n\t" or (kind not in _NOT_SHOWN and marks <= _MOST_MARKS):
            kept.append(" " if kind == "Zs" else letter)
    return "".join(kept).expandtabs(4)


def one_line(text: str, *, most: int = 400) -> str:
    """The text on one line, blanks squeezed.

    Example:
        >>> one_line("no\\n  environment\\x1b[2J ")
        'no environment'
    """
    return " ".join(clean(text[: 4 * most]).split())[:most]


def fit(text: Text, width: int) -> Text:
    """A copy of the text exactly `width` cells wide: cut with dots, or filled with blanks."""
    shown = text.copy()
    if shown.cell_len > width:
        plain = set_cell_size(shown.plain, max(width - 2, 0))
        shown = shown[: len(plain.rstrip())] if width > 2 else Text("")
        shown.append("..", style="dim")
    shown.append(" " * max(width - shown.cell_len, 0))
    return shown


def wrapped(text: str, *, width: int, height: int) -> list[str]:
    """The text in lines of at most `width` cells; the last says how many are left out.

    Lines that fit stay as they are, blanks included: a board is drawn with them.

    Example:
        >>> wrapped("_ P _\\nright, then down", width=8, height=3)
        ['_ P _', 'right,', 'then ...']
        >>> wrapped("a\\nb\\nc\\nd", width=20, height=3)
        ['a', 'b', '... 2 more lines']
    """
    lines: list[str] = []
    for line in text.split("\n"):
        lines += _folded(line.rstrip(), width)
    if len(lines) <= height:
        return lines
    left = len(lines) - height + 1
    last = f"... {left} more line{'s' if left > 1 else ''}"
    if len(last) > width or left == 1:
        last = f"{set_cell_size(lines[height - 1], max(width - 4, 0)).rstrip()} ..."
    return [*lines[: height - 1], last]


def _folded(line: str, width: int) -> Sequence[str]:
    if cell_len(line) <= width:
        return [line]
    lines: list[str] = []
    while cell_len(line) > width:
        cut = len(set_cell_size(line, width))
        while cell_len(line[:cut]) > width:
            cut -= 1
        blank = line.rfind(" ", 0, cut + 1)
        cut = blank if blank > 0 else max(cut, 1)
        lines.append(line[:cut].rstrip())
        line = line[cut:].lstrip()
    return [*lines, line] if line else lines
