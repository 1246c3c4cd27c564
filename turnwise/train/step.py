"""The training step, on one screen. docs/dev/step.md follows it to the optimizer."""

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from turnwise.algos.credit import compute_advantages
from turnwise.algos.filters import filter_groups
from turnwise.algos.kl import kl_rewards
from turnwise.algos.normalize import RewardNormalizer
from turnwise.data.batch import Batch, collate
from turnwise.data.samples import episode_to_samples
from turnwise.log.metrics import rollout_metrics, rollout_timings
from turnwise.log.records import CreditRow, LedgerEntry, ledger_entry
from turnwise.rollout.proxy import AgentProxy
from turnwise.train.update import Gap, Learner, TrainingError
from turnwise.types import Episode, Sample


@dataclass(slots=True)
class Clock:
    """Seconds per part of a step, as time/... metrics."""

    seconds: dict[str, float] = field(default_factory=dict[str, float])

    @contextmanager
    def __call__(self, name: str) -> Generator[None]:
        started = time.perf_counter()
        yield
        self.seconds[f"time/{name}"] = self.seconds.get(f"time/{name}", 0.0) + time.perf_counter() - started


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """What a training step leaves behind."""

    metrics: dict[str, float]
    episodes: tuple[Episode, ...]
    """Dropped ones included."""
    credit: list[CreditRow]
    ledger: LedgerEntry
    updated: bool
    """False where no group differed in reward: there was nothing to learn from."""


def training_step(
    step: int,
    *,
    proxy: AgentProxy,
    learner: Learner,
    normalizer: RewardNormalizer,
    pad_id: int,
    exact: bool,
    make_room: Callable[[], None] = lambda: None,
) -> StepRecord:
    """Plays, assigns credit, updates.

    Args:
        exact: the sampler's log-probs are the trainer's (float32 on the CPU, same weights), so they need no second
            scoring; the gap between the two is measured in any case.
        make_room: called between rollout and update, to give back memory that only the rollout needs.

    Raises:
        TrainingError: token fidelity broke, sampler and trainer disagree, or a loss is not finite.
    """
    clock = Clock()
    metrics: dict[str, float] = {}
    with clock("rollout"):  # 1. Play the step's episodes.
        rollout = proxy.play(step)
        metrics |= rollout_metrics([*rollout.episodes, *rollout.dropped])

    with clock("batch"):  # 2. Episodes become samples and a batch; the ledger proves that no token changed on the way.
        samples = [sample for episode in rollout.episodes for sample in episode_to_samples(episode)]
        tags = {episode.id: episode.tag for episode in rollout.episodes}
        batch = collate(samples, pad_id=pad_id)
        ledger = check_ledger(step, rollout.episodes, batch)

    with clock("filter"):  # 3. Keep the groups that have something to say; normalise rewards where the config asks.
        rows, found = filter_groups(batch, learner.algorithm)
        metrics |= found
        batch = normalizer(batch, [tags[sample.episode_id] for sample in samples]).select(rows)
        batch = batch.to(learner.policy.precision.device)

    updated = batch.num_rows > 0
    if updated:
        with clock("score"):  # 4. What the policy, its reference and its critic say before the update.
            make_room()
            batch = learner.score(batch, old_logprobs=not exact)
            if batch.old_logprobs is not None:
                gap = Gap.of((batch.old_logprobs - batch.logprobs)[batch.loss_mask].abs())
                gap.check(learner.config.max_gap, step=step)

        with clock("advantages"):  # 5. Credit for every token, over the whole batch.
            penalty = None
            if learner.algorithm.kl_in == "reward" and batch.ref_logprobs is not None:
                penalty, kl = kl_rewards(batch, coef=learner.kl.coef, form=learner.algorithm.kl_form)
                metrics["train/kl_ref"] = kl
            batch, found = compute_advantages(batch, learner.algorithm, token_rewards=penalty)
            metrics |= found
            assert batch.advantages is not None
            updated = bool(batch.advantages[batch.loss_mask].any()) or _critic_errs(batch)

    if updated:
        with clock("update"):  # 6. Epochs of mini-batches.
            metrics |= learner.update(batch, step=step)
            if "train/kl_ref" in metrics:
                learner.adapt_kl(metrics["train/kl_ref"], num_episodes=len(rollout.episodes))
            metrics["train/kl_coef"] = learner.kl.coef

    metrics["train/idle"] = float(not updated)  # 7. What the run directory keeps.
    metrics |= clock.seconds | rollout_timings(rollout.episodes) | _speed(clock, rollout.num_tokens, batch)
    return StepRecord(
        metrics=metrics,
        episodes=(*rollout.episodes, *rollout.dropped),
        credit=credit_rows(batch, [samples[row] for row in rows.tolist()]) if updated else [],
        ledger=ledger,
        updated=updated,
    )


