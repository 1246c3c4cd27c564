# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
"""One update: epochs of mini-batches, each split into micro-batches whose gradients are summed."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from turnwise.algos.algorithm import Algorithm
from turnwise.algos.kl import KLState, update_kl
from turnwise.algos.losses import policy_loss, value_loss
from turnwise.algos.reduce import token_weights
from turnwise.config.schema import TrainConfig
from turnwise.data.batch import Batch
from turnwise.models.policy import Policy
from turnwise.seeding import derive_seed
from turnwise.train.optim import NonFiniteError, Optimizer, lr_factor
from turnwise.train.passes import MicroBatch, Passes, over_rows


class TrainingError(RuntimeError):
    """Training cannot go on. The message says in which step, why, and what to do; the last
    checkpoint is intact."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gap:
    """Difference between the trainer's and the sampler's log-probs over the trained tokens."""

    mean: float
    max: float

    @classmethod
    def of(cls, gaps: Tensor) -> "Gap":
        return (
            cls(mean=float(gaps.mean()), max=float(gaps.max()))
            if gaps.numel()
            else cls(mean=0.0, max=0.0)
        )

    def check(self, limit: float, *, step: int) -> None:
        """Raises TrainingError if the mean difference exceeds the limit: then the sampled policy is
        not the trained one."""
        if not self.mean <= limit:
            raise TrainingError(
                f"step {step}: sampler and trainer disagree by {self.mean:.4g} per token in "
                "log-prob (largest "
                f"{self.max:.4g}), more than train.max_gap = {limit}. The sampled policy is not "
                "the scored one: check "
                "model.dtype and rollout.temperature, or raise train.max_gap if the gap is "
                "understood"
            )


