# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
"""The training step, on one screen. docs/dev/step.md follows it to the optimizer."""

import time
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch

from turnwise.algos.algorithm import Algorithm
from turnwise.algos.credit import compute_advantages
from turnwise.algos.filters import filter_groups
from turnwise.algos.kl import kl_rewards
from turnwise.algos.normalize import RewardNormalizer
from turnwise.data.batch import Batch, collate
from turnwise.data.penalties import penalty_only_groups, without_penalties
from turnwise.data.samples import contexts, episode_to_samples
from turnwise.log.metrics import context_causes, rollout_metrics, rollout_timings
from turnwise.log.records import CreditRow, LedgerEntry, ledger_entry
from turnwise.procs.progress import Progress
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
        self.seconds[f"time/{name}"] = (
            self.seconds.get(f"time/{name}", 0.0) + time.perf_counter() - started
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """The results of a training step."""

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
    speaking: Collection[str] = (),
    make_room: Callable[[], None] = lambda: None,
    discardable: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> StepRecord:
    """Plays, assigns credit, updates.

    Args:
        exact: the sampler's log-probs are the trainer's (float32 on the CPU, same weights), so they
            need no second scoring; the gap between the two is measured in any case.
        make_room: called between rollout and update, to free memory that only the rollout needs.
        speaking: tags whose environments are known to report success: there an episode that ended
            before they did has failed.
        discardable: entered for the rollout, which changes nothing that a checkpoint holds: it may
            be thrown away by an exception.

    Raises:
        TrainingError: token fidelity broke, sampler and trainer disagree, or a loss is not finite.
    """
    clock = Clock()
    metrics: dict[str, float] = {}
    with clock("rollout"), discardable():  # 1. Play the step's episodes.
        rollout = proxy.play(step)
        everyone = (*rollout.episodes, *rollout.dropped)
        metrics |= rollout_metrics(everyone, late=rollout.late, speaking=speaking)

    with clock("batch"):  # 2. Samples and a batch; the ledger checks that no token changed.
        episodes, found = credited(rollout.episodes, learner.algorithm)
        metrics |= found
        samples = [sample for episode in episodes for sample in episode_to_samples(episode)]
        tags = {episode.id: episode.tag for episode in rollout.episodes}
        batch = collate(samples, pad_id=pad_id)
        ledger = check_ledger(step, rollout.episodes, batch)

    with clock("filter"):  # 3. Filter groups, and normalise rewards if configured.
        rows, found = filter_groups(batch, learner.algorithm)
        metrics |= found
        batch = normalizer(batch, [tags[sample.episode_id] for sample in samples]).select(rows)
        batch = batch.to(learner.policy.precision.device)

    updated = batch.num_rows > 0
    if updated:
        with clock("score"):  # 4. Score with policy, reference and critic before the update.
            make_room()
            batch = learner.score(batch, old_logprobs=not exact)
            if batch.old_logprobs is not None:
                gap = Gap.of((batch.old_logprobs - batch.logprobs)[batch.loss_mask].abs())
                gap.check(learner.config.max_gap, step=step)

        with clock("advantages"):  # 5. Credit for every token, over the whole batch.
            penalty, found = _kl_penalty(batch, learner)
            metrics |= found
            batch, found = compute_advantages(batch, learner.algorithm, token_rewards=penalty)
            metrics |= found
            assert batch.advantages is not None
            updated = bool(batch.advantages[batch.loss_mask].any()) or _critic_errs(batch)

    if updated:
        # 6. Epochs of mini-batches.
        with clock("update"), Progress(f"updating in step {step + 1}"):
            metrics |= learner.update(batch, step=step)
            if "train/kl_ref" in metrics:
                learner.adapt_kl(metrics["train/kl_ref"], num_episodes=len(rollout.episodes))
            metrics["train/kl_coef"] = learner.kl.coef

    metrics["train/idle"] = float(not updated)  # 7. Records for the run directory.
    metrics |= clock.seconds | rollout_timings(rollout.episodes)
    metrics |= _speed(clock, rollout.num_tokens, batch)
    return StepRecord(
        metrics=metrics,
        episodes=everyone,
        credit=credit_rows(batch, [samples[row] for row in rows.tolist()]) if updated else [],
        ledger=ledger,
        updated=updated,
    )


def _kl_penalty(batch: Batch, learner: Learner) -> tuple[torch.Tensor | None, dict[str, float]]:
    """The rewards of tokens for staying close to the reference, where the algorithm has its KL
    there, and the KL itself."""
    if learner.algorithm.kl_in != "reward" or batch.ref_logprobs is None:
        return None, {}
    penalty, kl = kl_rewards(batch, coef=learner.kl.coef, form=learner.algorithm.kl_form)
    return penalty, {"train/kl_ref": kl}


def credited(
    episodes: Sequence[Episode], algorithm: Algorithm
) -> tuple[Sequence[Episode], dict[str, float]]:
    """The episodes with the rewards that count for credit, and how many groups lost their
    penalties: without them such a group has no variance, and so no advantage."""
    if not algorithm.compares_groups:
        return episodes, {}
    groups = penalty_only_groups(episodes)
    found = {"group/penalty_only": float(len(groups))}
    if algorithm.penalty_only_groups == "train" or not groups:
        return episodes, found
    return [without_penalties(episode, groups) for episode in episodes], found


def _critic_errs(batch: Batch) -> bool:
    """True if there is a critic to train, even if the policy has nothing to learn."""
    if batch.values is None or batch.returns is None:
        return False
    return bool((batch.returns - batch.values)[batch.loss_mask].any())


def check_ledger(step: int, episodes: Sequence[Episode], batch: Batch) -> LedgerEntry:
    """The step's ledger entry: compares the generator's tokens with those under the response mask,
    per context.

    Raises:
        TrainingError: they differ. Training on tokens that the model did not sample is refused.
    """
    sampled = [
        [token for turn in context.turns for token in episode.turns[turn].completion.ids]
        for episode in episodes
        for context in contexts(episode.turns)
    ]
    trained = [
        ids[mask].tolist() for ids, mask in zip(batch.input_ids, batch.response_mask, strict=True)
    ]
    if len(sampled) != len(trained):
        raise TrainingError(
            f"step {step}: {len(sampled)} contexts were sampled, but {len(trained)} rows would be "
            "trained on"
        )
    pairs = zip(sampled, trained, strict=True)
    entry = ledger_entry(step, pairs, contexts=context_causes(episodes))
    if entry.broken or entry.sampled_sha256 != entry.trained_sha256:
        row = next(
            index
            for index, pair in enumerate(zip(sampled, trained, strict=True))
            if pair[0] != pair[1]
        )
        raise TrainingError(
            f"step {step}: token fidelity is broken in {entry.broken} of {len(trained)} rows "
            f"(first: row {row}, "
            f"sampled {sampled[row][:8]}, trained {trained[row][:8]}). Nothing was trained; please "
            "report this bug"
        )
    return entry


def credit_rows(batch: Batch, samples: Sequence[Sample]) -> list[CreditRow]:
    """Advantages, values, returns, gaps and entropies of every token that the model said, row by
    row."""
    rows: list[CreditRow] = []
    counts: dict[str, int] = {}
    cpu = batch.to("cpu")
    for index, sample in enumerate(samples):
        mask = cpu.response_mask[index]

        def picked(
            tensor: torch.Tensor | None, *, index: int = index, mask: torch.Tensor = mask
        ) -> tuple[float, ...]:
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
                entropies=picked(cpu.entropies),
            )
        )
    return rows


def _speed(clock: Clock, generated: int, batch: Batch) -> dict[str, float]:
    speed = {
        "time/generated_tokens_per_second": generated / max(clock.seconds["time/rollout"], 1e-9)
    }
    if "time/update" in clock.seconds:
        speed["time/trained_tokens_per_second"] = batch.num_tokens / max(
            clock.seconds["time/update"], 1e-9
        )
    return speed
