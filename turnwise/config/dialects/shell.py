"""Shell scripts that start a training: `python -m MODULE key=value ...`, with the variables that
the script sets."""

import os
import re
import shlex
from collections.abc import Sequence

from turnwise.config.tree import ConfigError

_ASSIGNMENT = re.compile(r"^\s*(?:export\s+)?([A-Za-z_]\w*)=(.*)$")
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::-([^${}]*))?\}|(\w+))")
_SUM = re.compile(r"\$\(\(([^()]*)\)\)")
_OVERRIDE = re.compile(r"^(?:\+{0,2})[A-Za-z_][\w-]*(?:\.[\w-]+)*=")
_LONGEST = 100_000
_ENDS = ("|", "||", "&&", ";", "&", ">", ">>", "2>&1", "&>")


def overrides_of(text: str, origin: str) -> list[str]:
    """The overrides of the one training command in a script. Variables that are not set stay in
    them.

    Raises:
        ConfigError: no command with overrides, several, or one that names a config file.

    Example:
        >>> overrides_of("n=8\\npython3 -m verl.trainer.main_ppo env.rollout.n=$n \\\\\\n  a.b='c' $@", "x.sh")
        ['env.rollout.n=8', 'a.b=c']
    """  # noqa: E501
    variables: dict[str, str] = {}
    found: list[list[str]] = []
    for line in text.replace("\\\n", " ").splitlines():
        expanded = _expand(line, variables)
        assigned = _ASSIGNMENT.match(expanded)
        words = _words(assigned.group(2) if assigned else expanded, origin)
        if assigned is not None and len(words) < 2:  # more: a variable for one command
            variables[assigned.group(1)] = "".join(words)
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
    return commands[0]


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
    return overrides


def _expand(line: str, variables: dict[str, str]) -> str:
    """The line with the script's own variables and the environment's filled in; others stay as
    they are."""

    def value(match: re.Match[str]) -> str:
        name = match.group(1) or match.group(3)
        fallback = match.group(2)
        if name in variables or name in os.environ:
            return variables.get(name, os.environ.get(name, ""))
        return match.group(0) if fallback is None else fallback

    line = re.sub(r"[\"']?\$(?:@|\*|\{@\})[\"']?", "", line)
    before = None
    while line != before and len(line) < _LONGEST:  # ${a:-${b}}: from the inside outwards
        before, line = line, _VARIABLE.sub(value, line)
    return _SUM.sub(lambda match: _sum(match.group(1)), line)


def _sum(text: str) -> str:
    """The value of `a + b` and `a * b`; the text where it is more than that."""
    parts = re.fullmatch(r"\s*(\d+)\s*([+*])\s*(\d+)\s*", text)
    if parts is None:
        return f"$(({text}))"
    left, right = int(parts.group(1)), int(parts.group(3))
    return str(left + right if parts.group(2) == "+" else left * right)