class Learner:
    """A policy with its optimizers: all state that an update changes."""

    def __init__(
        self, policy: Policy, algorithm: Algorithm, config: TrainConfig, *, seed: int
    ) -> None:
        self.policy = policy
        self.algorithm = algorithm
        self.config = config
        self.kl = KLState(coef=algorithm.kl_coef, target=algorithm.kl_target)
        self.version = 0
        """Updates that changed the policy."""
        self._seed = seed
        critic = policy.critic_parameters()
        groups = [(policy.parameters(), config.lr)]
        if policy.shares_trunk:
            groups.append((critic, config.critic_lr))
        self.optimizer = Optimizer(groups, config, masters=policy.masters)
        own = critic and not policy.shares_trunk
        self.critic_optimizer = (
            Optimizer([(critic, config.critic_lr)], config, masters=policy.masters) if own else None
        )
        self.passes = Passes(policy, packing=config.packing, tokens=config.token_limit)

    @torch.no_grad()
    def score(self, batch: Batch, *, old_logprobs: bool) -> Batch:
        """The batch with the tensors that the update reads: values if there is a critic, the
        reference's log-probs if the KL needs them, and the policy's own (`old_logprobs`) if the
        sampler's are not exact. That pass gives the entropies too, which are only stored."""
        policy = self.policy
        policy.train_mode(False)
        packed = self.passes.packs(batch)
        micros = self.passes.micro_batches(batch, packed=packed)
        with self.passes.attention(packed):
            if old_logprobs:
                logprobs = torch.zeros_like(batch.logprobs)
                entropies = torch.zeros_like(batch.logprobs)
                for micro in micros:
                    scores = policy.score(micro.batch, micro.layout)
                    width = scores.logprobs.shape[1]
                    logprobs[micro.rows, :width] = scores.logprobs
                    entropies[micro.rows, :width] = scores.entropies
                batch = batch.replace(old_logprobs=logprobs, entropies=entropies)
            if policy.has_reference and self.algorithm.needs_reference:
                batch = batch.replace(
                    ref_logprobs=over_rows(batch, micros, policy.reference_logprobs)
                )
            if policy.critic is not None:
                bootstrap = torch.zeros(batch.num_rows, device=batch.input_ids.device)
                values = torch.zeros_like(batch.logprobs)
                for micro in micros:
                    found, last = policy.value(micro.batch, micro.layout)
                    values[micro.rows, : found.shape[1]] = found
                    bootstrap[micro.rows] = last
                batch = batch.replace(values=values, bootstrap=bootstrap)
        return batch

    def update(self, batch: Batch, *, step: int) -> dict[str, float]:
        """Metrics of the update. The batch must have advantages. A mini-batch that raises has
        changed nothing."""
        packed = self.passes.packs(batch)
        # LoRA dropout uses torch's global generator, and so may the environments of the rollout.
        torch.manual_seed(derive_seed(self._seed, "torch", step))
        with self.passes.attention(packed):
            return self._update(batch, step=step, packed=packed)

    def _update(self, batch: Batch, *, step: int, packed: bool) -> dict[str, float]:
        config = self.config
        factor = lr_factor(config, step)
        totals: dict[str, float] = {}
        updates, gap = 0, None
        self.policy.train_mode(True)
        stopped = False
        for epoch in range(config.epochs):
            generator = torch.Generator().manual_seed(
                derive_seed(self._seed, "mini-batch", step, epoch)
            )
            order = torch.randperm(batch.num_rows, generator=generator).to(batch.input_ids.device)
            for number, rows in enumerate(
                order.tensor_split(min(config.mini_batches, batch.num_rows))
            ):
                where = f"step {step}, epoch {epoch}, mini-batch {number}"
                warming = step < config.critic_warmup
                metrics, first = self._gradients(
                    batch, rows, warming=warming, packed=packed, where=where
                )
                # Nothing has changed yet: what the trainer says now is what the sampler should
                # have.
                if gap is None:
                    gap = first
                    gap.check(config.max_gap, step=step)
                if (
                    config.target_kl is not None
                    and metrics["approx_kl"] > config.target_kl
                    and updates
                ):
                    stopped = True
                    break
                metrics |= self._apply(factor, warming=warming, where=where)
                for name, value in metrics.items():
                    totals[name] = totals.get(name, 0.0) + value
                updates += 1
            if stopped:
                break
        self.policy.train_mode(False)
        assert gap is not None
        self.version += 1
        result = {f"train/{name}": value / max(updates, 1) for name, value in totals.items()}
        result |= {
            "train/updates": float(updates),
            "train/kl_stop": float(stopped),
            "train/lr": config.lr * factor,
        }
        result |= {"train/gap_mean": gap.mean, "train/gap_max": gap.max}
        return result

    def adapt_kl(self, kl: float, *, num_episodes: int) -> None:
        """Moves the KL coefficient towards its target."""
        self.kl = update_kl(self.kl, kl=kl, num_episodes=num_episodes)
        self.algorithm = replace(self.algorithm, kl_coef=self.kl.coef)

    def gradients(self, batch: Batch, *, where: str = "a batch") -> dict[str, float]:
        """Adds the whole batch's gradient to the parameters, as one mini-batch; its metrics."""
        rows = torch.arange(batch.num_rows, device=batch.input_ids.device)
        packed = self.passes.packs(batch)
        with self.passes.attention(packed):
            return self._gradients(batch, rows, warming=False, packed=packed, where=where)[0]

    def _gradients(
        self, batch: Batch, rows: Tensor, *, warming: bool, packed: bool, where: str
    ) -> tuple[dict[str, float], Gap]:
        mini = batch.select(rows)
        mini = mini.replace(weights=token_weights(mini, self.algorithm))
        self.optimizer.zero_grad()
        if self.critic_optimizer is not None:
            self.critic_optimizer.zero_grad()
        sums: dict[str, Tensor] = {}
        gaps: list[Tensor] = []
        masks: list[Tensor] = []
        for part in self.passes.micro_batches(mini, packed=packed):
            loss, metrics, logprobs = self._loss(part, warming=warming)
            loss.backward()
            gaps.append((logprobs.detach() - part.batch.logprobs).abs().flatten())
            masks.append(part.batch.loss_mask.flatten())
            for name, value in {"loss": loss.detach(), **metrics}.items():
                sums[name] = sums[name] + value if name in sums else value
        # The host synchronizes with the device here, once for all micro-batches.
        numbers = dict(zip(sums, torch.stack(list(sums.values())).tolist(), strict=True))
        if not math.isfinite(numbers["loss"]):
            raise TrainingError(
                f"{where}: the loss is {numbers.pop('loss')}, so nothing was updated. Parts: "
                f"{numbers}. Lower "
                "train.lr, check the environment's rewards, or resume from the last checkpoint"
            )
        del numbers["loss"]
        weight = numbers.pop("weight", 1.0) or 1.0
        # Under token_sum_norm the weights do not sum to 1. Token metrics are means, so they are
        # divided; losses are not.
        means = {name: v if name.endswith("_loss") else v / weight for name, v in numbers.items()}
        return means, Gap.of(torch.cat(gaps)[torch.cat(masks)])

    def _loss(self, part: MicroBatch, *, warming: bool) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        policy, algorithm, micro = self.policy, self.algorithm, part.batch
        values: Tensor | None = None
        if policy.shares_trunk:
            scores, values = policy.score_and_value(micro, part.layout, detach=warming)
        else:
            scores = policy.score(micro, part.layout)
            if policy.critic is not None:
                values, _ = policy.value(micro, part.layout)
        loss, metrics = policy_loss(scores.logprobs, micro, algorithm, entropies=scores.entropies)
        if values is not None:
            critic_loss, critic_metrics = value_loss(values, micro, algorithm)
            metrics |= critic_metrics
            critic_loss = algorithm.value_coef * critic_loss if policy.shares_trunk else critic_loss
            loss = critic_loss if warming else loss + critic_loss
        return loss, metrics, scores.logprobs

    def _apply(self, factor: float, *, warming: bool, where: str) -> dict[str, float]:
        # During critic warm-up a shared trunk has no gradient, and a separate policy is not
        # stepped.
        named = {"grad_norm": self.optimizer, "critic_grad_norm": self.critic_optimizer}
        moving = {name: optimizer for name, optimizer in named.items() if optimizer is not None}
        if warming and self.critic_optimizer is not None:
            del moving["grad_norm"]
        try:
            norms = {name: optimizer.clip() for name, optimizer in moving.items()}
        except NonFiniteError as error:
            raise TrainingError(
                f"{where}: {error}, so nothing was updated; lower train.lr, or resume from the "
                "last checkpoint"
            ) from error
        for optimizer in moving.values():
            optimizer.step(factor)
        self.policy.masters.publish()
        return norms
