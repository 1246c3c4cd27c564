"""AgentProxy: plays episodes with a generator, each independently. A slow environment never blocks
the others."""

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from turnwise.chat.render import Tokenizer
from turnwise.config.schema import Config, RolloutConfig
from turnwise.envs.base import EnvError, EnvFactory, WaitingEnv
from turnwise.envs.gate import clean_text, describe
from turnwise.generate.base import ContextOverflowError, Generator, Sampling
from turnwise.isolation.processes import WorkerLostError
from turnwise.procs.event_loop import EventLoop
from turnwise.procs.garbage import fewer_collections
from turnwise.procs.interrupts import from_the_user, interrupts
from turnwise.procs.progress import Progress, Stall, some_of
from turnwise.rollout.agents import Agent
from turnwise.rollout.context import ContextManager
from turnwise.rollout.env_state import EnvStateManager
from turnwise.rollout.plan import EpisodePlan
from turnwise.rollout.speakers import PlayerError, PolicySpeaker, Speaker
from turnwise.types import Episode, Status

logger = logging.getLogger(__name__)
MAX_WORKER_LOSSES = 20  # restarts of an episode after another one crashed its worker
EPISODES_PER_WAVE = 32  # episodes started before the generator runs, at least
WAVES = 32  # most waves per rollout
CANCEL_SECONDS = 5.0  # time for a cancelled episode to close its environment


