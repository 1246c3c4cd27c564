"""Source: what an environment of verifiers is to a trainer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from turnwise.envs.base import Env
from turnwise.types import Episode, Json


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """The tasks of an environment, and what plays them."""

    factory: Callable[[], Env]
    rows: Mapping[str, Sequence[Mapping[str, Json]]]
    """By split."""
    score_group: Callable[[Sequence[Episode]], list[Episode]] | None = None
    """The usable episodes of a group with their rewards, where these are only known together."""
    texts: bool = False
    """Its prompts are texts to continue, each one user message here; no chat template renders
    them."""
    close: Callable[[], None] | None = None
    """Stops what its episodes share."""
