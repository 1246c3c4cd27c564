# pyright: reportUnknownMemberType=false
"""Imitation: which tokens of a demonstration are learned, the loss of a batch of them, one
optimizer step, and how well held-out ones are predicted."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from turnwise.config.schema import TrainConfig
from turnwise.data.batch import Batch
from turnwise.models.packing import RowLayout
from turnwise.models.policy import Policy
from turnwise.train.optim import NonFiniteError, Optimizer
from turnwise.train.passes import MicroBatch, Passes
from turnwise.train.update import TrainingError

RISE, FALL = 0.05, 0.3
"""Shares of the steps: in the first the learning rate rises, in the last it falls to 0."""


def rate_factor(step: int, steps: int, *, least: int = 1) -> float:
    """The factor on the learning rate in this step (counted from 0) of so many. It rises over at
    least `least` steps.

    Example:
        >>> [round(rate_factor(step, 40), 2) for step in (0, 1, 20, 34, 39)]
        [0.5, 1.0, 1.0, 0.5, 0.08]
    """
    rising = max(least, RISE * steps)
    return min(1.0, (step + 1) / rising, (steps - step) / (FALL * steps))


def with_targets(batch: Batch, *, observations: float = 0.0) -> Batch:
    """The batch with its targets under `response_mask` and their weights: 1 for a reply,
    `observations` for what the environment answered.

    The answers are the tokens after the first reply that belong to no reply. The opening is no
    answer to anything, so it is never a target. Untrained turns (`Turn.trained`) are context.

    Example: replies [7 8] and [9], the answer [3]

        input_ids       1   2   7   8   3   9
        weights         0   0   1   1   w   1
    """
    weights = batch.loss_mask.float()
    if observations:
        begun = batch.response_mask.cumsum(1) > 0
        answers = batch.attention_mask.bool() & begun & ~batch.response_mask
        weights = weights + observations * answers
    return batch.replace(response_mask=weights > 0, weights=weights)


def with_all_tokens(batch: Batch) -> Batch:
    """The batch with every token but each row's first as a target of weight 1."""
    everything = batch.attention_mask.bool().index_fill(1, torch.tensor(0), False)
    return batch.replace(response_mask=everything, weights=everything.float())


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """How well held-out demonstrations are predicted."""

    loss: float
    """Mean negative log-prob of a reply's token."""
    accuracy: float
    """Share of the replies' tokens that the policy itself would choose."""
    tokens: int


class Imitator:
    """A policy that learns targets: the passes of an update, and an optimizer of its own.

    Args:
        config: packing, tokens of a pass, and the optimizer's settings but the learning rate.
    """

    def __init__(self, policy: Policy, config: TrainConfig, *, lr: float) -> None:
        self.policy = policy
        self._tokens = config.token_limit
        self._passes = Passes(policy, packing=config.packing, tokens=config.token_limit)
        self.optimizer = Optimizer([(policy.parameters(), lr)], config, masters=policy.masters)

    def gradients(self, batch: Batch) -> float:
        """The batch's loss, after adding its gradient to the parameters: the mean negative
        log-prob of its targets by their weights. The split into micro-batches does not change it.
        """
        batch = batch.to(self.policy.precision.device)
        assert batch.weights is not None
        total, packed = batch.weights.sum(), self._passes.packs(batch)
        found = torch.zeros((), device=total.device)
        with self._passes.attention(packed):
            for part in self._parts(batch, packed=packed):
                assert part.batch.weights is not None
                scores = self.policy.score(part.batch, part.layout)
                loss = -(scores.logprobs * part.batch.weights).sum() / total
                loss.backward()
                found += loss.detach()
        return found.item()

    def step(self, batch: Batch, *, factor: float, where: str) -> dict[str, float]:
        """Metrics of one optimizer step on the batch, with the learning rate times `factor`.

        Raises:
            TrainingError: the loss or its gradient is not finite; nothing was changed.
        """
        self.policy.train_mode(True)
        self.optimizer.zero_grad()
        loss = self.gradients(batch)
        try:
            if not math.isfinite(loss):
                raise NonFiniteError(f"the loss is {loss}")
            norm = self.optimizer.clip()
        except NonFiniteError as error:
            raise TrainingError(f"{where}: {error}, so nothing was updated; lower lr") from error
        self.optimizer.step(factor)
        self.policy.masters.publish()
        self.policy.train_mode(False)
        return {"loss": loss, "grad_norm": norm}

    @torch.no_grad()
    def measure(self, batches: Iterable[Batch]) -> Measured:
        """How well the policy predicts the replies of these batches."""
        self.policy.train_mode(False)
        loss, hits, count = 0.0, 0, 0
        for batch in batches:
            batch = with_targets(batch).to(self.policy.precision.device)
            packed = self._passes.packs(batch)
            with self._passes.attention(packed):
                for part in self._parts(batch, packed=packed):
                    scores, right = self.policy.score_and_hits(part.batch, part.layout)
                    loss -= float(scores.logprobs.double().sum())
                    hits += int(right.sum())
                    count += int(part.layout.rows.numel())
        return Measured(loss=loss / max(count, 1), accuracy=hits / max(count, 1), tokens=count)

    def _parts(self, batch: Batch, *, packed: bool) -> list[MicroBatch]:
        """The batch as it is where it fits into one pass, else in micro-batches."""
        if packed or batch.input_ids.numel() > self._tokens:
            return self._passes.micro_batches(batch, packed=packed)
        rows: Tensor = torch.arange(batch.num_rows, device=batch.input_ids.device)
        return [MicroBatch(rows=rows, batch=batch, layout=RowLayout.of(batch))]
