"""VerifiersGRPOTrainer: TRL's GRPOTrainer with an environment in place of a data set and reward functions."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trl import GRPOTrainer

from turnwise.algos.algorithm import Algorithm
from turnwise.algos.table import build_algorithm
from turnwise.config.schema import AlgoConfig, Config
from turnwise.integrations.trl import detect
from turnwise.integrations.trl.config import VerifiersGRPOConfig, with_our_fields
from turnwise.integrations.trl.mixin import SPLIT, MultiTurnMixin
from turnwise.integrations.trl.rewards import EnvironmentRewardAdapter, environment_reward
from turnwise.integrations.trl.setup import refuse_unsupported, run_config
from turnwise.integrations.trl.sources import ROW, EnvSource, make_source
from turnwise.integrations.trl.store import RunStore
from turnwise.log.store import RunDirectory


class VerifiersGRPOTrainer(MultiTurnMixin, GRPOTrainer):
    """GRPO on TRL with any environment that turnwise can play.

    Single-turn environments go down TRL's own path: their rubric becomes a reward function. All others are played by
    turnwise. Which of the two it is, is found out from the environment (`multi_turn` decides otherwise).

    Args:
        model: what GRPOTrainer takes: a name, a path, or a model.
        env: a turnwise environment or its registered name, an environment of verifiers up to 0.3.1, a taskset of
            verifiers 0.4, or a class in the style of TRL's `environment_factory`.
        args: a VerifiersGRPOConfig; a plain GRPOConfig will do.
        multi_turn: overrules what was found out.
        algorithm: an Algorithm for `args.credit`; None: the preset of that name.
        config: a turnwise Config whose env, rollout and train sections describe the episodes. None: from `args`.
        run: a run directory to write into. None: `<output_dir>/run`.
        trl_kwargs: all else that GRPOTrainer takes. `reward_funcs` come on top of the environment's reward,
            `train_dataset` and `eval_dataset` replace the environment's rows.
    """

    def __init__(
        self,
        model: Any,
        env: Any,
        args: Any = None,
        *,
        multi_turn: bool | None = None,
        algorithm: Algorithm | None = None,
        config: Config | None = None,
        run: RunDirectory | None = None,
        **trl_kwargs: Any,
    ) -> None:
        for name in ("tools", "environment_factory", "rollout_func"):
            if trl_kwargs.get(name):
                raise ValueError(f"{name} and env are two answers to one question; put the tools into the environment")
        if args is None:
            name = model if isinstance(model, str) else getattr(getattr(model, "config", None), "_name_or_path", "")
            args = VerifiersGRPOConfig(f"{Path(name).name or 'model'}-GRPO")
        args = with_our_fields(args)
        source = make_source(env, seed=args.seed, num_tasks=args.num_tasks, config=config.env if config else None)
        several = self._decide(env, args, multi_turn)
        for split, key in (("train", "train_dataset"), ("val", "eval_dataset")):
            given = trl_kwargs.pop(key, None)
            if given is not None:
                source.use_rows(split, given)
        if several:
            refuse_unsupported(args)
        elif args.credit != "group_relative":
            raise ValueError(f"credit {args.credit!r} is about turns, and this run is single-turn; remove it")
        self.episode_config = run_config(source, args, config)
        folder = Path(args.output_dir) if args.store_episodes and several else None
        store = RunStore(folder, self.episode_config, run=run) if several else None
        if algorithm is None and args.credit not in ("group_relative", "turn_level"):
            algorithm = _preset(args)
        self.init_multi_turn(
            source, args, multi_turn=several, algorithm=algorithm, config=self.episode_config, store=store
        )
        rewards = trl_kwargs.pop("reward_funcs", None)
        more = [] if rewards is None else list(rewards) if isinstance(rewards, Sequence) else [rewards]
        callbacks = [*(trl_kwargs.pop("callbacks", None) or ()), *([store] if store is not None else [])]
        wants_eval = args.eval_strategy != "no" and source.length("val") > 0
        super().__init__(
            model,
            [environment_reward if several else EnvironmentRewardAdapter(source), *more],
            args=args,
            train_dataset=_dataset(source, "train", several),
            eval_dataset=_dataset(source, "val", several) if wants_eval else None,
            callbacks=callbacks,
            **({"rollout_func": self.play_rows} if several else {}),
            **trl_kwargs,
        )

    def _decide(self, env: Any, args: VerifiersGRPOConfig, multi_turn: bool | None) -> bool:
        for flag, where in ((multi_turn, "the argument multi_turn"), (args.multi_turn, "the config's multi_turn")):
            if flag is not None:
                detect.log_verdict(env, detect.Verdict(multi_turn=flag, reason=f"{where} says so"))
                return flag
        return self.is_multi_turn_environment(env)

    def close(self) -> None:
        """Closes the environments. A trainer may be closed twice."""
        if self._player is not None:
            self._player.close()
            self._player = None


def _preset(args: VerifiersGRPOConfig) -> Algorithm:
    settings: dict[str, Any] = {"name": args.credit, "singleton": "zero"}
    if args.credit == "gigpo":
        settings["high_level_gamma"] = args.turn_discount
    return build_algorithm(AlgoConfig(**settings))


def _dataset(source: EnvSource, split: str, several: bool) -> Any:
    """The data set that TRL walks through: the number of each task, its prompt, and for single turns its columns."""
    from datasets import Dataset

    numbers = range(source.length(split))
    rows = [{ROW: number, SPLIT: split} for number in numbers]
    if several:
        for row in rows:
            row["prompt"] = source.placeholder(split, row[ROW])
        return Dataset.from_list(rows)
    for row, opening in zip(rows, source.openings(split), strict=True):
        row["prompt"] = [message.to_json() for message in opening.messages]
    columns = [source.columns(split, number) for number in numbers]
    try:
        return Dataset.from_list([{**column, **row} for column, row in zip(columns, rows, strict=True)])
    except Exception:  # columns whose rows differ in type do not fit into an Arrow table; the environment has them
        return Dataset.from_list(rows)
