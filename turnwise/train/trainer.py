# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""PPOTrainer: multi-turn (or single-turn) training on one machine, with any algorithm of the
config."""

import contextlib
import re
import shutil
import time
from collections.abc import Generator as Iterator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NoReturn

import torch

from turnwise.algos.algorithm import Algorithm
from turnwise.algos.kl import KLState
from turnwise.algos.normalize import RewardNormalizer
from turnwise.algos.table import build_algorithm
from turnwise.config.schema import Config
from turnwise.config.tree import differences
from turnwise.envs.base import EnvError
from turnwise.envs.trust import code_digests
from turnwise.evaluate import baselines
from turnwise.evaluate.evaluation import EvalResult, EvaluationError, PolicyPlayer, evaluate
from turnwise.log.callbacks import StopTraining
from turnwise.log.doctor import COLLAPSE_ADVICE
from turnwise.log.events import (
    CheckpointSaved,
    EpisodeDone,
    Evaluated,
    Event,
    Notice,
    RunEnded,
    RunStarted,
    Sink,
    Sinks,
    StepDone,
    TurnDone,
)
from turnwise.log.metrics import is_collapsed
from turnwise.log.store import RunDirectory, RunReader
from turnwise.models.memory import planned
from turnwise.models.policy import Precision
from turnwise.procs.stop import Stopped, StopRequest, say_stopping
from turnwise.rollout.agents import Agent
from turnwise.rollout.plan import env_configs
from turnwise.rollout.proxy import AgentProxy, sampling_for
from turnwise.rollout.speakers import PlayerError
from turnwise.seeding import derive_seed
from turnwise.train.checkpoint import (
    Checkpoint,
    checkpoint_step,
    latest_checkpoint,
    list_checkpoints,
    write_checkpoint,
)
from turnwise.train.generators import make_generator
from turnwise.train.networks import (
    build_policy,
    load_policy_tensors,
    policy_tensors,
    save_policy,
)
from turnwise.train.setup import choose_setting
from turnwise.train.step import StepRecord, training_step
from turnwise.train.update import Learner, TrainingError
from turnwise.types import Episode

NAMES = ("env.name", "algo.name")
FIXED = ("seed", *NAMES)
"""What a run keeps when it is resumed, besides its model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """The result of a run."""

    path: Path
    """The run directory."""
    steps: int
    """Training steps done, those before a resume included."""
    before: Evaluated | None
    after: Evaluated | None
    seconds: float
    checkpoint: Path | None
    """The last checkpoint; its `model` folder loads with `from_pretrained`."""
    stopped: str | None = None
    """Who ended the run before its last step: Ctrl-C, SIGTERM or the time limit. None: nobody."""

    @property
    def reader(self) -> RunReader:
        """Reads everything that the run left behind."""
        return RunReader(self.path)

    def metrics(self) -> list[dict[str, float | None]]:
        """One dict per step (step 0: before training); docs/metrics.md defines the names."""
        return self.reader.metrics()

    def episodes(self, step: int | None = None) -> list[Episode]:
        """The stored training episodes of a step; None: of all steps."""
        reader = self.reader
        steps = reader.steps() if step is None else [step]
        return [episode for number in steps for episode in reader.episodes(number)]


