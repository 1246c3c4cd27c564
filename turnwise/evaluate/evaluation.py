"""Evaluation of a player on held-out tasks, with confidence intervals and paired comparisons."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turnwise.config.schema import Config
from turnwise.envs.base import EnvFactory
from turnwise.evaluate.players import (
    Player,
    RandomPlayer,
    play_episodes,
    player_proxy,
    with_episodes,
)
from turnwise.evaluate.results import Comparison, EvalResult, EvaluationError, Outcome, compare
from turnwise.generate.base import Generator
from turnwise.rollout.proxy import AgentProxy
from turnwise.rollout.speakers import PlayerError
from turnwise.types import Episode, Status

__all__ = [
    "Comparison",
    "EvalResult",
    "EvaluationError",
    "Outcome",
    "PolicyPlayer",
    "compare",
    "evaluate",
]

PROBES = 8
"""Episodes per tag of the random player that tell whether an environment reports success."""


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
    reports: dict[str, bool] | None = None,
) -> EvalResult:
    """Evaluates the player on held-out tasks. The same config and count give the same tasks for
    every player.

    Args:
        episodes: how many tasks, each played once. None: config.eval.episodes.
        factories: environments given as objects, by tag.
        on_episode: called with every finished episode.
        reports: what earlier evaluations found out: tag -> whether its environment reports success.
            Completed by this one, so that a run asks once.

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
        played = proxy.play_all(step, on_episode=on_episode)
    finally:
        proxy.close()
    reports = {} if reports is None else reports
    reports |= {one.tag: True for one in played if one.success is not None}
    ended = {one.tag for one in played if one.status is Status.COMPLETED}
    silent = {one.tag for one in played if not one.status.failed} - ended
    if silent - reports.keys():
        speaking = _speaking(config, played, split=split, step=step, factories=factories)
        reports |= {tag: tag in speaking for tag in silent - reports.keys()}
    speaking = {tag for tag in silent if reports[tag]}
    return EvalResult.of(player.name, played, speaking=speaking)


def _speaking(
    config: Config,
    played: Sequence[Episode],
    *,
    split: str,
    step: int,
    factories: Mapping[str, EnvFactory] | None,
) -> set[str]:
    """Tags whose environments report success to a random player. It plays only where a tag's
    episodes neither ended by themselves nor heard of success: a player without legal replies has
    no success, and an environment that never reports any looks alike.
    """
    count = PROBES * len({one.tag for one in played})
    try:
        probes = play_episodes(
            config, RandomPlayer(), episodes=count, split=split, step=step, factories=factories
        )
    except PlayerError:  # there are no random replies: nothing is known
        return set()
    return {one.tag for one in probes if one.success is not None}
