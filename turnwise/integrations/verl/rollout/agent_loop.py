"""Our rollout inside verl's agent loop: one call of verl's plays one episode of ours, turn by
turn."""

import itertools
import logging
from typing import Any

import torch
from verl.experimental.agent_loop.agent_loop import (
    AgentLoopBase,
    AgentLoopMetrics,
    AgentLoopOutput,
    register,
)

from turnwise.config.schema import Config
from turnwise.data.penalties import reward_sums, without_penalties
from turnwise.data.samples import episode_to_samples, require_one_role
from turnwise.evaluate.players import with_episodes
from turnwise.generate.stops import end_ids
from turnwise.integrations.verl.config.sections import SECTION, read_config, unpack
from turnwise.integrations.verl.rollout.generator import ServerGenerator
from turnwise.integrations.verl.trainer.evaluation import note_outcome
from turnwise.rollout.plan import (
    EpisodePlan,
    divide_groups,
)
from turnwise.rollout.proxy import AgentProxy
from turnwise.seeding import derive_seed
from turnwise.types import Episode, Sample
from turnwise.user_code import line_of

logger = logging.getLogger(__name__)
LOOP = "turnwise"
"""The name under which verl knows the loop."""
SAMPLED = "turnwise_sampled"
"""The column of the tokens that the model said, of which verl's `response_mask` are trained on."""
FAILURES = "turnwise_failures"
"""The partition of the TransferQueue in which failed episodes are noted."""


class EpisodeFailedError(RuntimeError):
    """An episode failed for good. verl marks its group as failed; the trainer refills, shrinks or
    drops it."""


class TurnOutput(AgentLoopOutput):
    """One sample of an episode: rewards on the last token of their turns, and what credit
    assignment needs. verl's response mask says what is trained on, `sampled` what the model said.
    """

    sampled: list[int]
    token_rewards: list[float]
    turn_ids: list[int]
    state_ids: list[int]

    def as_dict(self) -> dict[str, Any]:
        fields = super().as_dict()
        fields[SAMPLED] = torch.tensor(fields.pop("sampled"), dtype=torch.int64)
        fields["rm_scores"] = torch.tensor(fields.pop("token_rewards"), dtype=torch.float32)
        fields["turn_ids"] = torch.tensor(fields.pop("turn_ids"), dtype=torch.int64)
        fields["state_ids"] = torch.tensor(fields.pop("state_ids"), dtype=torch.int64)
        return fields


def state_number(key: str) -> int:
    """A state's number: equal for equal names, in every process.

    Example:
        >>> state_number("hole at 3") == state_number("hole at 3")
        True
        >>> state_number("a") == state_number("b")
        False
    """
    return derive_seed(0, key)


def sample_output(
    sample: Sample,
    episode: Episode,
    *,
    row: int,
    rows: int,
    validate: bool,
    store: bool,
    bare: Sample | None = None,
) -> TurnOutput:
    """A sample as verl takes it: the prompt up to the first sampled token, the response from there
    on.

    verl judges a validated episode by the rewards of its last row, so there the whole reward is on
    that row's end.

    Args:
        bare: the same sample without penalties, where the episode has any.
    """
    start = sample.response_mask.index(True)
    rewards = list(sample.rewards[start:])
    if validate:
        rewards = [0.0] * len(rewards)
        if row == rows - 1:
            rewards[-1] = episode.reward
    versions = [turn.completion.policy_version for turn in episode.turns]
    info = {
        "turns": len(episode.turns),
        "success": _number(episode.success),
        "truncated": episode.status.truncated,
    }
    extra = {
        "reward_extra_info": info,
        "min_global_steps": min(versions),
        "max_global_steps": max(versions),
        "turnwise": {
            "episode": episode.id,
            "tag": episode.tag,
            "group": episode.group_id,
            "member": episode.index,
            "role": sample.role,
            "row": row,
            "truncated": sample.truncated,
            "status": episode.status.value,
            "turns": len(episode.turns),
            "reward": episode.reward,
            "success": _number(episode.success),
            "attempts": episode.attempts,
            "sums": [*reward_sums(episode, _trained_role(episode))],
            "bare": None if bare is None else list(bare.rewards[start:]),
            "line": episode.to_line() if store and row == 0 else "",
        },
    }
    return TurnOutput(
        prompt_ids=list(sample.ids[:start]),
        response_ids=list(sample.ids[start:]),
        response_mask=[int(trained) for trained in sample.loss_mask[start:]],
        sampled=[int(produced) for produced in sample.response_mask[start:]],
        response_logprobs=list(sample.logprobs[start:]),
        token_rewards=rewards,
        turn_ids=list(sample.turn_ids[start:]),
        state_ids=[
            -1 if turn < 0 else state_number(sample.state_keys[turn])
            for turn in sample.turn_ids[start:]
        ],
        # A loop that leaves it empty sends verl to its own reward function.
        reward_score=episode.reward,
        num_turns=2 * len(episode.turns),
        metrics=AgentLoopMetrics(
            generate_sequences=sum(turn.generate_seconds for turn in episode.turns),
            tool_calls=sum(turn.env_seconds for turn in episode.turns),
        ),
        multi_modal_data={},
        extra_fields=extra,
    )


