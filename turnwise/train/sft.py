# pyright: reportUnknownMemberType=false
"""SftTrainer: a run that imitates demonstrations."""

import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from turnwise.config.schema import Config
from turnwise.data.batch import Batch, collate
from turnwise.evaluate.evaluation import EvalResult
from turnwise.generate.hf import context_length
from turnwise.log.events import Notice, Sink
from turnwise.log.records import LedgerEntry, ledger_entry
from turnwise.log.store import RunReader
from turnwise.models.memory import planned
from turnwise.seeding import derive_seed
from turnwise.train.base import RunTrainer, open_run, refuse_another
from turnwise.train.checkpoint import Checkpoint, CheckpointError
from turnwise.train.demonstrations import (
    DemonstrationRenderer,
    Row,
    deal,
    digest,
    hold_out,
    load,
    rows_of,
    store,
)
from turnwise.train.generators import make_generator
from turnwise.train.imitation import Imitator, rate_factor, with_targets
from turnwise.train.networks import (
    build_policy,
    load_policy_tensors,
    plain_model,
    policy_tensors,
    sampling_model,
)
from turnwise.train.setup import choose_setting
from turnwise.train.sources import collect, is_player
from turnwise.train.update import TrainingError
from turnwise.types import Episode, Json

ROWS_AT_ONCE = 64
"""Held-out rows that are predicted at once."""


