"""PPOTrainer: multi-turn (or single-turn) training on one machine, with any algorithm of the config."""

import contextlib
import re
import shutil
import time
from collections.abc import Generator as Iterator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from turnwise.algos.kl import KLState
from turnwise.algos.normalize import RewardNormalizer
from turnwise.algos.table import build_algorithm
from turnwise.config.schema import Config
from turnwise.envs.base import EnvError
from turnwise.evaluate import baselines
from turnwise.evaluate.evaluation import EvalResult, EvaluationError, PolicyPlayer, evaluate
from turnwise.generate.hf import HFGenerator
from turnwise.log.events import Evaluated, Event, Notice, RunEnded, RunStarted, Sink, Sinks, StepDone
from turnwise.log.store import RunDirectory
from turnwise.models.memory import planned
from turnwise.rollout.plan import env_configs
from turnwise.rollout.proxy import AgentProxy
from turnwise.rollout.speakers import PlayerError
from turnwise.seeding import derive_seed
from turnwise.train.checkpoint import Checkpoint, latest_checkpoint, write_checkpoint
from turnwise.train.networks import build_policy, load_policy_tensors, policy_tensors, sampling_model, save_policy
from turnwise.train.setup import choose_setting
from turnwise.train.step import StepRecord, training_step
from turnwise.train.update import Learner, TrainingError


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """What a run came to."""

    path: Path
    """The run directory."""
    steps: int
    """Training steps done, those before a resume included."""
    before: Evaluated | None
    after: Evaluated | None
    seconds: float
    checkpoint: Path | None
    """The last checkpoint; its `model` folder loads with `from_pretrained`."""


