"""Files of JSON as strangers write them: what cannot be read is refused with its file and line."""

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")
UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""Exceptions of code that reads data of an unexpected shape."""


class FileError(ValueError):
    """A file that cannot be read; the message says which, where, and why."""


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text. NaN and infinities are refused.

    Raises:
        ValueError: it is no JSON, or nests too deep to be read.

    Example:
        >>> parse_json('{"reward": NaN}')
        Traceback (most recent call last):
        ValueError: NaN is no JSON number
    """
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("it nests too deep") from None


def read_text(path: Path) -> str:
    """The text of a UTF-8 file. A file whose name ends in .gz is unpacked.

    Raises:
        FileError: it cannot be opened, or is not UTF-8; names the line.
    """
    data = _content(path)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise FileError(f"{path}, line {line} is not UTF-8 text: {error.reason}") from None


def read_json(path: Path, read: Callable[[Any], T]) -> T:
    """A JSON file, converted by `read`.

    Raises:
        FileError: it is no JSON, or not of the shape that `read` takes.
    """
    try:
        return read(parse_json(read_text(path)))
    except FileError:
        raise
    except UNREADABLE as error:
        raise FileError(f"{path} cannot be read: {_why(error)}") from error


def read_json_lines(
    path: Path, read: Callable[[Any], T], *, torn: bool = False
) -> Iterator[tuple[int, T]]:
    """(number, what `read` makes of it) of every line that is not blank. With `torn` the last line
    counts only where it is whole. A file whose name ends in .gz is unpacked.

    Raises:
        FileError: a line is no JSON, or not of the shape that `read` takes; names the line.
    """
    lines = _content(path).split(b"\n")
    for number, line in enumerate(lines[:-1] if torn else lines, start=1):
        if not line.strip():
            continue
        try:
            yield number, read(parse_json(line.decode("utf-8")))
        except UNREADABLE as error:
            raise FileError(f"{path}, line {number} cannot be read: {_why(error)}") from error


def _content(path: Path) -> bytes:
    if path.is_fifo():  # opening it would wait for a writer
        raise FileError(f"{path} cannot be read: it is a pipe")
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if path.suffix == ".gz" else content
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror or error}") from None
    except (EOFError, zlib.error) as error:
        raise FileError(f"{path} cannot be unpacked: {error}") from None


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _why(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"it has no {error}"
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
