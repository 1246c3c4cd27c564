"""Rules that translate a key of another project, and conversions of values.

A rule is one of
    "train.lr"            the same value under our name
    Rule(...)             one or several of our names, with a conversion
    Fact()                means something only together with others (`combinations.py`)
    Only(True, why=...)   what turnwise does anyway: this value is accepted, another one refused
    Moot(why=...)         accepted: no result depends on it here
    Differs(why=...)      accepted: it means something else here, which is said
    No(why=...)           known, and refused
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, cast


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    to: tuple[str, ...]
    """Our names; each gets the converted value."""
    convert: Callable[[Any], Any] = _same
    """Raises ValueError with a reason for a value that has no meaning here."""
    every_env: bool = False
    """The setting holds for every environment of the run, those of `envs` too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fact:
    reads: str = ""
    """Our name to read the value back from, where there is one."""


@dataclass(frozen=True, slots=True)
class Only:
    value: Any
    """The accepted value; a tuple: any of these."""
    why: str = field(kw_only=True)

    def accepts(self, value: Any) -> bool:
        known: object = self.value
        return value in (cast(tuple[Any, ...], known) if isinstance(known, tuple) else (known,))


@dataclass(frozen=True, kw_only=True, slots=True)
class Moot:
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Differs:
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class No:
    why: str


class Note(Protocol):
    """Says of a key what it means here."""

    def __call__(self, key: str, why: str, *, moot: bool = False) -> None: ...


AnyRule = str | Rule | Fact | Only | Moot | Differs | No


def trackers(value: Any) -> Any:
    names: Any = [value] if isinstance(value, str) else value
    return (
        [name for name in cast(list[Any], names) if name not in ("console", "none")]
        if isinstance(names, list)
        else names
    )


def as_text(value: Any) -> Any:
    """A name that YAML read as a number, such as 2048."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def off_below_one(value: Any) -> Any:
    """verl writes -1 for 'no top-k' and 'never'."""
    return 0 if value == -1 else value


def choice(table: Mapping[str, str]) -> Callable[[Any], Any]:
    def convert(value: Any) -> Any:
        if not isinstance(value, str) or value not in table:
            raise ValueError(f"must be one of {', '.join(table)} here, got {value!r}")
        return table[value]

    return convert


def every_format(name: str) -> Rule:
    return Rule(to=(f"env.format.{name}",), every_env=True)


CLIP = Rule(to=("algo.clip_low", "algo.clip_high"))
EVALUATED = Rule(to=("rollout.val.env_groups", "eval.episodes"))
"""How many held-out tasks an evaluation plays."""
ROWS_PER_GPU = Moot(
    why="memory is bounded by tokens here: set train.micro_batch_tokens; the batch is "
    "rollout.train.env_groups x rollout.train.group_size episodes"
)
NO_DEEPSPEED = Moot(
    why="the native trainer runs on one device without DeepSpeed; for many devices use backend "
    "verl or trl"
)
