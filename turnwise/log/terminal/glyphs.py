"""The signs that the dashboard is drawn with: Unicode where the terminal has it, else ASCII."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Glyphs:
    """One set of signs."""

    rule: str
    corner: str
    side: str
    split: str
    reference: str
    mark: str
    """An evaluation in a curve."""
    full: str
    empty: str
    """Of the progress bar."""
    fills: str
    """Of the bar of shares, one per part: they differ without colour too."""
    played: str
    ahead: str
    """Turns of an episode."""
    dots: bool
    """Whether curves are drawn with braille, eight dots in a cell."""
    arrow: str
    up: str
    """Beside the name of a line that is above the plot."""
    between: str


UNICODE = Glyphs(
    rule="\u2500",
    corner="\u2514",
    side="\u2502",
    split="\u2502",
    reference="\u254c",
    mark="\u25c6",
    full="\u2501",
    empty="\u2500",
    fills="\u2588\u2593\u2592\u2591",
    played="\u25cf",
    ahead="\u25cb",
    dots=True,
    arrow="\u2192",
    up="\u2191",
    between="\u00b7",
)
ASCII = Glyphs(
    rule="-",
    corner="+",
    side="|",
    split="|",
    reference="-",
    mark="o",
    full="#",
    empty=".",
    fills="#=+.",
    played="*",
    ahead=".",
    dots=False,
    arrow="->",
    up="^",
    between="-",
)


def glyphs_for(encoding: str | None, term: str | None = None) -> Glyphs:
    """The set that this encoding can write. The Linux console has no font for the first.

    Example:
        >>> glyphs_for("UTF-8") is UNICODE, glyphs_for("ascii") is ASCII
        (True, True)
    """
    unicode = (encoding or "").lower().replace("_", "-").startswith("utf")
    return UNICODE if unicode and term != "linux" else ASCII