class PPOTrainer:
    """Trains a policy: plays episodes, assigns credit, updates, evaluates, checkpoints.

    All randomness is derived from the config's seed and a counter, so a run that is killed and
    resumed continues exactly from its last checkpoint.

    Args:
        resume: a run directory to go on with. Its stored config must describe the same model,
            environment, algorithm and seed.
        sinks: receivers of progress events (the console, trackers).
    """

    def __init__(
        self, config: Config, *, resume: Path | None = None, sinks: Sequence[Sink] = ()
    ) -> None:
        self._sinks = Sinks(sinks)
        self._started = time.perf_counter()
        self._stop = StopRequest()
        self._stopped: str | None = None
        stored = None if resume is None else RunReader(resume).config
        if resume is not None and stored is not None:
            _refuse_another(config, stored, resume)
        setting = choose_setting(config)
        self.config = setting.config
        self.factories = setting.factories
        self.algorithm = build_algorithm(self.config.algo)
        if self.config.train.critic_warmup and not self.algorithm.needs_critic:
            raise ValueError(
                f"train.critic_warmup={self.config.train.critic_warmup} means nothing to algo.name="
                f"{self.algorithm.name!r}: it has no critic; remove it or set it to 0"
            )
        _refuse_early(self.config, self.algorithm)
        if self.factories and self.config.model.path is None:
            raise ValueError(
                "training on data.prompts needs model.path: the embedded model begins by imitating "
                "random legal "
                "actions, and prompts have none"
            )
        self.run = _open_run(config, resume)
        try:
            self._build(setting.notices, resumed=resume is not None)
            if stored is not None and stored != config:
                self._go_on_with(config, stored)
        except BaseException:
            self.run.close()
            if resume is None:  # nothing was trained yet; frees the name for the corrected run
                shutil.rmtree(self.run.path, ignore_errors=True)
            raise

    def _build(self, notices: Sequence[Notice], *, resumed: bool) -> None:
        self.plan, self.config = planned(self.config, self.algorithm)
        """The memory plan; None for the embedded model."""
        config = self.config
        torch.manual_seed(derive_seed(config.seed, "torch"))
        self.evaluations: list[Evaluated] = []
        self._code = code_digests(config)
        self.idle_steps = 0
        self.collapsed_steps = 0
        self._enough = False
        """A callback asked for the end."""
        self.step = 0
        """Training steps done."""
        checkpoint = (
            latest_checkpoint(self.run.checkpoints, refused=self._refused) if resumed else None
        )
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

    def fit(self) -> RunResult:
        """Trains to the end of the config's steps.

        Ctrl-C, SIGTERM and train.time_limit end it with a checkpoint of the last full step: a
        rollout or an evaluation is thrown away at once, an update is finished. Resumed, the run
        goes on as if it had never stopped. A second signal ends it at once (KeyboardInterrupt),
        with the checkpoints that are there.
        """
        interrupted = True
        seconds = self._seconds_left()
        try:
            with (
                StopRequest(seconds=seconds, heard=say_stopping) as self._stop,
                _determinism(self.config.train.deterministic, self.policy.precision.device.type),
            ):
                self._emit(
                    RunStarted(
                        path=self.run.path,
                        config=self.config,
                        first_step=self.step,
                        facts=self._facts(),
                    )
                )
                try:
                    self._train()
                except Stopped as stopped:
                    self._stopped = str(stopped)
                    self._keep_last_step()
            interrupted = self._stopped is not None
            return self._result()
        except Exception:
            interrupted = False
            raise
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
                    checkpoint=self._last_checkpoint,
                )
            )
            self.proxy.close()
            self._sinks.close()
            self.run.close()

    def evaluate(self, label: Literal["before", "during", "after"]) -> EvalResult:
        """Evaluates the current policy on the held-out tasks; stores and reports the result."""
        player = PolicyPlayer(generator=self.generator, tokenizer=self.policy.tokenizer)
        with self._stop.discardable():
            result = evaluate(self.config, player, step=self.step, factories=self.factories)
        event = result.event(self.step, label)
        self.evaluations.append(event)
        self.run.write_metrics(self.step, result.metrics())
        self.run.write_episodes(self.step, result.episodes, split="eval")
        self._emit(event)
        return result

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
            "collapsed_steps": self.collapsed_steps,
            "reward_statistics": self.normalizer.state_dict(),
            "env_resets": self.proxy.env_state.num_resets,
            "evaluations": [event.to_json() for event in self.evaluations],
            "model": self.config.model.model_dump(mode="json"),
            "code": self._code,
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
        if not last:  # a finished run that is extended is evaluated again at its new end
            self.evaluations = [event for event in self.evaluations if event.label != "after"]
        if not last and self._evaluation_is_due():  # a stop came in the middle of it
            self.evaluate("during")
        while not last:
            self._one_step()
            last = self.step == config.train.steps or self._enough or self._out_of_time()
            if self._evaluation_is_due() and not last:
                self.evaluate("during")
            if config.checkpoint.every and self.step % config.checkpoint.every == 0 and not last:
                self._checkpoint()
        try:
            if config.eval.after and self._labelled("after") is None:
                self.evaluate("after")
        except Stopped:
            raise
        except BaseException:  # keeps the training result even if it fails
            self._checkpoint()
            raise
        self._checkpoint()

    def _evaluation_is_due(self) -> bool:
        every = self.config.eval.every
        if not every or not self.step or self.step % every:
            return False
        seen = (event for event in self.evaluations if event.label == "during")
        return all(event.step != self.step for event in seen)

    def _keep_last_step(self) -> None:
        """A checkpoint as after the last full step, so that a resume plays the next one again.
        Nothing was written since."""
        last = self._last_checkpoint
        if last is None or checkpoint_step(last) != self.step:
            self._checkpoint()

    def _seconds_left(self) -> float | None:
        limit = self.config.train.time_limit
        if limit is None:
            return None
        return 60.0 * limit - (time.perf_counter() - self._started)

    def _checkpoint(self) -> None:
        if self.config.checkpoint.write:
            self._emit(CheckpointSaved(step=self.step, path=self.save()))

    def _out_of_time(self) -> bool:
        limit = self.config.train.max_minutes
        minutes = (time.perf_counter() - self._started) / 60.0
        if limit is None or minutes < limit:
            return False
        message = (
            f"{minutes:.1f} minutes are over (train.max_minutes = {limit:g}): no step after "
            f"{self.step}"
        )
        self._note(Notice(kind="out_of_time", message=message, step=self.step, level="info"))
        return True

    def _one_step(self) -> None:
        # LoRA dropout uses torch's global generator, so the generator is seeded by the step.
        torch.manual_seed(derive_seed(self.config.seed, "torch", self.step))
        result = training_step(
            self.step,
            proxy=self.proxy,
            learner=self.learner,
            normalizer=self.normalizer,
            pad_id=self.policy.tokenizer.pad_token_id,
            exact=self.policy.precision.exact and self.config.rollout.generator is None,
            make_room=self._make_room,
            discardable=self._stop.discardable,
        )
        if result.updated:
            self.generator.weights_updated(self.learner.version)
        self._store(result)
        self.idle_steps = 0 if result.updated else self.idle_steps + 1
        self.collapsed_steps = self.collapsed_steps + 1 if is_collapsed(result.metrics) else 0
        self.step += 1
        try:
            self._emit(StepDone(step=self.step, metrics=result.metrics))
        except StopTraining as stop:
            self._enough = True
            message = f"a callback ended the run after step {self.step}: {stop}"
            self._note(Notice(kind="stopped", message=message, step=self.step, level="info"))
        if not result.updated:
            self._note_idle(penalties=int(result.metrics.get("group/penalty_only", 0.0)))
        limit = self.config.train.max_collapsed_steps
        if limit and self.collapsed_steps >= limit and self.step < self.config.train.steps:
            self._end_collapsed()

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
        self.run.write_metrics(number, result.metrics)

    def _note_idle(self, *, penalties: int) -> None:
        limit = self.config.train.max_idle_steps
        but = f" but for penalties in {penalties} (algo.penalty_only_groups)" if penalties else ""
        message = (
            f"step {self.step}: in no group did episodes differ in reward{but}, so there was "
            "nothing to learn "
            f"({self.idle_steps} of {limit} such steps in a row)"
        )
        self._note(Notice(kind="idle_step", message=message, step=self.step))
        if self.idle_steps >= limit:
            self._give_up(
                f"{message}. Stopped: either every task is solved, or none ever is. Make tasks "
                "easier or harder, raise "
                "rollout.train.group_size or rollout.temperature, shape the reward (env.shaping), "
                "or raise "
                "train.max_idle_steps"
            )

    def _end_collapsed(self) -> NoReturn:
        message = (
            f"step {self.step}: every reply is the same and nothing succeeds, for "
            f"{self.collapsed_steps} steps in a row"
        )
        self._note(Notice(kind="collapse_stop", message=message, step=self.step))
        self._give_up(
            f"{message}. Stopped: {COLLAPSE_ADVICE}. train.max_collapsed_steps: 0 lets such a run "
            "go on"
        )

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
        self.idle_steps = state["idle_steps"]
        self.collapsed_steps = state.get("collapsed_steps", 0)
        self.normalizer.load_state_dict(state["reward_statistics"])
        self.step = checkpoint.step
        self.evaluations = [Evaluated.from_json(event) for event in state["evaluations"]]
        torch.set_rng_state(tensors["torch_rng"])
        old: dict[str, str] = state.get("code", {})
        changed = [file for file in self._code if old.get(file, "") not in ("", self._code[file])]
        if changed:
            message = (
                f"{', '.join(changed)} changed since step {self.step} was saved; the run goes on "
                "with the new code, and its earlier evaluations ran the old"
            )
            self._note(Notice(kind="code_changed", message=message, step=self.step))
        self._note(
            Notice(
                kind="resumed",
                message=f"goes on after step {self.step}",
                step=self.step,
                level="info",
            )
        )

    def _go_on_with(self, config: Config, stored: Config) -> None:
        """Stores the settings that a resumed run goes on with, and says which are new."""
        changed = differences([stored, config])
        self.run.write_config(config, changed=changed)
        listed = ", ".join(f"{path} {old!r} -> {new!r}" for path, (old, new) in changed.items())
        if any(path.startswith(("env.", "envs")) for path in changed):
            listed += "; its earlier evaluations were played with the old ones"
        self._emit(
            Notice(
                kind="config_changed",
                message=f"goes on with other settings: {listed}",
                step=self.step,
            )
        )

    def _result(self) -> RunResult:
        result = RunResult(
            path=self.run.path,
            steps=self.step,
            before=self._labelled("before"),
            after=self._labelled("after"),
            seconds=time.perf_counter() - self._started,
            checkpoint=self._last_checkpoint,
            stopped=self._stopped,
        )
        self.run.write_summary(
            {
                "steps": result.steps,
                "before": result.before.to_json() if result.before else None,
                "after": result.after.to_json() if result.after else None,
                "baselines": [event.to_json() for event in self._baselines()],
                "seconds": round(result.seconds, 3),
                "checkpoint": str(result.checkpoint.relative_to(result.path))
                if result.checkpoint
                else None,
                "stopped": result.stopped,
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


def _refuse_early(config: Config, algorithm: Algorithm) -> None:
    """Raises ValueError for what would stop the run later, after minutes of preparation."""
    sampling_for(config.rollout, "train")
    device = Precision.choose(config.model.dtype, device=config.train.device).device
    if config.train.compile and device.type != "cuda":
        raise ValueError("train.compile is for CUDA; on the CPU set it to false")
    alone = config.rollout.train.group_size == 1 and algorithm.singleton == "error"
    if algorithm.compares_groups and alone:
        raise ValueError(
            f"rollout.train.group_size=1: algo.name={config.algo.name!r} compares the episodes of "
            "a group; raise it, as in rollout.train.group_size=8, or set algo.singleton: zero"
        )


def _open_run(config: Config, resume: Path | None) -> RunDirectory:
    if resume is None:
        # Names of parts may be paths or URLs, which a run's name must not contain.
        env_name, algo_name = (
            re.sub(r"[^\w.-]+", "-", name.rpartition(":")[2]).strip("-.")
            for name in (config.env.name, config.algo.name)
        )
        return RunDirectory.create(
            config.log, config, default_name=f"{env_name}-{algo_name}-s{config.seed}"
        )
    return RunDirectory.open(resume)


def _refuse_another(config: Config, stored: Config, resume: Path) -> None:
    """Raises ValueError where the config describes another run than the one that is to go on."""
    changed = differences([stored, config])
    for path, (old, new) in changed.items():
        fixed = path in FIXED or path.startswith("model.")
        if fixed and (path not in NAMES or _place(old) != _place(new)):
            saved = list_checkpoints(resume / "checkpoints")
            weights = f", from its weights with model.path={saved[-1] / 'model'}" if saved else ""
            raise ValueError(
                f"{resume} was started with {path} = {old!r}, and the config now says {new!r}: a "
                f"run goes on with the {path.partition('.')[0]} that it began with; start a new "
                f"run instead{weights}"
            )


def _place(name: str) -> tuple[Path | str, str]:
    """A part's name, with the file that it leads to."""
    where, _, attribute = name.rpartition(":")
    return Path(where).resolve() if where.endswith(".py") else where, attribute


@contextlib.contextmanager
def _determinism(asked: bool | None, device: str) -> Iterator[None]:
    """Deterministic kernels while training: by default on the CPU, where they cost nothing."""
    wanted = device == "cpu" if asked is None else asked
    before = torch.are_deterministic_algorithms_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory  # pyright: ignore[reportAttributeAccessIssue]
    torch.use_deterministic_algorithms(wanted)
    # Filling uninitialised memory only helps to find bugs, and costs time.
    torch.utils.deterministic.fill_uninitialized_memory = not wanted  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.utils.deterministic.fill_uninitialized_memory = filled  # pyright: ignore[reportAttributeAccessIssue]
