# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
"""`turnwise train --backend trl`: the native trainer's config, TRL's trainer, the same run
directory."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from turnwise.config.schema import Config
from turnwise.envs.registry import make_env
from turnwise.envs.trust import refuse_foreign_code
from turnwise.evaluate.evaluation import PolicyPlayer, evaluate
from turnwise.generate.hf import HFGenerator
from turnwise.inspect.report import write_report
from turnwise.integrations.trl.engines import base_model
from turnwise.integrations.trl.mapping import refuse, trl_arguments, updates_per_step
from turnwise.integrations.trl.sources import EnvSource
from turnwise.log.console import ConsoleSink
from turnwise.log.events import Evaluated, Notice, RunEnded, RunStarted, Sink, Sinks, StepDone
from turnwise.log.outcome import summary_json
from turnwise.log.store import RunDirectory, RunReader
from turnwise.log.trackers import make_trackers
from turnwise.models.policy import load_model, load_tokenizer
from turnwise.procs.stop import StopRequest, say_stopping
from turnwise.train.base import determinism
from turnwise.train.checkpoint import check_files
from turnwise.train.networks import first_policy, load_stored_tokenizer
from turnwise.train.setup import Setting, choose_setting
from turnwise.train.standstill import Standstill
from turnwise.train.trainer import RunResult
from turnwise.train.update import TrainingError


def train(
    config: Config | None = None,
    *,
    resume: Path | None = None,
    sinks: Sequence[Sink] | None = None,
    trust: bool = False,
) -> RunResult:
    """Trains on TRL to the end and returns the result, like the native `train`.

    Args:
        config: None with `resume`: the config that the run was started with.
        resume: a run directory to resume, from its last checkpoint.
        sinks: receivers of progress events. None: the console.
        trust: load the code that the config of a resumed run names, even if another user made it.

    Raises:
        ValueError: the config asks for what TRL cannot do; the message names it.
        ImportError: TRL is not installed.
    """
    from turnwise.integrations.trl import require_trl

    require_trl("backend trl")
    if config is None:
        if resume is None:
            raise ValueError("train needs a config, or a run directory to resume")
        config = RunReader(resume).config
        refuse_foreign_code(config, stored=resume / "config.yaml", trust=trust)
    if config.backend != "trl":
        raise ValueError(f"this trains on TRL, and the config asks for backend {config.backend!r}")
    refuse(config)
    setting = choose_setting(config)
    listeners = Sinks([*([ConsoleSink()] if sinks is None else sinks), *make_trackers(config.log)])
    name = f"{config.env.name.rpartition(':')[2]}-trl-{config.algo.name}-s{config.seed}"
    run = (
        RunDirectory.create(config.log, config, default_name=name)
        if resume is None
        else RunDirectory.open(resume)
    )
    with run:
        result = _TRLRun(setting, run, listeners).fit(resumed=resume is not None)
    if config.log.report:
        write_report(result.path)
    return result


class _TRLRun:
    """One run: the trainer, its evaluations and its events."""

    def __init__(self, setting: Setting, run: RunDirectory, sinks: Sinks) -> None:
        self._started = time.perf_counter()
        self._setting = setting
        self._config = setting.config
        self._run = run
        self._sinks = sinks
        self._evaluations: list[Evaluated] = []
        self._stopped: str | None = None

    def fit(self, *, resumed: bool) -> RunResult:
        config = self._config
        for notice in self._setting.notices:
            self._note(notice)
        trainer = self._build(resumed=resumed)
        self._trainer = trainer
        checkpoint = get_last_checkpoint(str(self._run.checkpoints)) if resumed else None
        facts = {
            "model": config.model.path or "embedded",
            "backend": "trl",
            "algorithm": config.algo.name,
        }
        self._sinks.handle(RunStarted(path=self._run.path, config=config, facts=facts))
        interrupted = False
        try:
            if config.eval.before and checkpoint is None:
                self._evaluate("before")
            device = trainer.accelerator.device.type
            with _asked_to_stop() as stop, determinism(config.train.deterministic, device):
                ends = _EndAtStandstill(config)
                trainer.add_callback(ends)
                trainer.add_callback(_Evaluate(self._evaluate, config))
                trainer.add_callback(_SaveAndStop(stop, updates=updates_per_step(config)))
                trainer.train(resume_from_checkpoint=checkpoint)
            if stop.reason is not None and trainer.state.global_step < trainer.state.max_steps:
                self._stopped = stop.reason
                interrupted = True
            elif config.eval.after:
                self._evaluate("after")
            if ends.still.why is not None:
                raise TrainingError(ends.still.why)
            if ends.still.solved:
                self._note(Notice(kind="solved", message=ends.still.solved_note(), level="info"))
            return self._result()
        except KeyboardInterrupt:
            interrupted = True
            raise
        finally:
            seconds = time.perf_counter() - self._started
            before, after = self._labelled("before"), self._labelled("after")
            self._sinks.handle(
                RunEnded(
                    path=self._run.path,
                    seconds=seconds,
                    before=before,
                    after=after,
                    interrupted=interrupted,
                )
            )
            trainer.close()
            self._sinks.close()

    def _build(self, *, resumed: bool) -> Any:
        from accelerate import PartialState

        from turnwise.integrations.trl.config import VerifiersGRPOConfig, resolved
        from turnwise.integrations.trl.trainer import VerifiersGRPOTrainer

        config, run = self._config, self._run
        algorithm = replace(refuse(config), singleton="zero")
        initial = run.path / "initial_model"
        if resumed and config.model.path is None and initial.is_dir():
            model, tokenizer = (
                load_model(config.model, path=check_files(initial)),
                load_stored_tokenizer(initial),
            )
        else:
            model, tokenizer, metrics = first_policy(config, initial=initial, say=self._say)
            if metrics:
                run.write_metrics(0, metrics)
        if config.model.path is not None:
            tokenizer = load_tokenizer(config.model)
        # TRL loads the reference model by this name.
        cast(Any, model).config._name_or_path = config.model.path or str(initial)
        settings = trl_arguments(config, algorithm, processes=PartialState().num_processes)
        args = VerifiersGRPOConfig(str(run.checkpoints), **settings)
        lora = {}
        if config.model.lora.rank:
            lora["peft_config"] = _lora(config)
        trainer = VerifiersGRPOTrainer(
            model,
            self._source(),
            args,
            multi_turn=True,
            algorithm=algorithm,
            config=config,
            run=run,
            processing_class=tokenizer,
            callbacks=[_Progress(self._sinks)],
            **lora,
        )
        if algorithm.reduction == "token_sum_norm":
            # TRL divides by max_completion_length where turnwise divides by a constant; the loss is
            # linear in this.
            trainer.advantage_scale = resolved(args.max_completion_length) / algorithm.norm_tokens
        return trainer

    def _source(self) -> EnvSource:
        config = self._config
        factories = self._setting.factories
        tag = config.env.name
        factory: Callable[[], Any] = (
            factories[tag] if tag in factories else lambda: make_env(config.env)
        )
        groups = config.rollout.train.env_groups
        return EnvSource(
            name=tag,
            factory=factory,
            config=config.env,
            by_name=tag not in factories,
            rows={"train": None, "val": None},
            seed=config.seed,
            num_tasks=groups * config.train.steps,
            groups=groups,
        )

    def _evaluate(self, label: Any) -> None:
        """Plays the held-out tasks on the first process, as the native trainer does."""
        trainer = self._trainer
        if trainer.accelerator.is_main_process:
            tokenizer = trainer._text_tokenizer()
            rollout = self._config.rollout
            generator = HFGenerator(
                base_model(trainer), tokenizer, slots=rollout.slots, max_context=rollout.max_context
            )
            step = trainer.state.global_step
            player = PolicyPlayer(generator=generator, tokenizer=tokenizer)
            result = evaluate(self._config, player, step=step, factories=self._setting.factories)
            event = result.event(step, label)
            self._evaluations.append(event)
            self._run.write_metrics(step, result.metrics())
            self._run.write_episodes(step, result.episodes, split="eval")
            self._sinks.handle(event)
        trainer.accelerator.wait_for_everyone()

    def _result(self) -> RunResult:
        folder = self._run.checkpoints / "final"
        self._trainer.save_model(str(folder / "model"))
        self._trainer._text_tokenizer().save_pretrained(str(folder / "model"))
        per_step = self._config.train.mini_batches * self._config.train.epochs
        result = RunResult(
            path=self._run.path,
            steps=self._trainer.state.global_step // per_step,
            before=self._labelled("before"),
            after=self._labelled("after"),
            seconds=time.perf_counter() - self._started,
            checkpoint=folder,
            stopped=self._stopped,
        )
        self._run.write_summary(
            summary_json(
                result.before,
                result.after,
                steps=result.steps,
                seconds=round(result.seconds, 3),
                checkpoint=str(folder.relative_to(result.path)),
            )
        )
        tokenizer = self._trainer._text_tokenizer()
        self._run.write_pieces(lambda token: tokenizer.decode([token]))
        return result

    def _labelled(self, label: str) -> Evaluated | None:
        return next((event for event in self._evaluations if event.label == label), None)

    def _say(self, message: str) -> None:
        self._note(Notice(kind="embedded", message=message, level="info"))

    def _note(self, notice: Notice) -> None:
        self._run.write_event(notice.kind, notice.message, step=notice.step)
        self._sinks.handle(notice)


class _Progress(TrainerCallback):
    """Tells the sinks about every step that TRL logs."""

    def __init__(self, sinks: Sinks) -> None:
        self._sinks = sinks

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            numbers = {
                name: float(value) for name, value in logs.items() if isinstance(value, int | float)
            }
            self._sinks.handle(StepDone(step=state.global_step, metrics=numbers))


class _EndAtStandstill(TrainerCallback):
    """Ends a run that learns nothing after its step, with a checkpoint."""

    def __init__(self, config: Config) -> None:
        self.still = Standstill(config.train)
        self._updates = updates_per_step(config)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        largest = (logs or {}).get("credit/advantage/abs_max")
        if largest is not None:  # with the first update of a rollout
            done = (state.global_step - 1) // self._updates + 1
            last = done * self._updates >= state.max_steps
            self.still.count(done, logs, updated=largest > 0.0, last=last)
        self._end(state, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._end(state, control)

    def _end(self, state: Any, control: Any) -> None:
        over = self.still.solved or self.still.why is not None
        if over and state.global_step % self._updates == 0:
            control.should_save = control.should_training_stop = True


class _Evaluate(TrainerCallback):
    """Evaluates every `eval.every` steps."""

    def __init__(self, evaluate: Callable[[str], None], config: Config) -> None:
        self._evaluate = evaluate
        self._updates = updates_per_step(config) * config.eval.every

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        done = state.global_step
        if self._updates and done % self._updates == 0 and done < state.max_steps:
            self._evaluate("during")


class _SaveAndStop(TrainerCallback):
    """Ends a run that was asked to stop after its step, with a checkpoint. What TRL calls a step is
    an update; between those of one rollout, the rollout would be lost."""

    def __init__(self, stop: StopRequest, *, updates: int) -> None:
        self._stop, self._updates = stop, updates

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._stop.reason is not None and state.global_step % self._updates == 0:
            control.should_save = control.should_training_stop = True


def _asked_to_stop() -> StopRequest:
    """Listens to signals where one process trains: of several, each would have to end after the
    same step."""
    from accelerate import PartialState

    return StopRequest(heard=say_stopping, listen=PartialState().num_processes == 1)


def _lora(config: Config) -> Any:
    from peft import LoraConfig

    lora = config.model.lora
    modules = (
        lora.target_modules if isinstance(lora.target_modules, str) else list(lora.target_modules)
    )
    return LoraConfig(
        r=lora.rank,
        lora_alpha=cast(Any, lora.alpha),
        lora_dropout=lora.dropout,
        target_modules=modules,
    )
