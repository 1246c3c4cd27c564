"""Warm start: the embedded model imitates a random legal player, so that it knows the format and nothing else."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import nn

from turnwise.config.schema import Config, EnvConfig
from turnwise.data.batch import Batch, collate
from turnwise.data.samples import episode_to_samples
from turnwise.envs.actions import write_reply
from turnwise.envs.adapt import TextTurns
from turnwise.envs.base import EnvError
from turnwise.envs.registry import make_env
from turnwise.generate.base import ContextOverflowError
from turnwise.rollout.context import ContextManager
from turnwise.rollout.outputs import LmOutput
from turnwise.rollout.plan import env_configs, turn_limit
from turnwise.seeding import derive_seed
from turnwise.train.embedded import MAX_CONTEXT, build_model, build_tokenizer
from turnwise.train.policy import Policy, Precision, prepare
from turnwise.types import Completion, Episode, Message, Status, Task, Turn

logger = logging.getLogger(__name__)
BATCH_EPISODES = 8
WARMUP_STEPS = 50
DECAY_SHARE = 0.3
"""Of the warm start's steps, the last ones in which the learning rate falls to 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Transcript:
    """One episode of the random player, as messages."""

    task: Task
    opening: tuple[Message, ...]
    exchanges: tuple[tuple[str, tuple[Message, ...]], ...]
    """(reply, the environment's answer) for every turn."""

    def texts(self) -> list[str]:
        answers = [message.content for _, reply in self.exchanges for message in reply]
        return [*(message.content for message in self.opening), *(said for said, _ in self.exchanges), *answers]


def play_randomly(config: Config, env_config: EnvConfig, *, count: int) -> list[Transcript]:
    """Transcripts of a player who always answers in the asked form, with random legal actions.

    Raises:
        ValueError: the environment knows no random legal action, so there is nothing to imitate.
    """
    env = make_env(env_config)
    if not isinstance(env, TextTurns):
        raise ValueError(
            f"the embedded model imitates random legal actions first, and environment {env_config.name!r} names none; "
            "set model.path to a model that can already talk"
        )
    limit = turn_limit(config, env_config, env)
    transcripts: list[Transcript] = []
    failures: list[EnvError] = []
    for number in range(count):
        try:
            transcripts.append(_play_once(config, env_config, env, number=number, limit=limit))
        except EnvError as error:  # a rollout would drop such an episode too
            failures.append(error)
    env.close()
    if failures and not transcripts:
        raise failures[0]
    if failures:
        logger.warning(
            "%d of %d episodes of the random player failed, the first: %s", len(failures), count, failures[0]
        )
    return transcripts


def _play_once(config: Config, env_config: EnvConfig, env: TextTurns, *, number: int, limit: int) -> Transcript:
    rng = Random(derive_seed(config.seed, "warmstart/actions", number))
    task = env.make_task(derive_seed(config.seed, "warmstart/task", number), "train")
    opening = env.reset(task, noise_seed=derive_seed(config.seed, "warmstart/noise", number)).messages
    exchanges: list[tuple[str, tuple[Message, ...]]] = []
    done = False
    while not done and len(exchanges) < limit:
        wanted = rng.randint(1, env_config.format.max_actions_per_turn)
        actions = [env.env.random_action(rng) for _ in range(wanted)]
        known = [action for action in actions if action is not None]
        if not known:
            raise ValueError(
                f"environment {env_config.name!r} has no random_action, so the embedded model has nobody to "
                "imitate; give the environment one, or set model.path"
            )
        said = write_reply(known, env_config.format)
        result = env.step(Message(role="assistant", content=said))
        exchanges.append((said, result.messages))
        done = result.done
    return Transcript(task=task, opening=opening, exchanges=tuple(exchanges))