class PPOTrainer:
    """Trains a policy: plays episodes, assigns credit, updates, evaluates, checkpoints.

    Everything random is derived from the config's seed and a counter, so a run that is killed and resumed goes on
    exactly where its last checkpoint was.

    Args:
        resume: a run directory to go on with. Its stored config must describe the same model and seed.
        sinks: who hears of the run's progress (the console, trackers).
    """

    def __init__(self, config: Config, *, resume: Path | None = None, sinks: Sequence[Sink] = ()) -> None:
        self._sinks = Sinks(sinks)
        self._started = time.perf_counter()
        setting = choose_setting(config)
        self.config = setting.config
        self.factories = setting.factories
        self.algorithm = build_algorithm(self.config.algo)
        if self.config.train.critic_warmup and not self.algorithm.needs_critic:
            raise ValueError(
                f"train.critic_warmup={self.config.train.critic_warmup} means nothing to algo.name="
                f"{self.algorithm.name!r}: it has no critic; remove it or set it to 0"
            )
        if self.factories and self.config.model.path is None:
            raise ValueError(
                "training on data.prompts needs model.path: the embedded model begins by imitating random legal "
                "actions, and prompts have none"
            )
        self.run = _open_run(config, resume)
        try:
            self._build(setting.notices, resumed=resume is not None)
        except BaseException:
            self.run.close()
            if resume is None:  # nothing was trained yet, and its name is free again for the corrected run
                shutil.rmtree(self.run.path, ignore_errors=True)
            raise

    def _build(self, notices: Sequence[Notice], *, resumed: bool) -> None:
        self.plan, self.config = planned(self.config, self.algorithm)
        """What memory is used for; None where the model is too small to ask."""
        config = self.config
        torch.manual_seed(derive_seed(config.seed, "torch"))
        self.evaluations: list[Evaluated] = []
        self.idle_steps = 0
        self.step = 0
        """Training steps done."""
        checkpoint = latest_checkpoint(self.run.checkpoints, refused=self._refused) if resumed else None
        self._last_checkpoint = checkpoint.path if checkpoint else None
        self.run.truncate_to(-1 if checkpoint is None else checkpoint.state["positions"])
        for notice in notices:
            self._note(notice)
        self.policy, self._warmstart = build_policy(
            config,
            self.algorithm,
            initial=self.run.path / "initial_model",
            checkpoint=checkpoint,
            say=lambda message: self._note(Notice(kind="embedded", message=message, level="info")),
        )
        if self.plan is not None:
            self.policy.chunk_elements = self.plan.chunk_elements
        self.learner = Learner(self.policy, self.algorithm, config.train, seed=config.seed)
        environments = env_configs(config, config.rollout.train)
        self.normalizer = RewardNormalizer(
            {tag: env.shaping for tag, env in environments.items()}, singleton=self.algorithm.singleton
        )
        if checkpoint is not None:
            self._load(checkpoint)
        if config.train.compile and self.policy.precision.device.type != "cuda":
            raise ValueError("train.compile is for CUDA; on the CPU set it to false")
        self.generator = HFGenerator(
            sampling_model(self.policy),
            self.policy.tokenizer,
            slots=config.rollout.slots,
            max_context=config.rollout.max_context,
            deterministic=config.train.deterministic,
            policy_version=self.learner.version,
            compile=config.train.compile,
        )
        self.proxy = AgentProxy(config, self.generator, self.policy.tokenizer, factories=self.factories)

    def fit(self) -> RunResult:
        """Trains to the end of the config's steps. What is interrupted (Ctrl-C) can go on from the last checkpoint."""
        interrupted = False
        try:
            with _determinism(self.config.train.deterministic, self.policy.precision.device.type):
                self._emit(
                    RunStarted(path=self.run.path, config=self.config, first_step=self.step, facts=self._facts())
                )
                try:
                    self._train()
                except KeyboardInterrupt:
                    interrupted = True
                    raise
            return self._result()
        finally:
            before, after = self._labelled("before"), self._labelled("after")
            seconds = time.perf_counter() - self._started
            self._emit(
                RunEnded(
                    path=self.run.path,
                    seconds=seconds,
                    before=before,
                    after=after,
                    baselines=self._baselines(),
                    interrupted=interrupted,
                )
            )
            self.proxy.close()
            self._sinks.close()
            self.run.close()

    def evaluate(self, label: Literal["before", "during", "after"]) -> EvalResult:
        """Plays the held-out tasks with the policy as it is; the result is stored and told."""
        player = PolicyPlayer(generator=self.generator, tokenizer=self.policy.tokenizer)
        result = evaluate(self.config, player, step=self.step, factories=self.factories)
        event = result.event(self.step, label)
        self.evaluations.append(event)
        self.run.write_metrics(self.step, result.metrics())
        self.run.write_episodes(self.step, result.episodes, split="eval")
        self._emit(event)
        return result

    def play_baselines(self) -> None:
        """Plays the held-out tasks with players who learn nothing; the results are stored and told."""
        try:
            for baseline, result in baselines.play_baselines(self.config):
                event = replace(result.event(self.step, "baseline"), player=baseline.label)
                self.evaluations.append(event)
                name = baseline.player.name
                found = {f"baseline/{name}_reward": result.reward.estimate}
                if result.success is not None:
                    found[f"baseline/{name}_success"] = result.success.estimate
                self.run.write_metrics(self.step, found)
                self._emit(event)
                if baseline.detail:
                    message = f"the {baseline.label} {baseline.detail}"
                    self._note(Notice(kind="baseline", message=message, level="info"))
        except (EnvError, EvaluationError, PlayerError) as error:
            self._note(Notice(kind="baselines", message=f"baselines were left out: {error}"))

    def save(self) -> Path:
        """Writes a checkpoint of this moment."""
        tensors = policy_tensors(self.policy) | self.learner.optimizer.tensors("optimizer")
        if self.learner.critic_optimizer is not None:
            tensors |= self.learner.critic_optimizer.tensors("critic_optimizer")
        tensors["torch_rng"] = torch.get_rng_state()
        state = {
            "positions": self.run.positions(),
            "version": self.learner.version,
            "kl_coef": self.learner.kl.coef,
            "idle_steps": self.idle_steps,
            "reward_statistics": self.normalizer.state_dict(),
            "env_resets": self.proxy.env_state.num_resets,
            "evaluations": [event.to_json() for event in self.evaluations],
            "model": self.config.model.model_dump(mode="json"),
        }
        self._last_checkpoint = write_checkpoint(
            self.run.checkpoints,
            step=self.step,
            tensors=tensors,
            state=state,
            save_model=save_policy(self.policy),
            keep=self.config.checkpoint.keep,
        )
        return self._last_checkpoint

    def _train(self) -> None:
        config = self.config
        if self._warmstart:
            self.run.write_metrics(0, self._warmstart)
        if config.eval.before and self._labelled("before") is None:
            self.evaluate("before")
        if not self.factories and not self._baselines() and baselines.wanted(config):
            self.play_baselines()
        if self._last_checkpoint is None:
            self._checkpoint()
        last = self.step >= config.train.steps
        if not last:  # a run that was over and goes on is evaluated anew at its new end
            self.evaluations = [event for event in self.evaluations if event.label != "after"]
        while not last:
            self._one_step()
            last = self.step == config.train.steps or self._out_of_time()
            if config.eval.every and self.step % config.eval.every == 0 and not last:
                self.evaluate("during")
            if config.checkpoint.every and self.step % config.checkpoint.every == 0 and not last:
                self._checkpoint()
        try:
            if config.eval.after and self._labelled("after") is None:
                self.evaluate("after")
        finally:  # whatever becomes of the evaluation, what was trained is kept
            self._checkpoint()

    def _checkpoint(self) -> None:
        if self.config.checkpoint.write:
            self.save()

    def _out_of_time(self) -> bool:
        limit = self.config.train.max_minutes
        minutes = (time.perf_counter() - self._started) / 60.0
        if limit is None or minutes < limit:
            return False
        message = f"{minutes:.1f} minutes are over (train.max_minutes = {limit:g}): no step after {self.step}"
        self._note(Notice(kind="out_of_time", message=message, step=self.step, level="info"))
        return True

    def _one_step(self) -> None:
        # LoRA dropout cannot be given a generator of its own: torch's is made to depend on the step alone.
        torch.manual_seed(derive_seed(self.config.seed, "torch", self.step))
        result = training_step(
            self.step,
            proxy=self.proxy,
            learner=self.learner,
            normalizer=self.normalizer,
            pad_id=self.policy.tokenizer.pad_token_id,
            exact=self.policy.precision.exact,
            make_room=self._make_room,
        )
        if result.updated:
            self.generator.weights_updated(self.learner.version)
        self._store(result)
        self.idle_steps = 0 if result.updated else self.idle_steps + 1
        self.step += 1
        self._emit(StepDone(step=self.step, metrics=result.metrics))
        if not result.updated:
            self._note_idle()

    def _make_room(self) -> None:
        if self.plan is not None and self.plan.free_cache:
            self.generator.free_cache()

    def _store(self, result: StepRecord) -> None:
        """Rows of a step carry the number of steps done after it; 0 is what was there before."""
        number, log = self.step + 1, self.config.log
        self.run.write_ledger(result.ledger)
        if log.episodes_every and self.step % log.episodes_every == 0:
            self.run.write_episodes(number, result.episodes)
            if log.credit:
                self.run.write_credit(number, result.credit)
        self.run.write_metrics(number, result.metrics)

    def _note_idle(self) -> None:
        limit = self.config.train.max_idle_steps
        message = (
            f"step {self.step}: in no group did episodes differ in reward, so there was nothing to learn "
            f"({self.idle_steps} of {limit} such steps in a row)"
        )
        self._note(Notice(kind="idle_step", message=message, step=self.step))
        if self.idle_steps >= limit:
            try:
                if self.config.eval.after:  # how far it got is worth knowing, whichever of the two it is
                    self.evaluate("after")
            finally:
                self._checkpoint()
            raise TrainingError(
                f"{message}. Stopped: either every task is solved, or none ever is. Make tasks easier or harder, raise "
                "rollout.train.group_size or rollout.temperature, shape the reward (env.shaping), or raise "
                "train.max_idle_steps"
            )

    def _load(self, checkpoint: Checkpoint) -> None:
        state, tensors = checkpoint.state, checkpoint.tensors()
        load_policy_tensors(self.policy, tensors, checkpoint)
        self.learner.optimizer.load_tensors(tensors, "optimizer")
        if self.learner.critic_optimizer is not None:
            self.learner.critic_optimizer.load_tensors(tensors, "critic_optimizer")
        self.learner.version = state["version"]
        if self.algorithm.kl_target is not None:  # one that is fixed is the config's
            self.learner.kl = KLState(coef=state["kl_coef"], target=self.algorithm.kl_target)
            self.learner.adapt_kl(self.algorithm.kl_target, num_episodes=0)
        self.idle_steps = state["idle_steps"]
        self.normalizer.load_state_dict(state["reward_statistics"])
        self.step = checkpoint.step
        self.evaluations = [Evaluated.from_json(event) for event in state["evaluations"]]
        torch.set_rng_state(tensors["torch_rng"])
        self._note(Notice(kind="resumed", message=f"goes on after step {self.step}", step=self.step, level="info"))

    def _result(self) -> RunResult:
        result = RunResult(
            path=self.run.path,
            steps=self.step,
            before=self._labelled("before"),
            after=self._labelled("after"),
            seconds=time.perf_counter() - self._started,
            checkpoint=self._last_checkpoint,
        )
        self.run.write_summary(
            {
                "steps": result.steps,
                "before": result.before.to_json() if result.before else None,
                "after": result.after.to_json() if result.after else None,
                "baselines": [event.to_json() for event in self._baselines()],
                "seconds": round(result.seconds, 3),
                "checkpoint": str(result.checkpoint.relative_to(result.path)) if result.checkpoint else None,
            }
        )
        if self.config.log.credit:
            self.run.write_pieces(lambda token: self.policy.tokenizer.decode([token]))
        return result

    def _facts(self) -> dict[str, str | int]:
        return {
            "model": self.config.model.path or "embedded",
            "parameters": sum(parameter.numel() for parameter in self.policy.model.parameters()),
            "trained": sum(parameter.numel() for parameter in self.policy.parameters()),
            "device": str(self.policy.precision.device),
            "algorithm": self.algorithm.name,
            "multi_turn": str(self.config.train.multi_turn).lower(),
        }

    def _labelled(self, label: str) -> Evaluated | None:
        return next((event for event in self.evaluations if event.label == label), None)

    def _baselines(self) -> tuple[Evaluated, ...]:
        return tuple(event for event in self.evaluations if event.label == "baseline")

    def _refused(self, message: str) -> None:
        self._note(Notice(kind="checkpoint_refused", message=message))

    def _note(self, notice: Notice) -> None:
        self.run.write_event(notice.kind, notice.message, step=notice.step)
        self._emit(notice)

    def _emit(self, event: Event) -> None:
        self._sinks.handle(event)


