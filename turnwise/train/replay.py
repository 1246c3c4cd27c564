"""A stored episode again: the same observations and rewards from task, noise seed and recorded replies, or the first
difference."""

import asyncio
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

from turnwise.config.schema import Config
from turnwise.log.store import read_lines
from turnwise.rollout.agents import agent_class
from turnwise.rollout.outputs import EnvInput
from turnwise.rollout.plan import EnvFactory, EpisodePlan, env_configs, turn_limit
from turnwise.rollout.workers import LocalPool
from turnwise.types import Episode, Status, Turn


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Where a replay first left the record.

    Example:
        >>> print(Difference(episode_id="e", where="turn 2", what="reward", recorded=1.0, replayed=0.0))
        e, turn 2: reward was 1.0, is now 0.0
    """

    episode_id: str
    where: str
    what: str
    recorded: object
    replayed: object

    def __str__(self) -> str:
        return f"{self.episode_id}, {self.where}: {self.what} was {self.recorded!r}, is now {self.replayed!r}"


def replay_episode(episode: Episode, config: Config, *, factory: EnvFactory | None = None) -> Difference | None:
    """None where environment and agent give again what is recorded; the first difference otherwise.

    The model is not asked: its recorded replies are played. So are the turns before a failure; the failure is not.
    """
    configs = {**env_configs(config, config.rollout.train), **env_configs(config, config.rollout.val)}
    if factory is None and episode.tag not in configs:
        raise ValueError(
            f"episode {episode.id} was played in {episode.tag!r}, and the config knows only {', '.join(configs)}; give "
            "the config that it was played with"
        )
    return asyncio.run(_replay(episode, config, factory or _factory(config, episode.tag)))


async def _replay(episode: Episode, config: Config, factory: EnvFactory) -> Difference | None:
    probe = factory()
    configs = {**env_configs(config, config.rollout.train), **env_configs(config, config.rollout.val)}
    limit = turn_limit(config, configs.get(episode.tag, config.env), probe)
    probe.close()
    plan = EpisodePlan(
        env_id=0,
        group_id=episode.group_id,
        index=episode.index,
        tag=episode.tag,
        task=episode.task,
        seed=episode.seed,
        noise_seed=episode.noise_seed,
        episode_id=episode.id,
        max_turn=limit,
    )
    pool = LocalPool({episode.tag: factory}, config.rollout)
    agent = agent_class(config.rollout.agent)(plan, pool.open(episode.tag))
    try:
        await agent.reset()
        if agent.opening is not None and agent.opening.messages != episode.prompt:
            found = _Found("the opening", "messages", episode.prompt, agent.opening.messages)
            return found.of(episode)
        for index, turn in enumerate(episode.turns):
            if agent.done:
                ending = agent.error or (agent.status.value if agent.status else "")
                return _Found(f"turn {index}", "the episode", "going on", f"over ({ending})").of(episode)
            last = index == len(episode.turns) - 1
            full = last and episode.status is Status.TRUNCATED_LENGTH
            await agent.step(
                EnvInput(
                    env_id=0,
                    text=turn.text,
                    completion=turn.completion,
                    prompt_ids=turn.prompt_ids,
                    restart=turn.restart,
                    context_full=full,
                )
            )
            if len(agent.turns) <= index:
                return _Found(f"turn {index}", "the environment", "answering", f"failing ({agent.error})").of(episode)
            for found in _compare(index, turn, agent.turns[index]):
                return found.of(episode)
        status = agent.status.value if agent.status else "still going on"
        if not episode.status.failed and status != episode.status.value:
            return _Found("the end", "status", episode.status.value, status).of(episode)
        return None
    finally:
        await agent.handle.close()
        await pool.close()


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
    return [Episode.from_json(row) for row in read_lines(path)]


def _factory(config: Config, tag: str) -> EnvFactory:
    from turnwise.envs.registry import make_env

    configs = {**env_configs(config, config.rollout.train), **env_configs(config, config.rollout.val)}
    return lambda: make_env(configs[tag])