class SftTrainer(RunTrainer):
    """Imitates the demonstrations of `sft.source`: the loss is on their replies, with the policy's
    own template, masks and passes.

    Args:
        resume: a run directory to go on with. It holds its demonstrations.
        sinks: receivers of progress events.
    """

    def __init__(
        self, config: Config, *, resume: Path | None = None, sinks: Sequence[Sink] = ()
    ) -> None:
        super().__init__(sinks)
        if not config.sft.source:
            raise ValueError(
                "there is nothing to imitate; name a source, as in `turnwise sft expert` or "
                "sft.source=FILE.jsonl"
            )
        stored = None if resume is None else RunReader(resume).config
        if resume is not None and stored is not None:
            refuse_another(config, stored, resume, fixed=("seed", "sft.", "train.steps"))
        self._evaluates = config.eval.before or config.eval.after or bool(config.eval.every)
        self.config, self.factories, notices = config, {}, tuple[Notice, ...]()
        if self._evaluates or any(map(is_player, config.sft.source)):
            setting = choose_setting(config)
            self.config, self.factories = setting.config, setting.factories
            notices = setting.notices
        named = (config.env.name, "sft") if self._evaluates else ("sft",)
        self.run = open_run(config, resume, named=named)
        try:
            self._build(notices, resumed=resume is not None)
            if stored is not None and stored != config:
                self._go_on_with(config, stored)
        except BaseException:
            self.run.close()
            if resume is None:  # nothing was trained yet; frees the name for the corrected run
                shutil.rmtree(self.run.path, ignore_errors=True)
            raise

    def _build(self, notices: Sequence[Notice], *, resumed: bool) -> None:
        self.plan, self.config = planned(self.config, None)
        config = self.config
        torch.manual_seed(derive_seed(config.seed, "torch"))
        checkpoint = self._open_checkpoint(notices, resumed=resumed)
        self.policy, self._warmstart = build_policy(
            config,
            None,
            initial=self.run.path / "initial_model",
            checkpoint=checkpoint,
            say=lambda message: self._note(Notice(kind="embedded", message=message, level="info")),
        )
        self.policy.temperature = 1.0  # demonstrations were not sampled at the rollout's
        if self.plan is not None:
            self.policy.chunk_elements = self.plan.chunk_elements
        self._deal(self._demonstrations(resumed=checkpoint is not None))
        self.imitator = Imitator(self.policy, config.train, lr=config.sft.lr)
        if checkpoint is not None:
            self._load(checkpoint)
        if self._evaluates:
            self.generator = make_generator(config, self.policy, version=self.step)

    def _demonstrations(self, *, resumed: bool) -> list[Episode]:
        """The demonstrations with their ids: those of the run that goes on, or from the sources."""
        kept = self.run.path / "demonstrations.jsonl"
        if resumed and kept.is_file():
            return load(kept)

        def say(message: str) -> None:
            self._note(Notice(kind="demonstrations", message=message, level="info"))

        config, model = self.config, sampling_model(self.policy)
        renderer = DemonstrationRenderer(
            config,
            self.policy.tokenizer,
            model.generation_config,
            max_context=context_length(model, config.rollout.max_context),
        )
        found = collect(config, factories=self.factories, say=say)
        found = renderer.render(found, say=say)
        if config.checkpoint.write:  # only then can the run go on later
            store(kept, found)
        return found

    def _deal(self, episodes: Sequence[Episode]) -> None:
        settings = self.config.sft
        learned, held_out = hold_out(episodes, settings.held_out)
        self.rows, self.held_out = rows_of(learned), rows_of(held_out)
        if not self.rows:
            raise ValueError("no reply of the demonstrations is to be learned: all have weight 0")
        self._facts_of_data = {
            "sft/episodes": float(len(learned)),
            "sft/held_out_episodes": float(len(held_out)),
            "sft/rows": float(len(self.rows)),
            "sft/epoch_tokens": float(sum(len(row.sample.ids) for row in self.rows)),
        }
        self._steps = deal(
            [len(row.sample.ids) for row in self.rows],
            batch_tokens=settings.batch_tokens,
            epochs=settings.epochs,
            seed=self.config.seed,
        )

    @property
    def num_steps(self) -> int:
        return len(self._steps)

    def evaluate(self, label: Literal["before", "during", "after"]) -> EvalResult:
        self.generator.weights_updated(self.step)
        return super().evaluate(label)

    def release(self) -> tuple[nn.Module, Any]:
        """(model, tokenizer) of a run that is over: float32, on the CPU, adapters merged."""
        return plain_model(self.policy), self.policy.tokenizer

    def _train(self) -> None:
        if self._last_checkpoint is None:
            self._begin()
        if self.config.eval.before and self._labelled("before") is None:
            self.evaluate("before")
        if self._last_checkpoint is None:
            self._checkpoint()
        last = self.step >= self.num_steps
        if not last and self._evaluation_is_due():  # a stop came in the middle of it
            self.evaluate("during")
        while not last:
            self._make_room()
            with self._stop.discardable():
                pass  # between two updates a stop is heard at once
            self._one_step()
            last = self.step == self.num_steps or self._enough or self._out_of_time()
            if self._evaluation_is_due() and not last:
                self.evaluate("during")
            if self._checkpoint_is_due() and not last:
                self._checkpoint()
        self._evaluate_after()

    def _make_room(self) -> None:
        if self._evaluates and self.plan is not None and self.plan.free_cache:
            self.generator.free_cache()

    def _begin(self) -> None:
        """Writes what is known before the first step."""
        found = {"sft/steps": float(self.num_steps), **self._measure()}
        self.run.write_metrics(0, {**self._warmstart, **self._facts_of_data, **found})

    def _one_step(self) -> None:
        # LoRA dropout uses torch's global generator, so the generator is seeded by the step.
        torch.manual_seed(derive_seed(self.config.seed, "sft/torch", self.step))
        dealt = self._steps[self.step]
        started = time.perf_counter()
        rows = [self.rows[number] for number in dealt.rows]
        batch = self._collated(rows)
        entry = self._checked(rows, batch)
        factor = rate_factor(self.step, self.num_steps)
        found = self.imitator.step(
            with_targets(batch, observations=self.config.sft.observations),
            factor=factor,
            where=f"step {self.step} with sft.lr = {self.config.sft.lr:g}",
        )
        seconds = time.perf_counter() - started
        metrics = {
            "sft/loss": found["loss"],
            "sft/grad_norm": found["grad_norm"],
            "sft/lr": self.config.sft.lr * factor,
            "sft/tokens": float(batch.num_tokens),
            "sft/epoch": float(dealt.epoch + 1),
            "time/update": seconds,
            "time/trained_tokens_per_second": batch.num_tokens / max(seconds, 1e-9),
        }
        self.step += 1
        if dealt.ends_epoch:
            metrics |= self._measure()
        self.run.write_ledger(entry)
        self.run.write_metrics(self.step, metrics)
        self._tell_step(metrics)

    def _checked(self, rows: Sequence[Row], batch: Batch) -> LedgerEntry:
        """The step's ledger entry: the ids under the mask are the demonstrations' own."""
        trained: list[list[int]] = [
            ids[mask].tolist()
            for ids, mask in zip(batch.input_ids, batch.response_mask, strict=True)
        ]
        entry = ledger_entry(self.step, zip([row.said for row in rows], trained, strict=True))
        if entry.broken or entry.sampled_sha256 != entry.trained_sha256:
            raise TrainingError(
                f"step {self.step}: in {entry.broken} of {len(rows)} rows the tokens to learn are "
                "not the demonstration's. Nothing was trained; please report this bug"
            )
        return entry

    def _measure(self) -> dict[str, float]:
        """How well the held-out demonstrations are predicted; empty where there are none."""
        if not self.held_out:
            return {}
        order = sorted(self.held_out, key=lambda row: len(row.sample.ids))
        starts = range(0, len(order), ROWS_AT_ONCE)
        parts = [order[start : start + ROWS_AT_ONCE] for start in starts]
        found = self.imitator.measure(map(self._collated, parts))
        return {"sft/held_out_loss": found.loss, "sft/token_accuracy": found.accuracy}

    def _collated(self, rows: Sequence[Row]) -> Batch:
        return collate([row.sample for row in rows], pad_id=self.policy.tokenizer.pad_token_id)

    def _snapshot(self) -> tuple[dict[str, Tensor], dict[str, Json]]:
        tensors = policy_tensors(self.policy) | self.imitator.optimizer.tensors("optimizer")
        tensors["torch_rng"] = torch.get_rng_state()
        return tensors, {"demonstrations": digest(self.rows)}

    def _load(self, checkpoint: Checkpoint) -> None:
        state, tensors = checkpoint.state, checkpoint.tensors()
        if state.get("demonstrations") != digest(self.rows):
            raise CheckpointError(
                f"{checkpoint.path} was trained on other demonstrations than these: a run goes on "
                "with those that it began with; start a new run instead"
            )
        load_policy_tensors(self.policy, tensors, checkpoint)
        self.imitator.optimizer.load_tensors(tensors, "optimizer")
        torch.set_rng_state(tensors["torch_rng"])
        self._go_on_after(checkpoint)

    def _facts(self) -> dict[str, str | int]:
        return {
            **super()._facts(),
            "demonstrations": int(self._facts_of_data["sft/episodes"]),
            "tokens": int(self._facts_of_data["sft/epoch_tokens"]),
        }

    def _close(self) -> None:
        """Nothing is open."""

    def _outcome(self) -> dict[str, Json]:
        rows = self.run.metrics()
        names = {name for row in rows for name in row if name.startswith("sft/")}
        last: dict[str, Json] = {}
        for name in sorted(names):
            last[name] = next(
                value for row in reversed(rows) if (value := row.get(name)) is not None
            )
        return {"sft": last}