def episode_outputs(episode: Episode, *, validate: bool, store: bool) -> list[TurnOutput]:
    """The episode's samples as verl takes them."""
    require_one_role(episode, backend="verl")
    samples = episode_to_samples(episode)
    without = without_penalties(episode, {(episode.group_id, _trained_role(episode))})
    same = all(a.reward == b.reward for a, b in zip(episode.turns, without.turns, strict=True))
    bare = [None] * len(samples) if same or validate else episode_to_samples(without)
    return [
        sample_output(
            sample,
            episode,
            row=row,
            rows=len(samples),
            validate=validate,
            store=store,
            bare=bare[row],
        )
        for row, sample in enumerate(samples)
    ]


def _trained_role(episode: Episode) -> str:
    return next((turn.role for turn in episode.turns if turn.trained), episode.turns[0].role)


class SingleEpisodeProxy(AgentProxy):
    """An AgentProxy that plays one episode per call; verl schedules the calls."""

    def __init__(
        self,
        config: Config,
        generator: ServerGenerator,
        tokenizer: Any,
        *,
        split: str,
        section: Any,
    ) -> None:
        payload = unpack(section.get("payload"))
        if split != "train":
            config = with_episodes(config, config.eval.episodes)  # the tasks of a native evaluation
        super().__init__(
            config,
            generator,
            tokenizer,
            split=split,
            factories=payload.factories or None,
            agent_cls=payload.agent_cls,
        )
        self.config = config
        self._numbers = itertools.count()

    def plan(self, index: int, member: int, *, step: int) -> EpisodePlan:
        """The episode of one member of the group at row `index` of the data set: the native
        trainer's plan.

        Row i holds group i % env_groups of step i // env_groups, so a run on verl plays the tasks
        of a native one.
        """
        config, split = self.config, self.split
        groups = config.rollout.train if split == "train" else config.rollout.val
        moment, group = (
            divmod(index, groups.env_groups) if split == "train" else (0, index % groups.env_groups)
        )
        tag = divide_groups(groups)[group] or config.env.name
        task_seed = derive_seed(config.seed, f"task/{split}", moment, group)
        task, error = self.env_state.task(tag, task_seed, step=step)
        turns = 1
        if error is None:
            turns, error = self.env_state.turns(tag)
        return EpisodePlan(
            env_id=next(self._numbers),
            group_id=index,
            index=member,
            tag=tag,
            task=task,
            seed=derive_seed(config.seed, f"tokens/{split}", moment, group, member),
            noise_seed=derive_seed(config.seed, f"noise/{split}", moment, group, member),
            episode_id=f"{split}-{step:06d}-g{index}-m{member}",
            max_turn=turns,
            error=error,
        )

    async def play_one(self, plan: EpisodePlan) -> Episode:
        """Plays one episode to its end, retries included."""
        self.env_state.take([plan])
        try:
            return await self._play(plan.env_id)
        finally:
            del self.env_state.agents[plan.env_id]


_players: dict[str, SingleEpisodeProxy] = {}  # by split: a worker process belongs to one run


@register(LOOP)
class TurnwiseAgentLoop(AgentLoopBase):
    """verl makes one of these per episode; environments, contexts and sessions live in the
    process's SingleEpisodeProxy."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> Any:
        split, member = row["split"], int(row.get("session_id", 0))
        key = f"{row['uid']}_{member}"
        try:
            player = self._player(split)
            step = int(row["global_steps"]) - 1 if split == "train" else int(row["global_steps"])
            plan = player.plan(int(row["index"]), member, step=step)
            episode = await player.play_one(plan)
        except Exception as error:  # verl would write it into this worker's log alone
            said = f"{type(error).__name__}: {error}{line_of(error)}"
            await _note_failure({"status": "worker_error", "error": said, "split": split}, key=key)
            raise
        if episode.status.failed or not episode.turns:
            await _note_failure(failure_tag(episode, split=split), key=key)
            raise EpisodeFailedError(
                f"{episode.id} ended as {episode.status.value}: {episode.error}"
            )
        if split != "train":
            await note_outcome(episode, key=key)
        every = player.config.log.episodes_every
        store = split == "train" and every > 0 and step % every == 0
        return episode_outputs(episode, validate=split != "train", store=store)

    def _player(self, split: str) -> SingleEpisodeProxy:
        if split not in _players:
            if not self.config[SECTION].get("json"):
                raise ValueError(
                    "turnwise's episodes are played for a trainer that is not turnwise's; set "
                    "trainer.use_v1: true and trainer.v1.trainer_mode: turnwise"
                )
            config, rollout = read_config(self.config), self.rollout_config
            generator = ServerGenerator(
                self.server_manager,
                engine=rollout.name,
                max_context=rollout.max_model_len
                or rollout.prompt_length + rollout.response_length,
                stop_ids=end_ids(self.tokenizer, None),
                tokenizer=self.tokenizer,
            )
            _players[split] = SingleEpisodeProxy(
                config, generator, self.tokenizer, split=split, section=self.config[SECTION]
            )
        return _players[split]


def failure_tag(episode: Episode, *, split: str) -> dict[str, Any]:
    """What the driver is told of an episode that failed for good."""
    return {
        "status": episode.status.value,
        "error": episode.error or "no turn was played",
        "split": split,
        "attempts": episode.attempts,
    }


async def _note_failure(tag: dict[str, Any], *, key: str) -> None:
    import transfer_queue as tq

    await tq.async_kv_put(key=key, partition_id=FAILURES, tag=tag)


def _number(value: bool | None) -> float | None:
    return None if value is None else float(value)
