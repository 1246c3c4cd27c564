"""Evaluation of a player on held-out tasks, with confidence intervals and paired comparisons."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from turnwise.config.schema import Config
from turnwise.envs.base import EnvFactory
from turnwise.evaluate.players import Player, player_proxy, with_episodes
from turnwise.evaluate.results import Comparison, EvalResult, EvaluationError, Outcome, compare
from turnwise.generate.base import Generator
from turnwise.rollout.proxy import AgentProxy
from turnwise.types import Episode

__all__ = [
    "Comparison",
    "EvalResult",
    "EvaluationError",
    "Outcome",
    "PolicyPlayer",
    "compare",
    "evaluate",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyPlayer:
    """A policy whose tokens a generator samples; it plays through AgentProxy."""

    generator: Generator
    tokenizer: Any
    name: str = "policy"
    model: Any = None
    """The network, where it is in this process: the inspector asks it what else it could have
    said."""


def evaluate(
    config: Config,
    player: Player | PolicyPlayer,
    *,
    episodes: int | None = None,
    split: str = "val",
    step: int = 0,
    factories: Mapping[str, EnvFactory] | None = None,
    on_episode: Callable[[Episode], None] | None = None,
) -> EvalResult:
    """Evaluates the player on held-out tasks. The same config and count give the same tasks for
    every player.

    Args:
        episodes: how many tasks, each played once. None: config.eval.episodes.
        factories: environments given as objects, by tag.
        on_episode: called with every finished episode.

    Raises:
        EvaluationError: every episode failed.
    """
    config = with_episodes(
        config, config.eval.episodes if episodes is None else episodes, split=split
    )
    if isinstance(player, PolicyPlayer):
        proxy = AgentProxy(
            config, player.generator, player.tokenizer, split=split, factories=factories
        )
    else:
        proxy = player_proxy(config, player, split=split, factories=factories)
    try:
        return EvalResult.of(player.name, proxy.play_all(step, on_episode=on_episode))
    finally:
        proxy.close()
