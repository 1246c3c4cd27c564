# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
"""Warm start: supervised training of the embedded model on a random legal player, which teaches the
format only."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from turnwise.config.schema import Config, EnvConfig, TrainConfig
from turnwise.data.batch import Batch, collate
from turnwise.data.samples import episode_to_samples
from turnwise.evaluate.players import RandomPlayer
from turnwise.models.embedded import MAX_CONTEXT, build_model, build_tokenizer
from turnwise.models.policy import Policy, Precision, prepare
from turnwise.procs.progress import Progress
from turnwise.rollout.context import ContextManager
from turnwise.rollout.plan import env_configs
from turnwise.rollout.speakers import PlayerError
from turnwise.seeding import derive_seed
from turnwise.train.demonstrations import tokenised
from turnwise.train.imitation import Imitator, rate_factor, with_all_tokens, with_targets
from turnwise.train.sources import play_tasks
from turnwise.types import Episode

BATCH_EPISODES = 8
WARMUP_STEPS = 10
"""Minimum number of learning-rate warm-up steps."""
OPTIMIZER = TrainConfig(adam_betas=(0.9, 0.95), packing=False, micro_batch_tokens=2**31)
"""The whole batch in one pass: the model is small."""


def play_randomly(config: Config, tag: str, env_config: EnvConfig, *, count: int) -> list[Episode]:
    """Episodes of a player that replies in the required format with random legal actions.

    Raises:
        ValueError: the environment has no random legal actions to imitate. EnvError: the
        environment failed in every episode.
    """
    try:
        return play_tasks(
            config,
            RandomPlayer(),
            tag,
            env_config,
            count=count,
            purpose="warmstart",
            task_seed=lambda number: derive_seed(config.seed, "warmstart/task", number),
        )
    except PlayerError as error:
        raise ValueError(
            "the embedded model imitates random legal actions first, and environment "
            f"{env_config.name!r} names none; "
            "give it random_action, or set model.path to a model that can already talk"
        ) from error


def _texts(episode: Episode) -> Iterator[str]:
    yield from (message.content for message in episode.prompt)
    for turn in episode.turns:
        yield turn.text
        yield from (message.content for message in turn.messages)


def build_embedded(
    config: Config, *, progress: Callable[[str], None] = lambda _: None
) -> tuple[nn.Module, Any, dict[str, float]]:
    """(model, tokenizer, metrics): the embedded model after its warm start. The same config gives
    the same weights."""
    if config.model.chat_template_args:
        raise ValueError(
            "model.chat_template_args: the embedded model's template reads none; set model.path"
        )
    settings = config.model.embedded
    env_table = env_configs(config, config.rollout.train)
    share = -(-max(settings.warmstart_episodes, 16) // len(env_table))
    transcripts = [
        episode
        for tag, env in env_table.items()
        for episode in play_randomly(config, tag, env, count=share)
    ]
    tokenizer = build_tokenizer(text for episode in transcripts for text in _texts(episode))
    longest_context = max(MAX_CONTEXT, config.rollout.max_context or 0)
    model = build_model(
        settings,
        tokenizer,
        seed=derive_seed(config.seed, "embedded/weights"),
        max_context=longest_context,
    )
    progress(
        f"built a Llama of {sum(p.numel() for p in model.parameters()) / 1000:.0f}k parameters "
        f"with {len(tokenizer)} "
        f"tokens; it imitates {len(transcripts)} episodes of a random player"
    )
    context = ContextManager(tokenizer, config.rollout, max_context=longest_context)
    end_id = tokenizer.eos_token_id
    played = [tokenised(episode, context, end_id=end_id) for episode in transcripts]
    episodes = [episode for episode in played if episode.turns]
    if not episodes:
        raise ValueError(
            f"no opening fits into rollout.max_context={config.rollout.max_context} with room for "
            "a reply; raise it"
        )
    lengths = [len(turn.completion.ids) - 1 for episode in episodes for turn in episode.turns]
    longest, limit = max(lengths), config.rollout.max_response_tokens
    if 2 * sum(length > limit for length in lengths) > len(lengths):
        raise ValueError(
            f"rollout.max_response_tokens={limit} cuts most replies: those of the random player "
            f"take up to {longest} tokens; set rollout.max_response_tokens={longest} or more"
        )
    if longest > limit:
        progress(
            f"replies of the random player take up to {longest} tokens, and the policy's are cut "
            f"at rollout.max_response_tokens={limit}; raise it"
        )
    metrics = {"warmstart/loss": 0.0, "warmstart/episodes": float(len(episodes))}
    if settings.warmstart_episodes and settings.warmstart_epochs:
        metrics["warmstart/loss"] = imitate(model, episodes, config=config, tokenizer=tokenizer)
    return (
        prepare(model, gradient_checkpointing=config.model.gradient_checkpointing is True),
        tokenizer,
        metrics,
    )


def imitate(
    model: nn.Module, episodes: Sequence[Episode], *, config: Config, tokenizer: Any
) -> float:
    """The mean negative log-prob per reply token over the last tenth of the steps, after training
    on the episodes."""
    settings = config.model.embedded
    # No masters here: the model is small.
    precision = Precision.choose("float32", device=config.train.device)
    policy = Policy(model, tokenizer, precision=precision)
    batch = _collate(episodes, tokenizer)
    imitator = Imitator(policy, OPTIMIZER, lr=settings.warmstart_lr)
    plan: list[torch.Tensor] = []
    for epoch in range(settings.warmstart_epochs):
        generator = torch.Generator().manual_seed(
            derive_seed(config.seed, "warmstart/order", epoch)
        )
        plan.extend(torch.randperm(batch.num_rows, generator=generator).split(BATCH_EPISODES))
    losses: list[float] = []
    with Progress("warm start: imitating, batch", total=len(plan)) as progress:
        for index, rows in enumerate(plan):
            part = batch.select(rows)
            part = with_all_tokens(part) if settings.warmstart_observations else with_targets(part)
            factor = rate_factor(index, len(plan), least=WARMUP_STEPS)
            found = imitator.step(part, factor=factor, where=f"warm start, batch {index}")
            losses.append(found["loss"])
            progress.advance()
    tail = losses[-max(len(losses) // 10, 1) :]
    return sum(tail) / len(tail)


def _collate(episodes: Sequence[Episode], tokenizer: Any) -> Batch:
    samples = [sample for episode in episodes for sample in episode_to_samples(episode)]
    return collate(samples, pad_id=tokenizer.pad_token_id)