def _open_run(config: Config, resume: Path | None) -> RunDirectory:
    if resume is None:
        # An environment's name may be a path or an address; a run's name is neither.
        env_name = re.sub(r"[^\w.-]+", "-", config.env.name.rpartition(":")[2]).strip("-.")
        return RunDirectory.create(config.log, config, default_name=f"{env_name}-{config.algo.name}-s{config.seed}")
    run = RunDirectory.open(resume)
    stored = run.config
    for name, ours, theirs in (("model", config.model, stored.model), ("seed", config.seed, stored.seed)):
        if ours != theirs:
            run.close()
            raise ValueError(
                f"{resume} was started with {name} = {theirs!r}, and the config now says {ours!r}: a run goes on with "
                f"the {name} that it began with; start a new run instead"
            )
    if config != stored:
        run.write_config(config)
    return run


@contextlib.contextmanager
def _determinism(asked: bool | None, device: str) -> Iterator[None]:
    """Deterministic kernels while training: by default on the CPU, where they cost nothing."""
    wanted = device == "cpu" if asked is None else asked
    before = torch.are_deterministic_algorithms_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory  # pyright: ignore[reportAttributeAccessIssue]
    torch.use_deterministic_algorithms(wanted)
    # Filling what will be overwritten anyway is for finding bugs, and costs time.
    torch.utils.deterministic.fill_uninitialized_memory = not wanted  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.utils.deterministic.fill_uninitialized_memory = filled  # pyright: ignore[reportAttributeAccessIssue]
