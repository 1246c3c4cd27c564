"""Shell scripts that start a training: `python -m MODULE key=value ...`, with the variables, arrays
and loops that the script sets."""

import ast
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from turnwise.config.tree import ConfigError

_ASSIGNMENT = re.compile(r"^\s*(?:export\s+)?([A-Za-z_]\w*)=(.*)$")
_ARRAY = re.compile(r"^\s*(?:export\s+|declare\s+-a\s+)?([A-Za-z_]\w*)=\((.*)$")
_LOOP = re.compile(r"^\s*for\s+([A-Za-z_]\w*)\s+in\s+(.*?)\s*(?:;\s*do\b.*)?$")
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::-([^${}]*))?\}|(\w+))")
_ELEMENTS = re.compile(r"\"?\$\{(\w+)\[(@|\*|\d{1,6})\]\}\"?")
_OVERRIDE = re.compile(r"^(?:\+{0,2})[A-Za-z_][\w-]*(?:\.[\w-]+)*=")
_RECIPE = re.compile(r"recipe\.(\w+)\.main_\w+")
_OF_KNOWN_RULES = ("dapo", "hgpo")
"""verl's recipes whose settings say all of how they learn."""
_LONGEST = 100_000
_LARGEST = 10**18
_ENDS = ("|", "||", "&&", ";", "&", ">", ">>", "2>&1", "&>")


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    """The one training command of a script."""

    overrides: tuple[str, ...]
    """Variables that are not set stay in them."""
    notes: tuple[tuple[str, str], ...] = ()
    """(what stands in the script, what was made of it)."""


@dataclass(kw_only=True, slots=True)
class _Names:
    """Variables that the lines so far have set."""

    variables: dict[str, str] = field(default_factory=dict[str, str])
    arrays: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    notes: dict[str, str] = field(default_factory=dict[str, str])


def read_script(text: str, origin: str) -> Script:
    """The training command of a script, with its variables filled in. Of a loop, the first round
    is taken, and said.

    Raises:
        ConfigError: no command with overrides, several, or one that names a config file.

    Example:
        >>> read_script("n=8\\npython3 -m verl.trainer.main_ppo env.rollout.n=$n \\\\\\n  a.b='c' $@", "x.sh").overrides
        ('env.rollout.n=8', 'a.b=c')
        >>> script = read_script("for n in 3 4; do\\n python3 -m x env.seed=$n\\ndone", "x.sh")
        >>> script.overrides, script.notes[0][0]
        (('env.seed=3',), 'for n in 3 4')
    """  # noqa: E501
    names = _Names()
    found: list[list[str]] = []
    for line in _lines(text, names, origin):
        expanded = _expand(line, names)
        if (loop := _LOOP.match(expanded)) is not None:
            _first_round(loop.group(1), _words(loop.group(2), origin), line, names)
            continue
        assigned = _ASSIGNMENT.match(expanded)
        words = _words(assigned.group(2) if assigned else expanded, origin)
        if assigned is not None and len(words) < 2:  # more: a variable for one command
            names.variables[assigned.group(1)] = "".join(words)
            continue
        if assigned is not None and assigned.group(2).lstrip("\"'").startswith(("$(", "`")):
            names.notes[f"{assigned.group(1)}=$(...)"] = "commands are not run: it is not set"
            names.variables.pop(assigned.group(1), None)
            continue
        python = [
            index
            for index, word in enumerate(words)
            if word.rpartition("/")[2].startswith("python")
        ]
        if python:
            found.append(_command(words[python[0] + 1 :], origin))
    commands = [command for command in found if command]
    if len(commands) != 1:
        raise ConfigError(
            [
                f"{origin} has {len(commands) or 'no'} python commands with key=value settings; "
                "give a script with one, or the settings themselves"
            ]
        )
    return Script(overrides=tuple(commands[0]), notes=tuple(names.notes.items()))


def _lines(text: str, names: _Names, origin: str) -> Iterator[str]:
    """The lines without those of arrays, which are stored."""
    array: str | None = None
    for line in text.replace("\\\n", " ").splitlines():
        begun = _ARRAY.match(line) if array is None else None
        if begun is not None:
            array, line = str(begun.group(1)), str(begun.group(2))
            names.arrays[array] = []
        if array is None:
            yield line
            continue
        words = _words(_expand(line, names), origin)
        ended = bool(words) and words[-1].endswith(")")
        if ended:
            words[-1] = words[-1][:-1]
        names.arrays[array] += [word for word in words if word]
        array = None if ended else array


