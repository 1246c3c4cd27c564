"""Replays stored episodes from task, noise seed and recorded replies, and reports the first
difference of each."""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from turnwise.config.schema import Config, EnvConfig
from turnwise.envs.base import EnvFactory
from turnwise.generate.base import GeneratorError
from turnwise.log.store import read_episode, read_lines
from turnwise.rollout.agents import Agent
from turnwise.rollout.outputs import EnvInput
from turnwise.rollout.plan import EpisodePlan, env_configs, turn_limit
from turnwise.rollout.proxy import AgentProxy
from turnwise.types import Episode, Status, Turn


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Where a replay first left the record.

    Example:
        >>> print(Difference(episode_id="e", where="turn 2", what="reward", recorded=1.0,
        ...     replayed=0.0))
        e, turn 2: reward was 1.0, is now 0.0
    """

    episode_id: str
    where: str
    what: str
    recorded: object
    replayed: object

    def __str__(self) -> str:
        return (
            f"{self.episode_id}, {self.where}: {self.what} was {self.recorded!r}, is now "
            f"{self.replayed!r}"
        )


class RecordedSpeaker:
    """Replies with the recorded tokens. The plan's env_id is the episode's place."""

    def __init__(self, episodes: Sequence[Episode]) -> None:
        self._episodes = episodes

    def open(self, agent: Agent) -> None:
        """Nothing to prepare."""

    async def reply(self, agent: Agent) -> EnvInput:
        episode, index = self._episodes[agent.plan.env_id], len(agent.turns)
        if index == len(episode.turns):
            raise GeneratorError("no further reply is recorded")
        turn, last = episode.turns[index], index == len(episode.turns) - 1
        return EnvInput(
            env_id=agent.plan.env_id,
            text=turn.text,
            completion=turn.completion,
            prompt_ids=turn.prompt_ids,
            restart=turn.restart,
            context_full=last and episode.status is Status.TRUNCATED_LENGTH,
        )

    def final_ids(self, agent: Agent) -> tuple[int, ...]:
        return self._episodes[agent.plan.env_id].final_ids

    async def close(self, agent: Agent) -> None:
        """Nothing to release."""


def replay_episodes(
    episodes: Sequence[Episode],
    config: Config,
    *,
    factories: Mapping[str, EnvFactory] | None = None,
) -> list[Difference | None]:
    """For each episode, None if environment and agent reproduce the record, otherwise the first
    difference.

    The model is not used: its recorded replies are played. The turns before a failure are replayed;
    the failure is not.

    Raises:
        ValueError: the config does not know an episode's environment.
    """
    given = dict(factories or {})
    known = {**env_configs(config, config.rollout.train), **env_configs(config, config.rollout.val)}
    for episode in episodes:
        if episode.tag not in given and episode.tag not in known:
            raise ValueError(
                f"episode {episode.id} was played in {episode.tag!r}, and the config knows only "
                f"{', '.join(known)}; give the config that it was played with"
            )
    envs = {episode.tag: known.get(episode.tag, config.env) for episode in episodes}
    found: list[Difference | None] = []
    for recorded, again in zip(
        episodes, _play_again(episodes, config, envs=envs, factories=given), strict=True
    ):
        first = next(_differences(recorded, again), None)
        found.append(None if first is None else first.of(recorded))
    return found


def _play_again(
    episodes: Sequence[Episode],
    config: Config,
    *,
    envs: Mapping[str, EnvConfig],
    factories: Mapping[str, EnvFactory],
) -> list[Episode]:
    """Plays the recorded replies in new environments, with the usual time limits and without
    retries."""
    groups = config.rollout.train.model_copy(update={"tags": tuple(envs), "n_groups": ()})
    rollout = config.rollout.model_copy(update={"train": groups, "retries": 0})
    config = config.model_copy(update={"rollout": rollout, "envs": {**config.envs, **envs}})
    needed = {tag: factory for tag, factory in factories.items() if tag in envs}
    proxy = AgentProxy(config, factories=needed or None, speaker=RecordedSpeaker(episodes))
    try:
        limits = {
            tag: turn_limit(config, env, proxy.env_state.probes[tag]) for tag, env in envs.items()
        }
        plans = [
            EpisodePlan(
                env_id=place,
                group_id=episode.group_id,
                index=episode.index,
                tag=episode.tag,
                task=episode.task,
                seed=episode.seed,
                noise_seed=episode.noise_seed,
                episode_id=episode.id,
                max_turn=limits[episode.tag],
            )
            for place, episode in enumerate(episodes)
        ]
        return proxy.play_these(plans)
    finally:
        proxy.close()


def _differences(recorded: Episode, again: Episode) -> Generator["_Found"]:
    if again.prompt and again.prompt != recorded.prompt:
        yield _Found("the opening", "messages", recorded.prompt, again.prompt)
    for index, turn in enumerate(recorded.turns):
        if len(again.turns) <= index:
            if again.status.failed:
                yield _Found(
                    f"turn {index}", "the environment", "answering", f"failing ({again.error})"
                )
            yield _Found(
                f"turn {index}",
                "the episode",
                "going on",
                f"over ({again.error or again.status.value})",
            )
            return
        yield from _compare(index, turn, again.turns[index])
    ran_out = again.status is Status.GENERATOR_ERROR and len(again.turns) == len(recorded.turns)
    status = "still going on" if ran_out else again.status.value
    if not recorded.status.failed and status != recorded.status.value:
        yield _Found("the end", "status", recorded.status.value, status)


@dataclass(frozen=True, slots=True)
class _Found:
    where: str
    what: str
    recorded: object
    replayed: object

    def of(self, episode: Episode) -> Difference:
        return Difference(
            episode_id=episode.id,
            where=self.where,
            what=self.what,
            recorded=self.recorded,
            replayed=self.replayed,
        )


def _compare(index: int, recorded: Turn, replayed: Turn) -> Generator[_Found]:
    pairs = (
        ("action", recorded.action, replayed.action),
        ("messages", recorded.messages, replayed.messages),
        ("reward", recorded.reward, replayed.reward),
        ("reward parts", dict(recorded.reward_parts), dict(replayed.reward_parts)),
        ("state", recorded.state_key, replayed.state_key),
    )
    for what, old, new in pairs:
        if old != new:
            yield _Found(f"turn {index}", what, old, new)


def read_episodes(path: Path) -> list[Episode]:
    """The episodes of a JSONL file. A torn last line is left out."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    return read_lines(path, read_episode)
