# pyright: reportUnknownMemberType=false
"""PPOTrainer: multi-turn (or single-turn) training on one machine, with any algorithm of the
config."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from turnwise.algos.algorithm import Algorithm
from turnwise.algos.kl import KLState
from turnwise.algos.normalize import RewardNormalizer
from turnwise.algos.table import build_algorithm
from turnwise.config.schema import Config
from turnwise.envs.base import EnvError
from turnwise.envs.trust import code_digests
from turnwise.evaluate import baselines
from turnwise.evaluate.evaluation import EvalResult, EvaluationError
from turnwise.log.events import EpisodeDone, Notice, Sink, TurnDone
from turnwise.log.store import RunReader
from turnwise.models.memory import planned
from turnwise.models.policy import Precision
from turnwise.rollout.agents import Agent
from turnwise.rollout.plan import env_configs
from turnwise.rollout.proxy import AgentProxy, sampling_for
from turnwise.rollout.speakers import PlayerError
from turnwise.seeding import derive_seed
from turnwise.train.base import RunResult, RunTrainer, open_run, refuse_another
from turnwise.train.checkpoint import Checkpoint
from turnwise.train.early import refuse_lone_groups
from turnwise.train.generators import find_generator, make_generator
from turnwise.train.networks import (
    build_policy,
    imitates_first,
    load_policy_tensors,
    policy_tensors,
)
from turnwise.train.setup import choose_setting
from turnwise.train.sources import refuse_unknown
from turnwise.train.stages import STAGE, imitate_first
from turnwise.train.standstill import Standstill
from turnwise.train.step import StepRecord, training_step
from turnwise.train.update import Learner, TrainingError
from turnwise.types import Episode, Json

__all__ = ["PPOTrainer", "RunResult"]

FIXED = ("seed", "env.name", "algo.name", "sft.")
"""Settings that a resumed run keeps, besides its model."""


class PPOTrainer(RunTrainer):
    """Trains a policy: plays episodes, assigns credit, updates, evaluates, checkpoints.

    Args:
        resume: a run directory to go on with. Its stored config must describe the same model,
            environment, algorithm and seed.
        sinks: receivers of progress events (the console, trackers).
    """

    def __init__(
        self, config: Config, *, resume: Path | None = None, sinks: Sequence[Sink] = ()
    ) -> None:
        super().__init__(sinks)
        stored = None if resume is None else RunReader(resume).config
        if resume is not None and stored is not None:
            refuse_another(config, stored, resume, fixed=FIXED)
        setting = choose_setting(config)
        self._asked = config
        self.config = setting.config
        self.factories = setting.factories
        self.algorithm = build_algorithm(self.config.algo)
        if self.config.train.critic_warmup and not self.algorithm.needs_critic:
            raise ValueError(
                f"train.critic_warmup={self.config.train.critic_warmup} means nothing to algo.name="
                f"{self.algorithm.name!r}: it has no critic; remove it or set it to 0"
            )
        _refuse_early(self.config, self.algorithm, resumed=resume is not None)
        if self.factories and self.config.model.path is None:
            raise ValueError(
                "training on data.prompts needs model.path: the embedded model begins by imitating "
                "random legal "
                "actions, and prompts have none"
            )
        self.run = open_run(config, resume, named=(config.env.name, config.algo.name))
        try:
            self._build(setting.notices, resumed=resume is not None)
            if stored is not None and stored != config:
                self._go_on_with(config, stored)
        except BaseException:
            self.run.close()
            begun = resume is not None or (self.run.path / STAGE).is_dir()
            if not begun:  # nothing was trained yet; frees the name for the corrected run
                shutil.rmtree(self.run.path, ignore_errors=True)
            raise

    def _build(self, notices: Sequence[Notice], *, resumed: bool) -> None:
        self.plan, self.config = planned(self.config, self.algorithm)
        """The memory plan; None for the embedded model."""
        config = self.config
        self._code = code_digests(config)
        self._still = Standstill(config.train)
        checkpoint = self._open_checkpoint(notices, resumed=resumed)
        initial = self.run.path / "initial_model"
        imitated = None
        if imitates_first(config) and not initial.is_dir():
            imitated = imitate_first(self._asked, initial=initial, sinks=self._sinks)
        torch.manual_seed(derive_seed(config.seed, "torch"))
        self.policy, self._warmstart = build_policy(
            config,
            self.algorithm,
            initial=initial,
            checkpoint=checkpoint,
            imitated=imitated,
            say=lambda message: self._note(Notice(kind="embedded", message=message, level="info")),
        )
        if self.plan is not None:
            self.policy.chunk_elements = self.plan.chunk_elements
        self.learner = Learner(self.policy, self.algorithm, config.train, seed=config.seed)
        environments = env_configs(config, config.rollout.train)
        self.normalizer = RewardNormalizer(
            {tag: env.shaping for tag, env in environments.items()},
            singleton=self.algorithm.singleton,
        )
        if checkpoint is not None:
            self._load(checkpoint)
        self.generator = make_generator(config, self.policy, version=self.learner.version)
        self.proxy = AgentProxy(
            config,
            self.generator,
            self.policy.tokenizer,
            factories=self.factories,
            on_turn=self._tell_turn if self._sinks.hear("turns") else None,
            on_episode=self._tell_episode if self._sinks.hear("episodes") else None,
        )

    @property
    def num_steps(self) -> int:
        return self.config.train.steps

    def _close(self) -> None:
        self.proxy.close()

    def play_baselines(self) -> None:
        """Evaluates the baseline players on the held-out tasks; stores and reports the results."""
        played: list[tuple[baselines.Baseline, EvalResult]] = []
        try:
            with self._stop.discardable():
                for pair in baselines.play_baselines(self.config):
                    played.append(pair)
        except (EnvError, EvaluationError, PlayerError) as error:
            self._note(Notice(kind="baselines", message=f"baselines were left out: {error}"))
        for baseline, result in played:
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

    def _snapshot(self) -> tuple[dict[str, Tensor], dict[str, Json]]:
        tensors = policy_tensors(self.policy) | self.learner.optimizer.tensors("optimizer")
        if self.learner.critic_optimizer is not None:
            tensors |= self.learner.critic_optimizer.tensors("critic_optimizer")
        tensors["torch_rng"] = torch.get_rng_state()
        return tensors, {
            "version": self.learner.version,
            "kl_coef": self.learner.kl.coef,
            "idle_steps": self._still.idle,
            "collapsed_steps": self._still.collapsed,
            "reports_success": dict(self._reports),
            "reward_statistics": self.normalizer.state_dict(),
            "env_resets": self.proxy.env_state.num_resets,
            "code": self._code,
        }

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
        if not last:  # a finished run that is extended is evaluated again at its new end
            self.evaluations = [event for event in self.evaluations if event.label != "after"]
        if not last and self._evaluation_is_due():  # a stop came in the middle of it
            self.evaluate("during")
        while not last:
            self._one_step()
            last = self.step == config.train.steps or self._enough or self._out_of_time()
            if self._evaluation_is_due() and not last:
                self.evaluate("during")
            if self._checkpoint_is_due() and not last:
                self._checkpoint()
        self._evaluate_after()

    def _one_step(self) -> None:
        result = training_step(
            self.step,
            proxy=self.proxy,
            learner=self.learner,
            normalizer=self.normalizer,
            pad_id=self.policy.tokenizer.pad_token_id,
            exact=self.policy.precision.exact and self.config.rollout.generator is None,
            speaking=[tag for tag, speaks in self._reports.items() if speaks],
            make_room=self._make_room,
            discardable=self._stop.discardable,
        )
        self._reports |= {one.tag: True for one in result.episodes if one.success is not None}
        if result.updated:
            self.generator.weights_updated(self.learner.version)
        self._store(result)
        self.step += 1
        last = self.step >= self.config.train.steps
        self._still.count(self.step, result.metrics, updated=result.updated, last=last)
        self._tell_step(result.metrics)
        if not result.updated:
            self._note(Notice(kind="idle_step", message=self._still.idle_note(), step=self.step))
        self._end_standstill()

    def _end_standstill(self) -> None:
        """Ends a run that learns nothing: as solved, or with an error that says what to do."""
        still = self._still
        if still.solved:
            self._enough = True
            message = still.solved_note()
            self._note(Notice(kind="solved", message=message, step=self.step, level="info"))
        if still.collapsing:
            self._note(Notice(kind="collapse_stop", message=still.collapse_note(), step=self.step))
        if still.why is not None:
            self._give_up(still.why)

    def _tell_turn(self, agent: Agent) -> None:
        turn = TurnDone(
            episode_id=agent.plan.episode_id, index=len(agent.turns) - 1, turn=agent.turns[-1]
        )
        self._emit(turn)

    def _tell_episode(self, episode: Episode) -> None:
        self._emit(EpisodeDone(episode=episode))

    def _make_room(self) -> None:
        if self.plan is not None and self.plan.free_cache and hasattr(self.generator, "free_cache"):
            self.generator.free_cache()

    def _store(self, result: StepRecord) -> None:
        """Metrics of a step carry the number of steps done after it; 0 is the state before
        training."""
        number, log = self.step + 1, self.config.log
        self.run.write_ledger(result.ledger)
        if log.episodes_every and self.step % log.episodes_every == 0:
            self.run.write_episodes(number, result.episodes)
            if log.credit:
                self.run.write_credit(number, result.credit)
            self._write_pieces()
        self.run.write_metrics(number, result.metrics)

    def _give_up(self, why: str) -> NoReturn:
        """Evaluates, writes a checkpoint and ends the run."""
        try:
            if self.config.eval.after:  # where the policy stands is useful in any case
                self.evaluate("after")
        finally:
            self._checkpoint()
        raise TrainingError(why)

    def _load(self, checkpoint: Checkpoint) -> None:
        state, tensors = checkpoint.state, checkpoint.tensors()
        load_policy_tensors(self.policy, tensors, checkpoint)
        self.learner.optimizer.load_tensors(tensors, "optimizer")
        if self.learner.critic_optimizer is not None:
            self.learner.critic_optimizer.load_tensors(tensors, "critic_optimizer")
        self.learner.version = state["version"]
        if self.algorithm.kl_target is not None:  # a fixed coefficient comes from the config
            self.learner.kl = KLState(coef=state["kl_coef"], target=self.algorithm.kl_target)
            self.learner.adapt_kl(self.algorithm.kl_target, num_episodes=0)
        self._still.idle = state["idle_steps"]
        self._still.collapsed = state.get("collapsed_steps", 0)
        self._reports |= state.get("reports_success", {})
        self.normalizer.load_state_dict(state["reward_statistics"])
        torch.set_rng_state(tensors["torch_rng"])
        old: dict[str, str] = state.get("code", {})
        changed = [file for file in self._code if old.get(file, "") not in ("", self._code[file])]
        if changed:
            message = (
                f"{', '.join(changed)} changed since step {checkpoint.step} was saved; the run "
                "goes on with the new code, and its earlier evaluations ran the old"
            )
            self._note(Notice(kind="code_changed", message=message, step=checkpoint.step))
        self._go_on_after(checkpoint)

    def _facts(self) -> dict[str, str | int]:
        return {
            **super()._facts(),
            "algorithm": self.algorithm.name,
            "multi_turn": str(self.config.train.multi_turn).lower(),
        }


def _refuse_early(config: Config, algorithm: Algorithm, *, resumed: bool) -> None:
    """Raises ValueError for what would stop the run later, after minutes of preparation."""
    sampling_for(config.rollout, "train")
    device = Precision.choose(config.model.dtype, device=config.train.device).device
    if config.train.compile and device.type != "cuda":
        raise ValueError("train.compile is for CUDA; on the CPU set it to false")
    refuse_lone_groups(config, compares_groups=algorithm.compares_groups)
    if config.rollout.generator is not None:
        find_generator(config.rollout.generator)
    if not resumed:  # a run keeps its demonstrations
        refuse_unknown(config.sft.source)