def transcript_episode(transcript: Transcript, context: ContextManager, tokenizer: Any, *, number: int) -> Episode:
    """The transcript as an episode, tokenised as a rollout would have: every reply's ids end with end-of-sequence, and
    it is over where the context is full."""
    context.open(0, key=f"warmstart-{number}", seed=0, prompt=transcript.opening)
    turns: list[Turn] = []
    answer: tuple[Message, ...] = ()
    for said, reply in transcript.exchanges:
        own = said.removeprefix(context.response_prefix)
        ids = (*tokenizer.encode(own, add_special_tokens=False), tokenizer.eos_token_id)
        try:
            asked = context.next_input(0, answer)
        except ContextOverflowError:
            break
        completion = Completion(ids=ids, logprobs=(0.0,) * len(ids), finish_reason="stop")
        context.get_env_inputs([LmOutput(env_id=0, completion=completion)])
        turns.append(
            Turn(prompt_ids=asked.new_ids, completion=completion, text=said, restart=asked.restart, messages=reply)
        )
        answer = reply
    context.close(0)
    return Episode(
        id=f"warmstart-{number}",
        task=transcript.task,
        group_id=number,
        index=0,
        tag="",
        seed=0,
        noise_seed=0,
        prompt=transcript.opening,
        turns=tuple(turns),
        status=Status.COMPLETED,
    )


def build_embedded(
    config: Config, *, progress: Callable[[str], None] = lambda _: None
) -> tuple[nn.Module, Any, dict[str, float]]:
    """(model, tokenizer, metrics): the embedded model after its warm start. The same config gives the same weights."""
    settings = config.model.embedded
    env_table = env_configs(config, config.rollout.train)
    share = -(-max(settings.warmstart_episodes, 16) // len(env_table))
    transcripts = [
        transcript for env_config in env_table.values() for transcript in play_randomly(config, env_config, count=share)
    ]
    tokenizer = build_tokenizer(text for transcript in transcripts for text in transcript.texts())
    model = build_model(settings, tokenizer, seed=derive_seed(config.seed, "embedded/weights"))
    progress(
        f"built a Llama of {sum(p.numel() for p in model.parameters()) / 1000:.0f}k parameters with {len(tokenizer)} "
        f"tokens; it imitates {len(transcripts)} episodes of a random player"
    )
    context = ContextManager(tokenizer, config.rollout, max_context=MAX_CONTEXT)
    played = [
        transcript_episode(transcript, context, tokenizer, number=number)
        for number, transcript in enumerate(transcripts)
    ]
    episodes = [episode for episode in played if episode.turns]
    if not episodes:
        raise ValueError(
            f"no opening fits into rollout.max_context={config.rollout.max_context} with room for a reply; raise it"
        )
    metrics = {"warmstart/loss": 0.0, "warmstart/episodes": float(len(episodes))}
    if settings.warmstart_episodes and settings.warmstart_epochs:
        metrics["warmstart/loss"] = imitate(model, episodes, config=config, tokenizer=tokenizer)
    return prepare(model, gradient_checkpointing=config.model.gradient_checkpointing is True), tokenizer, metrics


def imitate(model: nn.Module, episodes: Sequence[Episode], *, config: Config, tokenizer: Any) -> float:
    """The mean negative log-prob per reply token over the last tenth of the steps, after training on the episodes."""
    settings = config.model.embedded
    precision = Precision.choose("float32", device=config.train.device)  # no masters here: the model is small
    policy = Policy(model, tokenizer, precision=precision)
    batch = _collate(episodes, tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.warmstart_lr, betas=(0.9, 0.95), weight_decay=0.0)
    plan: list[torch.Tensor] = []
    for epoch in range(settings.warmstart_epochs):
        generator = torch.Generator().manual_seed(derive_seed(config.seed, "warmstart/order", epoch))
        plan.extend(torch.randperm(batch.num_rows, generator=generator).split(BATCH_EPISODES))
    losses: list[float] = []
    for index, rows in enumerate(plan):
        left = (len(plan) - index) / (DECAY_SHARE * len(plan))
        rate = settings.warmstart_lr * min(1.0, (index + 1) / WARMUP_STEPS, left)
        for group in optimizer.param_groups:
            group["lr"] = rate
        part = batch.select(rows)
        if settings.warmstart_observations:
            part = part.replace(response_mask=part.attention_mask.bool().index_fill(1, torch.tensor(0), False))
        part = part.to(precision.device)
        loss = -policy.score(part).logprobs.sum() / part.response_mask.sum()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    tail = losses[-max(len(losses) // 10, 1) :]
    return sum(tail) / len(tail)


def _collate(episodes: Sequence[Episode], tokenizer: Any) -> Batch:
    samples = [sample for episode in episodes for sample in episode_to_samples(episode)]
    return collate(samples, pad_id=tokenizer.pad_token_id)