def _critic_errs(batch: Batch) -> bool:
    """Whether there is a critic that has something to learn, though the policy may have nothing."""
    if batch.values is None or batch.returns is None:
        return False
    return bool((batch.returns - batch.values)[batch.loss_mask].any())


def check_ledger(step: int, episodes: Sequence[Episode], batch: Batch) -> LedgerEntry:
    """The step's entry: what the generator returned, and what stands under the response mask, context by context.

    Raises:
        TrainingError: they differ in a single token. Training on text that the model did not say is refused.
    """
    sampled: list[list[int]] = []
    for episode in episodes:
        for turn in episode.turns:
            if turn.restart or not sampled or turn is episode.turns[0]:
                sampled.append([])
            sampled[-1].extend(turn.completion.ids)
    trained = [ids[mask].tolist() for ids, mask in zip(batch.input_ids, batch.response_mask, strict=True)]
    if len(sampled) != len(trained):
        raise TrainingError(
            f"step {step}: {len(sampled)} contexts were sampled, but {len(trained)} rows would be trained on"
        )
    entry = ledger_entry(step, zip(sampled, trained, strict=True))
    if entry.broken or entry.sampled_sha256 != entry.trained_sha256:
        row = next(index for index, pair in enumerate(zip(sampled, trained, strict=True)) if pair[0] != pair[1])
        raise TrainingError(
            f"step {step}: token fidelity is broken in {entry.broken} of {len(trained)} rows (first: row {row}, "
            f"sampled {sampled[row][:8]}, trained {trained[row][:8]}). Nothing was trained; please report this bug"
        )
    return entry


def credit_rows(batch: Batch, samples: Sequence[Sample]) -> list[CreditRow]:
    """Advantages, values, returns and gaps of every token that the model said, row by row."""
    rows: list[CreditRow] = []
    counts: dict[str, int] = {}
    cpu = batch.to("cpu")
    for index, sample in enumerate(samples):
        mask = cpu.response_mask[index]

        def picked(tensor: torch.Tensor | None, *, index: int = index, mask: torch.Tensor = mask) -> tuple[float, ...]:
            return () if tensor is None else tuple(tensor[index][mask].tolist())

        number = counts.get(sample.episode_id, 0)
        counts[sample.episode_id] = number + 1
        rows.append(
            CreditRow(
                episode_id=sample.episode_id,
                sample=number,
                turn_ids=tuple(cpu.turn_ids[index][mask].tolist()),
                advantages=picked(cpu.advantages),
                values=picked(cpu.values),
                returns=picked(cpu.returns),
                gaps=() if cpu.old_logprobs is None else picked(cpu.old_logprobs - cpu.logprobs),
            )
        )
    return rows


def _speed(clock: Clock, generated: int, batch: Batch) -> dict[str, float]:
    speed = {"time/generated_tokens_per_second": generated / max(clock.seconds["time/rollout"], 1e-9)}
    if "time/update" in clock.seconds:
        speed["time/trained_tokens_per_second"] = batch.num_tokens / max(clock.seconds["time/update"], 1e-9)
    return speed