def _first_round(name: str, words: Sequence[str], line: str, names: _Names) -> None:
    """Sets a loop's variable to its first value; one that only the shell can name is not set."""
    names.variables.pop(name, None)
    stated = f"for {name} in {' '.join(words)}".rstrip()
    if not words:
        names.notes[" ".join(line.split(";")[0].split())] = "its list is empty: fill it in"
    elif re.search(r"[$`*?{(]", words[0]):
        names.notes[stated] = "only a shell knows these values: it is not set"
    else:
        names.variables[name] = words[0]
        if len(words) > 1:
            names.notes[stated] = f"the first is taken, {name}={words[0]}"


def _words(line: str, origin: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError as error:
        raise ConfigError([f"{origin}: {error} in {line.strip()[:80]!r}"]) from error


def _command(words: Sequence[str], origin: str) -> list[str]:
    ends = [index for index, word in enumerate(words) if word in _ENDS]
    kept = words[: ends[0]] if ends else words
    overrides = [word for word in kept if _OVERRIDE.match(word)]
    named = [word for word in kept if word.startswith("--config-name")]
    if named and overrides:
        raise ConfigError(
            [
                f"{origin}: {named[0]}: give that file itself, and the script's settings behind "
                "it: turnwise migrate FILE.yaml key=value ..."
            ]
        )
    recipes = [recipe for word in kept if (recipe := _RECIPE.fullmatch(word))]
    if recipes and overrides and recipes[0].group(1) not in _OF_KNOWN_RULES:
        raise ConfigError(
            [
                f"{origin}: {recipes[0].group(0)} learns by rules of its own, which its settings "
                f"do not name; read are verl.trainer.main_ppo and the recipes "
                f"{', '.join(_OF_KNOWN_RULES)}"
            ]
        )
    return overrides


def _expand(line: str, names: _Names) -> str:
    """The line with the script's own variables and the environment's filled in; others stay as
    they are."""

    def value(match: re.Match[str]) -> str:
        name = match.group(1) or match.group(3)
        fallback = match.group(2)
        if name in names.variables or name in os.environ:
            return names.variables.get(name, os.environ.get(name, ""))
        return match.group(0) if fallback is None else fallback

    def elements(match: re.Match[str]) -> str:
        array, which = names.arrays.get(match.group(1)), match.group(2)
        if array is None:
            return match.group(0)
        chosen = array if which in "@*" else array[int(which) :][:1]
        return " ".join(shlex.quote(word) for word in chosen)

    line = re.sub(r"[\"']?\$(?:@|\*|\{@\})[\"']?", "", line)
    line = _ELEMENTS.sub(elements, line)
    before = None
    while line != before and len(line) < _LONGEST:  # ${a:-${b}}: from the inside outwards
        before, line = line, _VARIABLE.sub(value, line)
    return _with_sums(line, names)


def _with_sums(line: str, names: _Names) -> str:
    """The line with `$((a + 2 * (b - 1)))` computed, where all of its names are numbers."""
    done, rest = "", line
    while (start := rest.find("$((")) >= 0:
        depth, end = 0, start + 1
        for end in range(start + 1, len(rest)):
            depth += {"(": 1, ")": -1}.get(rest[end], 0)
            if depth == 0:
                break
        inside = rest[start + 3 : end - 1]
        value = _sum(inside, names) if depth == 0 and rest[end - 1] == ")" else None
        done += rest[:start] + (rest[start : end + 1] if value is None else str(value))
        rest = rest[end + 1 :]
    return done + rest


def _sum(text: str, names: _Names) -> int | None:
    """The value of an expression in whole numbers and variables; None where it is more than
    that."""
    if len(text) > 200:
        return None
    try:
        return _value(ast.parse(text.strip(), mode="eval").body, names)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr, names: _Names) -> int:
    match node:
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            found = number
        case ast.Name(id=name):
            found = int(names.variables.get(name, os.environ.get(name, "")))
        case ast.BinOp(op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div()):
            left, right = _value(node.left, names), _value(node.right, names)
            match node.op:
                case ast.Add():
                    found = left + right
                case ast.Sub():
                    found = left - right
                case ast.Mult():
                    found = left * right
                case _:
                    found = left // right
        case _:
            raise ValueError("not a sum")
    if abs(found) > _LARGEST:
        raise ValueError("too large")
    return found
