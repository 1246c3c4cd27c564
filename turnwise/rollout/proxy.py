"""AgentProxy: plays episodes with a generator, each on its own. A slow environment never holds the others."""

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from turnwise.chat.render import Tokenizer
from turnwise.config.schema import Config, RolloutConfig
from turnwise.envs.base import EnvFactory
from turnwise.generate.base import ContextOverflowError, Generator, Sampling
from turnwise.isolation.processes import WorkerLostError
from turnwise.procs.event_loop import EventLoop
from turnwise.procs.garbage import calm_collector
from turnwise.rollout.agents import Agent
from turnwise.rollout.context import ContextManager
from turnwise.rollout.env_state import EnvStateManager
from turnwise.rollout.plan import EpisodePlan
from turnwise.rollout.speakers import PlayerError, PolicySpeaker, Speaker
from turnwise.types import Episode, Status

logger = logging.getLogger(__name__)
MAX_WORKER_LOSSES = 20  # restarts that an episode gets for free, because another one took its worker down
EPISODES_PER_WAVE = 32  # episodes that are started before the generator gets its turn, at least
WAVES = 32  # and at most so many waves
CANCEL_SECONDS = 5.0  # what a cancelled episode gets to close its environment


class RolloutError(RuntimeError):
    """Not one episode of a rollout could be used."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutResult:
    """The episodes of one rollout.

    Example:
        >>> RolloutResult(episodes=(), dropped=(), seconds=0.5).num_tokens
        0
    """

    episodes: tuple[Episode, ...]
    """Usable episodes, in the order of their plan. Groups are repaired: none is smaller than allowed."""
    dropped: tuple[Episode, ...]
    """Failed episodes, and those whose group became too small. They are stored and counted, never trained on."""
    seconds: float

    @property
    def num_tokens(self) -> int:
        """Generated tokens."""
        return sum(len(turn.completion.ids) for episode in self.episodes for turn in episode.turns)


def sampling_for(config: RolloutConfig, split: str) -> Sampling:
    """How replies are drawn. Training refuses whatever would make the sampled distribution differ from the scored one.

    Example:
        >>> sampling_for(RolloutConfig(temperature=0.7), "train").temperature
        0.7
    """
    training = split == "train"
    if training and (config.top_k or config.top_p < 1.0):
        raise ValueError(
            f"rollout.top_k = {config.top_k} and rollout.top_p = {config.top_p} change the sampled distribution, not "
            "the scored one; training needs top_k: 0 and top_p: 1.0"
        )
    if training and config.temperature == 0.0:
        raise ValueError("rollout.temperature = 0 samples no exploration; training needs a temperature above 0")
    return Sampling(
        max_tokens=config.max_response_tokens,
        temperature=config.temperature if training else config.eval_temperature,
        top_k=0 if training else config.top_k,
        top_p=1.0 if training else config.top_p,
        stop=config.stop,
    )


class AgentProxy:
    """Manages multi-turn rollouts: environments, contexts and whoever replies.

    Every episode is a task of its own: reset, then reply and step until it is over. There is no barrier between
    episodes; the generator batches whatever is waiting. A failed episode is started again with a fresh environment and
    the same seeds, and dropped when that does not help.

    Args:
        generator, tokenizer: the policy. Both may be None where a `speaker` replies in its place.
        factories: environments given as objects, by tag.
    """

    def __init__(
        self,
        config: Config,
        generator: Generator | None = None,
        tokenizer: Tokenizer | None = None,
        *,
        split: str = "train",
        factories: Mapping[str, EnvFactory] | None = None,
        agent_cls: type[Agent] | None = None,
        speaker: Speaker | None = None,
    ) -> None:
        self.split = split
        self.generator = generator
        self._config = config.rollout
        self._group_size = (config.rollout.train if split == "train" else config.rollout.val).group_size
        if speaker is None:
            if generator is None or tokenizer is None:
                raise ValueError("AgentProxy needs a generator and a tokenizer, or a speaker in their place")
            sampling = sampling_for(config.rollout, split)
            self.context = ContextManager(tokenizer, config.rollout, max_context=generator.max_context)
            speaker = PolicySpeaker(self.context, generator, sampling, timeout=config.rollout.generate_timeout)
        self._speaker = speaker
        self.env_state = EnvStateManager(config, split=split, factories=factories, agent_cls=agent_cls)
        self._loop = EventLoop()

    def play(self, step: int) -> RolloutResult:
        """One rollout, waited for. Inside a running event loop, await `rollout` instead."""
        return self._loop.run(self.rollout(step))

    def play_all(self, step: int, *, on_episode: Callable[[Episode], None] | None = None) -> list[Episode]:
        """All episodes of one rollout, failed ones with their status, waited for."""
        return self._loop.run(self.episodes(step, on_episode=on_episode))

    async def rollout(self, step: int) -> RolloutResult:
        """Plays all episodes of one rollout, and repairs its groups.

        Raises:
            RolloutError: no episode could be used; the message has the first error.
        """
        started = time.perf_counter()
        episodes = await self.episodes(step)
        kept, dropped = repair_groups(episodes, self._config, group_size=self._group_size)
        if not kept:
            first = next((episode for episode in dropped if episode.error), None)
            why = f"first error: {first.status.value}: {first.error}" if first else "no episode has a turn"
            raise RolloutError(f"none of the {len(dropped)} episodes of step {step} can be used; {why}")
        if dropped:
            counts = Counter(episode.status.value for episode in dropped)
            logger.warning("step %d: %d of %d episodes dropped: %s", step, len(dropped), len(episodes), dict(counts))
        return RolloutResult(episodes=tuple(kept), dropped=tuple(dropped), seconds=time.perf_counter() - started)

    async def episodes(self, step: int, *, on_episode: Callable[[Episode], None] | None = None) -> list[Episode]:
        """All episodes of one rollout in the order of their plan, failed ones with their status."""
        with calm_collector():
            agents = self.env_state.start(step)
            jobs: list[asyncio.Task[Episode]] = []
            wave = max(EPISODES_PER_WAVE, len(agents) // WAVES)
            try:
                for agent in agents:
                    jobs.append(asyncio.create_task(self._play(agent.plan.env_id, on_episode)))
                    if len(jobs) % wave == 0:
                        await asyncio.sleep(0)  # the generator begins with the first ones while the others reset
                return await asyncio.gather(*jobs)
            except BaseException:
                for job in jobs:
                    job.cancel()
                raise

    def play_these(self, plans: Sequence[EpisodePlan]) -> list[Episode]:
        """`play_plans`, waited for."""
        return self._loop.run(self.play_plans(plans))

    async def play_plans(self, plans: Sequence[EpisodePlan], *, timeout: float | None = None) -> list[Episode]:
        """The episodes of exactly these plans, in their order, the failed ones with their status.

        For callers that choose the tasks themselves. Several calls may run side by side where their plans' env_ids
        differ. An episode that is not over after `timeout` seconds is cut off and ends as `env_timeout`.
        """
        self.env_state.take(plans)
        jobs = [asyncio.create_task(self._play(plan.env_id)) for plan in plans]
        try:
            _, late = await asyncio.wait(jobs, timeout=timeout)
            for job in late:
                job.cancel()
            if late:
                await asyncio.wait(late, timeout=CANCEL_SECONDS)
            episodes: list[Episode] = []
            for plan, job in zip(plans, jobs, strict=True):
                if job not in late:
                    episodes.append(job.result())
                    continue
                agent = self.env_state.agents[plan.env_id]
                agent.fail(Status.ENV_TIMEOUT, TimeoutError(f"the episode was not over after {timeout:g} s"))
                episodes.append(agent.episode())
            return episodes
        finally:
            for job in jobs:
                job.cancel()
            for plan in plans:
                self.env_state.agents.pop(plan.env_id, None)

    def close(self) -> None:
        """Closes the environments and, with them, every process that they run in."""
        self._loop.run(self.env_state.aclose())
        self._loop.close()

    async def _play(self, env_id: int, on_episode: Callable[[Episode], None] | None = None) -> Episode:
        losses = 0
        agent = self.env_state.agents[env_id]
        while True:
            lost = await self._attempt(agent)
            if not agent.failed:
                break
            if lost and losses < MAX_WORKER_LOSSES:
                losses += 1
                agent = self.env_state.restart(env_id, count=False)
            elif agent.attempts <= self._config.retries:
                agent = self.env_state.restart(env_id)
            else:
                break
        episode = agent.episode()
        if on_episode is not None:
            on_episode(episode)
        return episode

    async def _attempt(self, agent: Agent) -> bool:
        """Plays the agent's episode to its end. True where its worker process was lost through no fault of its own."""
        try:
            await agent.reset()
            if agent.opening is not None:
                self._speaker.open(agent)
            while not agent.done:
                await self._turn(agent)
            if agent.status is Status.TRUNCATED_TURNS:
                agent.final_ids = self._speaker.final_ids(agent)
            return isinstance(agent.cause, WorkerLostError)
        finally:
            await self._speaker.close(agent)
            try:
                await agent.handle.close()
            except Exception as error:  # the episode is over and its result stands
                logger.warning("%s: closing the environment failed: %s", agent.plan.episode_id, error)

    async def _turn(self, agent: Agent) -> None:
        try:
            env_input = await self._speaker.reply(agent)
        except PlayerError:
            raise
        except ContextOverflowError:
            await agent.cut(Status.TRUNCATED_LENGTH)
        except Exception as error:
            agent.fail(Status.GENERATOR_ERROR, error)
        else:
            await agent.step(env_input)


def repair_groups(
    episodes: Sequence[Episode], config: RolloutConfig, *, group_size: int
) -> tuple[list[Episode], list[Episode]]:
    """(kept, dropped) episodes. A failed one, or one without a turn, leaves its group; a group that became too small
    to have a baseline goes whole, and so does any group with a failure under `on_failure: drop_group`.
    """
    groups: dict[int, list[Episode]] = defaultdict(list)
    broken: set[int] = set()
    for episode in episodes:
        usable = bool(episode.turns) and not episode.status.failed
        if usable:
            groups[episode.group_id].append(episode)
        elif config.on_failure == "drop_group":
            broken.add(episode.group_id)
    smallest = min(config.min_group_size, group_size)
    kept_ids = {
        episode.id
        for group_id, members in groups.items()
        if group_id not in broken and len(members) >= smallest
        for episode in members
    }
    kept = [episode for episode in episodes if episode.id in kept_ids]
    return kept, [episode for episode in episodes if episode.id not in kept_ids]