class RolloutError(RuntimeError):
    """No episode of a rollout is usable."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutResult:
    """The episodes of one rollout.

    Example:
        >>> RolloutResult(episodes=(), dropped=(), seconds=0.5).num_tokens
        0
    """

    episodes: tuple[Episode, ...]
    """Usable episodes, in the order of their plan. No group is smaller than allowed."""
    dropped: tuple[Episode, ...]
    """Failed episodes, and those whose group became too small. They are stored and counted, never
    trained on."""
    seconds: float
    late: int | None = None
    """Episodes that were given up because enough groups were over. None: `rollout.enough_groups` is
    not set."""

    @property
    def num_tokens(self) -> int:
        """Generated tokens."""
        return sum(len(turn.completion.ids) for episode in self.episodes for turn in episode.turns)


def sampling_for(config: RolloutConfig, split: str) -> Sampling:
    """Sampling settings of a split. Training refuses settings that make the sampled distribution
    differ from the scored one.

    Example:
        >>> sampling_for(RolloutConfig(temperature=0.7), "train").temperature
        0.7
    """
    training = split == "train"
    if training and (config.top_k or config.top_p < 1.0):
        raise ValueError(
            f"rollout.top_k = {config.top_k} and rollout.top_p = {config.top_p} change the sampled "
            "distribution, not "
            "the scored one; training needs top_k: 0 and top_p: 1.0"
        )
    if training and config.temperature == 0.0:
        raise ValueError(
            "rollout.temperature = 0 does not explore; training needs a temperature above 0"
        )
    return Sampling(
        max_tokens=config.max_response_tokens,
        temperature=config.temperature if training else config.eval_temperature,
        top_k=0 if training else config.top_k,
        top_p=1.0 if training else config.top_p,
        stop=config.stop,
    )


class AgentProxy:
    """Manages multi-turn rollouts: environments, contexts and the speaker that replies.

    Every episode is its own asyncio task: reset, then reply and step until it is over. There is no
    barrier between episodes; the generator batches the waiting requests. A failed episode is
    retried with a fresh environment and the same seeds, and dropped if that fails too.

    Args:
        generator: the policy. None: a `speaker` replies.
        tokenizer: the policy's. None: a `speaker` replies.
        factories: environments given as objects, by tag.
        on_turn: called after every turn (the agent's last).
        on_episode: called after every episode.
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
        on_turn: Callable[[Agent], None] | None = None,
        on_episode: Callable[[Episode], None] | None = None,
    ) -> None:
        self.split = split
        self._on_turn, self._on_episode = on_turn, on_episode
        self.generator = generator
        self._config = config.rollout
        self._group_size = (
            config.rollout.train if split == "train" else config.rollout.val
        ).group_size
        if speaker is None:
            if generator is None or tokenizer is None:
                raise ValueError(
                    "AgentProxy needs a generator and a tokenizer, or a speaker in their place"
                )
            sampling = sampling_for(config.rollout, split)
            self.context = ContextManager(
                tokenizer, config.rollout, max_context=generator.max_context
            )
            speaker = PolicySpeaker(
                self.context, generator, sampling, timeout=config.rollout.generate_timeout
            )
        self._speaker = speaker
        self.env_state = EnvStateManager(
            config, split=split, factories=factories, agent_cls=agent_cls
        )
        for tag, probe in self.env_state.probes.items():
            if config.rollout.window != "full" and isinstance(probe, WaitingEnv):
                self.env_state.close()
                raise ValueError(
                    f"rollout.window: {config.rollout.window} cannot be honoured for the agent "
                    f"{tag!r}, whose program decides what the model reads; set rollout.window: full"
                )
        self._loop = EventLoop()
        self._moves = 0
        """Resets and turns that were made. While it stands still, the rollout waits."""

    def play(self, step: int) -> RolloutResult:
        """One rollout; blocks until it is done. Inside a running event loop, await `rollout`
        instead."""
        return self._loop.run(self.rollout(step))

    def play_all(
        self, step: int, *, on_episode: Callable[[Episode], None] | None = None
    ) -> list[Episode]:
        """All episodes of one rollout, failed ones with their status; blocks until they are
        done."""
        return self._loop.run(self.episodes(step, on_episode=on_episode))

    async def rollout(self, step: int) -> RolloutResult:
        """Plays all episodes of one rollout, and repairs its groups.

        Raises:
            RolloutError: no episode is usable; the message has the first error.
        """
        started = time.perf_counter()
        enough = self._config.enough_groups if self.split == "train" else None
        episodes = await self.episodes(step, enough=enough)
        kept, dropped = repair_groups(episodes, self._config, group_size=self._group_size)
        if not kept:
            first = next((episode for episode in dropped if episode.error), None)
            why = (
                f"first error: {first.status.value}: {first.error}"
                if first
                else "no episode has a turn"
            )
            raise RolloutError(
                f"none of the {len(dropped)} episodes of step {step} can be used; {why}"
            )
        if dropped:
            counts = Counter(episode.status.value for episode in dropped)
            logger.warning(
                "step %d: %d of %d episodes dropped: %s",
                step,
                len(dropped),
                len(episodes),
                dict(counts),
            )
        return RolloutResult(
            episodes=tuple(kept),
            dropped=tuple(dropped),
            seconds=time.perf_counter() - started,
            late=None if enough is None else len(self.env_state.agents) - len(episodes),
        )

    async def episodes(
        self,
        step: int,
        *,
        on_episode: Callable[[Episode], None] | None = None,
        enough: int | None = None,
    ) -> list[Episode]:
        """All episodes of one rollout in the order of their plan, failed ones with their status; or
        those of the groups that are over once `enough` of them are."""
        what = f"playing {'held-out ' * (self.split != 'train')}episodes"
        with fewer_collections(), Progress(what) as progress:
            agents = self.env_state.start(step)
            progress.total = len(agents)
            finish = _Finish(agents, enough=enough)

            def over(episode: Episode) -> None:
                progress.advance()
                finish.note(episode.group_id)
                if on_episode is not None:
                    on_episode(episode)

            jobs: list[asyncio.Task[Episode]] = []
            watch = asyncio.create_task(self._say_stalls())
            wave = max(EPISODES_PER_WAVE, len(agents) // WAVES)
            try:
                for agent in agents:
                    jobs.append(asyncio.create_task(self._play(agent.plan.env_id, over)))
                    if len(jobs) % wave == 0:
                        await asyncio.sleep(
                            0
                        )  # the generator starts on these while the others reset
                return await finish.wait(jobs)
            except BaseException:
                for job in jobs:
                    job.cancel()
                raise
            finally:
                watch.cancel()

    def play_these(self, plans: Sequence[EpisodePlan], *, progress: bool = True) -> list[Episode]:
        """`play_plans`; blocks until it is done. Without `progress` nothing is printed meanwhile:
        a person may take as long as they like."""
        if not progress:
            return self._loop.run(self.play_plans(plans))
        with Progress("playing episodes", total=len(plans)) as shown:
            return self._loop.run(self.play_plans(plans, on_episode=lambda _: shown.advance()))

    async def play_plans(
        self,
        plans: Sequence[EpisodePlan],
        *,
        timeout: float | None = None,
        on_episode: Callable[[Episode], None] | None = None,
    ) -> list[Episode]:
        """The episodes of exactly these plans, in their order; failed ones have their status.

        For callers that choose the tasks. Several calls may run concurrently if their env_ids
        differ. An episode that is not over after `timeout` seconds ends as `env_timeout`.
        """
        self.env_state.take(plans)
        jobs = [asyncio.create_task(self._play(plan.env_id, on_episode)) for plan in plans]
        watch = asyncio.create_task(self._say_stalls())
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
                agent.fail(
                    Status.ENV_TIMEOUT,
                    TimeoutError(f"the episode was not over after {timeout:g} s"),
                )
                episodes.append(agent.episode())
            return episodes
        finally:
            watch.cancel()
            for job in jobs:
                job.cancel()
            for plan in plans:
                self.env_state.agents.pop(plan.env_id, None)

    def close(self) -> None:
        """Closes the environments and their processes."""
        self._loop.run(self.env_state.aclose())
        self._loop.close()

    async def _play(
        self, env_id: int, on_episode: Callable[[Episode], None] | None = None
    ) -> Episode:
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
        for tell in (on_episode, self._on_episode):
            if tell is not None:
                tell(episode)
        return episode

    async def _say_stalls(self) -> None:
        """Says which episodes are waited for, whenever nothing has moved for
        `rollout.stall_timeout`."""
        stall = Stall(self._config.stall_timeout)
        while True:
            seconds = stall.look(self._moves)
            if seconds is not None:
                open_ = [agent for agent in self.env_state.agents.values() if not agent.done]
                names = [
                    f"{agent.plan.episode_id} (turn {len(agent.turns) + 1})" for agent in open_
                ]
                logger.warning(
                    "nothing has moved for %.0f s (rollout.stall_timeout); waiting for %s",
                    seconds,
                    some_of(names),
                )
            await asyncio.sleep(min(1.0, stall.seconds / 4))

    async def _attempt(self, agent: Agent) -> bool:
        """Plays the agent's episode to its end. True if its worker process was lost because of
        another episode."""
        try:
            await agent.reset()
            self._moves += 1
            if agent.opening is not None:
                self._speaker.open(agent)
            while not agent.done:
                await self._turn(agent)
            if agent.status is Status.TRUNCATED_TURNS:
                try:
                    agent.final_ids = self._speaker.final_ids(agent)
                except Exception as error:  # this chat template may refuse the conversation
                    agent.fail(Status.GENERATOR_ERROR, error)
            return isinstance(agent.cause, WorkerLostError)
        finally:
            closing = {
                "the conversation": lambda: self._speaker.close(agent),
                "the environment": agent.handle.close,
            }
            for what, close in closing.items():
                before = interrupts()
                try:
                    await close()
                except BaseException as error:  # the episode is over; keep its result
                    if ends_the_rollout(error, before=before):
                        raise
                    logger.warning(
                        "%s: closing %s failed: %s", agent.plan.episode_id, what, describe(error)
                    )

    async def _turn(self, agent: Agent) -> None:
        before = interrupts()
        try:
            env_input = await self._speaker.reply(agent)
            env_input.text = clean_text(env_input.text)
        except PlayerError:
            raise
        except ContextOverflowError as error:
            await agent.cut(Status.TRUNCATED_LENGTH, str(error))
        except EnvError as error:  # from a player's request for a hint
            agent.fail_env(error)
        except BaseException as error:
            if ends_the_rollout(error, before=before):
                raise
            agent.fail(Status.GENERATOR_ERROR, error)
        else:
            await agent.step(env_input)
            self._moves += 1
            if self._on_turn is not None and not agent.failed:
                self._on_turn(agent)


def ends_the_rollout(error: BaseException, *, before: int) -> bool:
    """True for a Ctrl-C after `interrupts()` was `before`, and where the task is cancelled or ended
    by its event loop. Generators and players may raise the same, which ends only their episode."""
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        task = asyncio.current_task()
        return task is None or bool(task.cancelling())
    return isinstance(error, KeyboardInterrupt) and from_the_user(error, before=before)


class _Finish:
    """Waits for a rollout's episodes: for all, or for those of the first `enough` groups to end."""

    def __init__(self, agents: Sequence[Agent], *, enough: int | None) -> None:
        self._groups = [agent.plan.group_id for agent in agents]
        self._left = Counter(self._groups)
        self._enough = enough
        self._reached = asyncio.Event()
        self._over: set[int] = set()

    def note(self, group: int) -> None:
        """Counts an episode of the group that has ended."""
        self._left[group] -= 1
        if self._left[group] == 0:
            self._over.add(group)
        if len(self._over) == self._enough:
            self._reached.set()

    async def wait(self, jobs: Sequence[asyncio.Task[Episode]]) -> list[Episode]:
        """The episodes of the groups that are over; the others are cancelled."""
        every = asyncio.gather(*jobs)
        if self._enough is None:
            return await every
        reached = asyncio.create_task(self._reached.wait())
        try:
            await asyncio.wait((every, reached), return_when=asyncio.FIRST_COMPLETED)
        finally:
            reached.cancel()
        if every.done() and every.exception() is not None:
            return every.result()
        over = frozenset(self._over)
        every.cancel()
        late = [job for job in jobs if not job.done()]
        if late:
            await asyncio.wait(late, timeout=CANCEL_SECONDS)
        return [
            job.result() for job, group in zip(jobs, self._groups, strict=True) if group in over
        ]


def repair_groups(
    episodes: Sequence[Episode], config: RolloutConfig, *, group_size: int
) -> tuple[list[Episode], list[Episode]]:
    """(kept, dropped) episodes. Drops episodes that failed or have no turn, groups that became too
    small for a baseline and, with `on_failure: drop_group`, every group with a failure.
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
