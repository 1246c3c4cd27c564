"""Foreign text as valid Unicode, and foreign values and errors in words."""

import reprlib

from turnwise.user_code import line_of

MAX_ERROR = 2_000
"""Maximum characters of an error's message."""
_short = reprlib.Repr()
_short.maxlevel, _short.maxstring, _short.maxother = 3, 200, 200
_short.maxlist = _short.maxtuple = _short.maxdict = _short.maxset = _short.maxfrozenset = 12


def clean_text(text: str) -> str:
    """The text as valid Unicode: surrogate pairs are joined, lone surrogates replaced.

    Example:
        >>> clean_text("caf\\u00e9 \\ud83d\\ude00 \\ud83d")
        'caf\u00e9 \U0001f600 \ufffd'
    """
    text = str.__str__(text)  # a subclass may override __str__
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def words(value: object) -> str:
    """`str(value)` as valid and bounded text, whatever the object's own `__str__` does."""
    try:
        text = clean_text(str(value))
    except BaseException as failure:
        text = f"<{_name(value)} whose text raised {_name(failure)}>"
    return text if len(text) <= MAX_ERROR else text[: MAX_ERROR - 6] + " [cut]"


def brief(value: object) -> str:
    """The value's repr, truncated; also for objects whose repr raises."""
    try:
        text = clean_text(_short.repr(value))
    except BaseException as failure:
        text = f"<{_name(value)} whose repr raised {_name(failure)}>"
    return text if len(text) <= 200 else text[:197] + "..."


def describe(error: BaseException) -> str:
    """The error's type and message, as valid and bounded text.

    Example:
        >>> describe(ValueError("half a sign: \\ud83c"))
        'ValueError: half a sign: \\ufffd'
    """
    return f"{_name(error)}: {words(error)}".removesuffix(": ")


def raised_at(error: BaseException) -> str:
    """`describe(error)`, with the file and line of the user's code.

    Example:
        >>> raised_at(KeyError("side"))
        "KeyError: 'side'"
    """
    try:
        line = clean_text(line_of(error))
    except BaseException:  # foreign code: the error's class may define anything
        line = ""
    return describe(error) + line


def _name(value: object) -> str:
    """The name of the value's class, whatever its metaclass says."""
    return clean_text(type.__dict__["__name__"].__get__(type(value)))
