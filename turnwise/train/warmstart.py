# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
"""Warm start: supervised training of the embedded model on a random legal player, which teaches the
format only."""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from turnwise.config.schema import Config, EnvConfig, TrainConfig
from turnwise.data.batch import Batch, collate
from turnwise.data.samples import episode_to_samples
from turnwise.envs.base import EnvError
from turnwise.envs.registry import make_env
from turnwise.evaluate.players import RandomPlayer, player_proxy
from turnwise.generate.base import ContextOverflowError
from turnwise.models.embedded import MAX_CONTEXT, build_model, build_tokenizer
from turnwise.models.policy import Policy, Precision, prepare
from turnwise.procs.progress import Progress
from turnwise.rollout.context import ContextManager
from turnwise.rollout.outputs import LmOutput
from turnwise.rollout.plan import EpisodePlan, env_configs, turn_limit
from turnwise.rollout.speakers import PlayerError
from turnwise.seeding import derive_seed
from turnwise.train.imitation import Imitator, rate_factor, with_all_tokens, with_targets
from turnwise.types import Completion, Episode, Message, Observation, Turn

logger = logging.getLogger(__name__)
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
    env = make_env(env_config)
    limit = turn_limit(config, env_config, env)
    plans = [
        EpisodePlan(
            env_id=number,
            group_id=number,
            index=0,
            tag=tag,
            task=env.make_task(derive_seed(config.seed, "warmstart/task", number), "train"),
            seed=derive_seed(config.seed, "warmstart/actions", number),
            noise_seed=derive_seed(config.seed, "warmstart/noise", number),
            episode_id=f"warmstart-{number}",
            max_turn=limit,
        )
        for number in range(count)
    ]
    env.close()
    proxy = player_proxy(config, RandomPlayer(), split="train")
    try:
        episodes = proxy.play_these(plans)
    except PlayerError as error:
        raise ValueError(
            "the embedded model imitates random legal actions first, and environment "
            f"{env_config.name!r} names none; "
            "give it random_action, or set model.path to a model that can already talk"
        ) from error
    finally:
        proxy.close()
    played = [episode for episode in episodes if not episode.status.failed]
    if len(played) < count:
        first = next(episode for episode in episodes if episode.status.failed)
        if not played:
            raise EnvError(
                f"the random player could not play one of {count} episodes, the first: "
                f"{first.error}"
            )
        logger.warning(
            "%d of %d episodes of the random player failed, the first: %s",
            count - len(played),
            count,
            first.error,
        )
    return played


def tokenised(episode: Episode, context: ContextManager, tokenizer: Any) -> Episode:
    """The episode as a rollout would tokenise it: every reply ends with end-of-sequence, and the
    episode ends where the context is full."""
    context.open(0, key=episode.id, seed=0, prompt=episode.prompt, tools=episode.tools)
    turns: list[Turn] = []
    answer: tuple[Message, ...] = ()
    rewritten: Observation | None = None
    for turn in episode.turns:
        own = turn.text.removeprefix(context.response_prefix)
        ids = (*tokenizer.encode(own, add_special_tokens=False), tokenizer.eos_token_id)
        try:
            asked = context.next_input(0, answer, rewritten)
        except ContextOverflowError:
            break
        completion = Completion(ids=ids, logprobs=(0.0,) * len(ids), finish_reason="stop")
        context.get_env_inputs([LmOutput(env_id=0, completion=completion)])
        turns.append(
            replace(turn, prompt_ids=asked.new_ids, completion=completion, restart=asked.restart)
        )
        answer, rewritten = turn.messages, turn.rewritten
    context.close(0)
    return replace(episode, turns=tuple(turns))


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
    settings = config.model.embedded
    env_table = env_configs(config, config.rollout.train)
    share = -(-max(settings.warmstart_episodes, 16) // len(env_table))
    transcripts = [
        episode
        for tag, env in env_table.items()
        for episode in play_randomly(config, tag, env, count=share)
    ]
    tokenizer = build_tokenizer(text for episode in transcripts for text in _texts(episode))
    model = build_model(settings, tokenizer, seed=derive_seed(config.seed, "embedded/weights"))
    progress(
        f"built a Llama of {sum(p.numel() for p in model.parameters()) / 1000:.0f}k parameters "
        f"with {len(tokenizer)} "
        f"tokens; it imitates {len(transcripts)} episodes of a random player"
    )
    context = ContextManager(tokenizer, config.rollout, max_context=MAX_CONTEXT)
    played = [tokenised(episode, context, tokenizer) for episode in transcripts]
    episodes = [episode for episode in played if episode.turns]
    if not episodes:
        raise ValueError(
            f"no opening fits into rollout.max_context={config.rollout.max_context} with room for "
            "a reply; raise it"
        )
    longest = max(len(turn.completion.ids) - 1 for episode in episodes for turn in episode.turns)
    if longest > config.rollout.max_response_tokens:
        progress(
            f"replies of the random player take up to {longest} tokens, and the policy's are cut "
            f"at rollout.max_response_tokens={config.rollout.max_response_tokens}; raise it"
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
