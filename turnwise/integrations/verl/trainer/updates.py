# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""The updates of verl's trainer at our pace, and what its checkpoints must keep for that."""

import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.utils.losses import ppo_loss

from turnwise.algos.algorithm import Algorithm
from turnwise.config.schema import Config
from turnwise.integrations.verl.trainer.pace import KEY, STOPPED, UPDATES, Pace
from turnwise.integrations.verl.trainer.records import Recorder
from turnwise.integrations.verl.trainer.state import RunState
from turnwise.train.optim import lr_factor


class PacedTrainer(PPOTrainerSync):
    """verl's synchronous trainer with our schedule, our early stop and our adaptive KL."""

    ours: Config
    algorithm: Algorithm
    state: RunState
    recorder: Recorder
    _idle: bool
    """No group of the step differs in reward: nothing is updated."""
    _started = 0.0
    _cut_short = False

    def _update_critic(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """Where a bound on the KL may end the policy's updates, the critic waits to make as
        many."""
        waits = (
            self.ours.train.target_kl is not None
            and self.config.trainer.critic_warmup <= self.global_steps
        )
        return (
            batch if self._idle or waits else self._train_critic(batch, metrics, max_updates=None)
        )

    def _train_critic(self, batch: Any, metrics: dict[str, Any], *, max_updates: int | None) -> Any:
        self._set_pace(batch, max_updates=max_updates)
        batch = super()._update_critic(batch, metrics)
        for name in (UPDATES, STOPPED):
            metrics.pop(f"critic/{name}", None)
        metrics["critic/lr"] = self.config.critic.optim.lr * self._lr_factor
        return batch

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        if self._idle:
            return batch
        train = self.ours.train
        self._set_pace(batch, target_kl=train.target_kl)
        if self.state.kl.target is not None and self.algorithm.kl_in == "loss":
            self._set_kl_coef(self.state.kl.coef)
        batch = super()._update_actor(batch, metrics)
        for name, ours in ((UPDATES, "train/updates"), (STOPPED, "train/kl_stop")):
            if f"actor/{name}" in metrics:  # workers of a user's own do not count
                metrics[ours] = metrics.pop(f"actor/{name}")
        metrics["actor/lr"] = metrics["train/lr"] = (
            self.config.actor_rollout_ref.actor.optim.lr * self._lr_factor
        )
        if self.use_critic and train.target_kl is not None:
            batch = self._train_critic(batch, metrics, max_updates=int(metrics["train/updates"]))
        if "actor/kl_loss" in metrics and self.algorithm.reduction != "token_sum_norm":
            metrics["train/kl_ref"] = float(metrics["actor/kl_loss"])
        if "train/kl_ref" in metrics:
            metrics["train/kl_coef"] = self.state.kl.coef
            self.state.adapt_kl(
                metrics["train/kl_ref"], num_episodes=int(metrics["rollout/episodes"])
            )
        return batch

    @property
    def _lr_factor(self) -> float:
        return lr_factor(self.ours.train, self.global_steps - 1)

    def _set_pace(
        self, batch: Any, *, target_kl: float | None = None, max_updates: int | None = None
    ) -> None:
        pace = Pace(
            step=self.global_steps,
            factor=self._lr_factor,
            target_kl=target_kl,
            max_updates=max_updates,
        )
        batch.extra_info[KEY] = asdict(pace)

    def _set_kl_coef(self, coef: float) -> None:
        """Gives the actor's loss another weight of the KL; verl's workers took theirs from the
        config."""
        actor = self.config.actor_rollout_ref.actor.copy()
        actor.kl_loss_coef = coef
        self.actor_rollout_wg.set_loss_fn(partial(ppo_loss, config=omega_conf_to_dataclass(actor)))

    # ---- the end ----

    def on_train_begin(self) -> None:
        super().on_train_begin()
        self._started = time.perf_counter()

    def on_step_end(self) -> None:
        """Where the time is over, or nothing is left to learn, this was the last step: it is saved,
        and evaluated in `on_train_end`."""
        super().on_step_end()
        if self.global_steps >= self.total_training_steps:
            return
        still, limit = self.state.still, self.ours.train.max_minutes
        minutes = (time.perf_counter() - self._started) / 60.0
        if still.solved:
            self.recorder.note("solved", still.solved_note(), step=self.global_steps)
        elif limit is not None and minutes >= limit:
            message = (
                f"{minutes:.1f} minutes are over (train.max_minutes = {limit:g}): no step after "
                f"{self.global_steps}"
            )
            self.recorder.note("out_of_time", message, step=self.global_steps)
        else:
            return
        self.total_training_steps, self._cut_short = self.global_steps, True
        if self.config.trainer.save_freq > 0 and self.global_steps % self.config.trainer.save_freq:
            self._save_checkpoint()

    def on_train_end(self) -> None:
        super().on_train_end()
        # The last step was one to evaluate at.
        done = any(event.label == "after" for event in self.state.evaluations)
        if self._cut_short and self.ours.eval.after and not done:
            self.on_validate_begin()
            self._validate()
            self.on_validate_end()

    # ---- checkpoints ----

    def _save_checkpoint(self) -> None:
        self.state.save(
            Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}"
        )
        super()._save_checkpoint()

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        if self.global_steps == 0:
            return
        trainer = self.config.trainer
        named = trainer.resume_from_path if trainer.resume_mode == "resume_path" else None
        self.state.load(
            Path(named or f"{trainer.default_local_dir}/global_step_{self.global_steps}")
        )
        if self.recorder.run is not None:  # rows after the checkpoint are written again
            self.recorder.run.truncate_to(self.global_steps - 1)
