# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""verl's workers at our pace: learning rates by the step's number, and policy updates that end at a
bound on the KL.

verl knows neither a linear schedule nor our warm-up (under its own the first step trains at a rate
of 0), and its workers always make all their passes. A worker here takes both from the driver, with
every batch that it trains on.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from verl.single_controller.base.decorator import make_nd_compute_dataproto_dispatch_fn, register
from verl.utils import tensordict_utils as tu
from verl.utils.metric import AggregationType, Metric
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

from turnwise.integrations.verl.trainer.losses import KL_SUM, KL_WEIGHT

KEY = "turnwise_pace"
"""Where a batch of verl's carries its Pace."""
# Verl reduces a metric of such a name by its maximum.
UPDATES, STOPPED = (
    "updates/max",
    "kl_stop/max",
)


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How a worker trains in one step."""

    step: int
    factor: float = 1.0
    """Factor on the learning rate."""
    target_kl: float | None = None
    """KL limit within a step: no further update beyond it."""
    max_updates: int | None = None
    """At most so many updates. None: all."""


class Pacer:
    """Wraps a worker's engine and decides which updates are made."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._run: Callable[..., Any] = engine.forward_backward_batch
        self._apply: Callable[[], Any] = engine.optimizer_step
        self._pace: Pace | None = None
        self._metrics: dict[str, Any] = {}
        self._kl = 0.0
        self._updates = 0
        self._stopped = False
        engine.forward_backward_batch = self._forward_backward
        engine.optimizer_step = self._step

    def begin(self, pace: Pace) -> bool:
        """True where the next mini-batch of this step is still to be trained on."""
        if self._pace is None or self._pace.step != pace.step:
            self._updates, self._stopped = 0, False
        self._pace = pace
        for group in self._engine.optimizer.param_groups:
            group["lr"] = self._engine.optimizer_config.lr * pace.factor
        done = pace.max_updates is not None and self._updates >= pace.max_updates
        return not (done or self._stopped)

    def _forward_backward(self, data: Any, loss_function: Any, forward_only: bool = False) -> Any:
        found = self._run(data, loss_function, forward_only=forward_only)
        if not forward_only:
            self._metrics = found["metrics"]
            self._kl = self._mean_kl(self._metrics)
        return found

    def _step(self) -> Any:
        """The gradient's norm; None where the update was not made because the policy has moved far
        enough."""
        pace = self._pace
        if (
            pace is not None
            and pace.target_kl is not None
            and self._updates
            and self._kl > pace.target_kl
        ):
            self._stopped = True
            self._engine.optimizer_zero_grad()
            self._metrics.clear()  # they would count in the means over the updates that were made
            norm = None
        else:
            norm = self._apply()
            self._updates += 1
        for name, value in ((UPDATES, self._updates), (STOPPED, float(self._stopped))):
            self._metrics[name] = Metric(aggregation=AggregationType.MAX, value=float(value))
        return norm

    def _mean_kl(self, metrics: dict[str, Any]) -> float:
        """The KL per token between the sampled policy and this one, over the mini-batch's tokens on
        all ranks."""
        sums = [metrics.pop(name, None) for name in (KL_SUM, KL_WEIGHT)]
        if self._pace is None or self._pace.target_kl is None or sums[0] is None or sums[1] is None:
            return 0.0
        device = next(self._engine.module.parameters()).device
        both = torch.tensor([sum(part.values) for part in sums], dtype=torch.float64, device=device)
        group = self._engine.get_data_parallel_group()
        if group is not None:
            torch.distributed.all_reduce(both, group=group)
        return float(both[0] / both[1].clamp(min=1e-12))


class PacedTrainingWorker(TrainingWorker):
    """verl's training worker, at the pace that comes with its batches; without one, at verl's own.

    verl fills mini-batches up with empty rows, and divides a mean over rows by these too. Here it
    does not, so that a loss is the native one whatever the number of rows.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pacer = Pacer(self.engine)

    @register(
        dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"), blocking=False
    )
    def train_batch(self, data: Any) -> Any:
        pace = tu.get(data, KEY)
        if pace is not None:
            if not self._pacer.begin(Pace(**pace)):
                return tu.get_tensordict(tensor_dict={}, non_tensor_dict={"metrics": {}})
            tu.assign_non_tensor(
                data, update_lr_scheduler=False, global_batch_size=self._real_rows(data)
            )
        return super().train_batch(data)

    def _real_rows(self, data: Any) -> int:
        """Rows of the mini-batch on all ranks without verl's padding, by which its means over rows
        divide."""
        count = sum(bool(row.any()) for row in data["loss_mask"].unbind())
        engine: Any = self.engine
        rows = torch.tensor(count, device=next(engine.module.parameters()).device)
        torch.distributed.all_reduce(rows, group=engine.get_data_parallel_group())
        return max(int(rows), 1)


class PacedActorWorker(ActorRolloutRefWorker):
    """verl's worker of actor, rollout and reference, with a paced actor."""

    actor_worker_cls = PacedTrainingWorker


def check_paced(given: Mapping[Any, Any], *, asked: Sequence[str]) -> None:
    """Raises ValueError where workers of a user's own would not honour these settings, if any."""
    for role, worker in given.items() if asked else ():
        own = worker.__ray_actor_class__
        if not issubclass(own, PacedTrainingWorker | PacedActorWorker):
            raise ValueError(
                f"role_worker_mapping gives {role.name} the class {own.__name__}, which does not "
                "honour "
                f"{', '.join(asked)}; derive it from PacedActorWorker or PacedTrainingWorker "
                "(verl/pace.py)"
            )
