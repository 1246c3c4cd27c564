# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
"""VerifiersGRPOTrainer: TRL's GRPOTrainer with an environment in place of a data set and reward
functions."""

import warnings
from collections.abc import Mapping, Sized
from pathlib import Path
from typing import Any

import trl
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from turnwise.algos.algorithm import Algorithm
from turnwise.algos.table import build_algorithm
from turnwise.config.schema import AlgoConfig, Config
from turnwise.integrations.trl import detect
from turnwise.integrations.trl.config import VerifiersGRPOConfig, with_our_fields
from turnwise.integrations.trl.datasets import dataset, eval_datasets
from turnwise.integrations.trl.factory_env import WHICH
from turnwise.integrations.trl.mixin import MultiTurnMixin
from turnwise.integrations.trl.releases import check_release
from turnwise.integrations.trl.rewards import (
    EnvironmentRewardAdapter,
    environment_reward,
    lacks_reward,
    with_environment,
)
from turnwise.integrations.trl.setup import episodes_config, refuse_unsupported
from turnwise.integrations.trl.sources import EnvSource, Stream, make_source
from turnwise.integrations.trl.store import RunStore
from turnwise.log.store import RunDirectory

check_release(GRPOTrainer, GRPOConfig, trl.__version__)


class VerifiersGRPOTrainer(MultiTurnMixin, GRPOTrainer):
    """GRPO on TRL with any environment that turnwise can play.

    Single-turn environments use TRL's own rollout, with their rubric as a reward function. All
    others are played by turnwise. The kind is detected from the environment unless `multi_turn` is
    given. Without an environment this is TRL's GRPOTrainer.

    Args:
        model: what GRPOTrainer takes: a name, a path, or a model.
        env: a turnwise environment or its registered name, an environment of verifiers up to 0.3.1,
            a taskset of verifiers 0.4, a class in the style of TRL's `environment_factory`, or a
            dict of such classes by name.
        args: a VerifiersGRPOConfig; a plain GRPOConfig will do.
        multi_turn: overrules what was found out.
        algorithm: an Algorithm for `args.credit`; None: the preset of that name.
        config: a turnwise Config whose env, rollout and train sections describe the episodes. None:
            from `args`.
        run: a run directory to write into. None: `<output_dir>/run`.
        trl_kwargs: all else that GRPOTrainer takes. `reward_funcs` come on top of the environment's
            reward, `train_dataset` and `eval_dataset` replace the environment's rows.
    """

    def __init__(
        self,
        model: Any,
        env: Any = None,
        args: Any = None,
        *,
        multi_turn: bool | None = None,
        algorithm: Algorithm | None = None,
        config: Config | None = None,
        run: RunDirectory | None = None,
        **trl_kwargs: Any,
    ) -> None:
        args = _default_args(model) if args is None else args
        if env is None:
            ours = {"multi_turn": multi_turn, "algorithm": algorithm, "config": config, "run": run}
            _refuse_without_env(args, ours)
            _need_prompts(trl_kwargs)
            super().__init__(model, args=args, **trl_kwargs)
            self._need_chat_template()
            return
        for name in ("tools", "environment_factory", "rollout_func"):
            if trl_kwargs.get(name):
                raise ValueError(
                    f"{name} and env are two answers to one question; put the tools into the "
                    "environment"
                )
        args = with_our_fields(args)
        source = make_source(
            env, seed=args.seed, num_tasks=args.num_tasks, config=config.env if config else None
        )
        source.timeout = args.env_timeout
        several = self._decide(env, args, multi_turn)
        if several and source.texts:
            raise ValueError(
                f"{source.name}'s prompts are texts to continue, which TRL's own rollout plays; "
                "leave out multi_turn"
            )
        self._use_train_rows(source, args, trl_kwargs.pop("train_dataset", None))
        if several:
            refuse_unsupported(args)
        elif args.credit != "group_relative":
            raise ValueError(
                f"credit {args.credit!r} is about turns, and this run is single-turn; remove it"
            )
        self.episode_config = episodes_config(source, args, config)
        folder = Path(args.output_dir) if args.store_episodes and several else None
        store = RunStore(folder, self.episode_config, run=run) if several else None
        if algorithm is None and args.credit not in ("group_relative", "turn_level"):
            algorithm = _preset(args)
        self.init_multi_turn(
            source,
            args,
            multi_turn=several,
            algorithm=algorithm,
            config=self.episode_config,
            store=store,
        )
        super().__init__(
            model,
            args=args,
            train_dataset=dataset(source, "train", several),
            eval_dataset=self._eval_rows(trl_kwargs.pop("eval_dataset", None), args),
            callbacks=[
                *(trl_kwargs.pop("callbacks", None) or ()),
                *([store] if store is not None else []),
            ],
            **self._rewards(args, trl_kwargs),
            **({"rollout_func": self.play_rows} if several else {}),
            **trl_kwargs,
        )
        self._need_chat_template()

    def evaluate(self, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> dict[str, float]:
        """The metrics of an evaluation: on the data sets given here, else on the constructor's,
        else on the environment's held-out tasks."""
        if self.has_env and eval_dataset is None and self.eval_dataset is None:
            self.eval_dataset = self._own_eval_rows()
        elif self.has_env and eval_dataset is not None and not isinstance(eval_dataset, str):
            eval_dataset = eval_datasets(self.source, eval_dataset, self.multi_turn)
        chosen: Any = eval_dataset
        return super().evaluate(chosen, *args, **kwargs)

    def _use_train_rows(self, source: EnvSource, args: VerifiersGRPOConfig, given: Any) -> None:
        if given is not None:
            source.use_rows("train", given, name="train_dataset")
        elif isinstance(source.original, Mapping):
            raise ValueError(
                f"an env of several classes needs a train_dataset whose column {WHICH!r} says "
                "which of them plays a row"
            )
        if isinstance(source.rows["train"], Stream) and args.enable_async_generation:
            raise ValueError(
                "enable_async_generation needs to know the next rows, which an iterable "
                "train_dataset does not tell; load it without streaming, or leave it off"
            )

    def _eval_rows(self, given: Any, args: VerifiersGRPOConfig) -> Any:
        if given is not None:
            return eval_datasets(self.source, given, self.multi_turn)
        return self._own_eval_rows() if args.eval_strategy != "no" else None

    def _own_eval_rows(self) -> Any:
        if self.source.length("val") == 0:
            return None
        return dataset(self.source, "val", self.multi_turn)

    def _rewards(self, args: VerifiersGRPOConfig, trl_kwargs: dict[str, Any]) -> dict[str, Any]:
        """GRPOTrainer's arguments about rewards, the environment's own first."""
        given = trl_kwargs.pop("reward_funcs", None)
        reason = lacks_reward(self.source.original)
        if reason is not None and not given:
            warnings.warn(
                f"{reason} and there are no reward_funcs: every reward is 0 and nothing is learned",
                stacklevel=3,
            )
        own = environment_reward if self.multi_turn else EnvironmentRewardAdapter(self.source)
        functions, classes = with_environment(
            own, given, trl_kwargs.pop("reward_processing_classes", None), args.reward_weights
        )
        return {"reward_funcs": functions, "reward_processing_classes": classes}

    def _need_chat_template(self) -> None:
        """Raises ValueError where messages are to be rendered by a tokenizer that cannot."""
        conversational = self.has_env and not self.source.texts
        rows = self.train_dataset
        if not self.has_env and isinstance(rows, Sized) and len(rows) > 0:
            conversational = isinstance(rows[0].get("prompt"), list)
        template = getattr(self.processing_class, "chat_template", None)
        if conversational and not (template or self._text_tokenizer().chat_template):
            raise ValueError(
                "the prompts are conversations and the tokenizer has no chat template; set "
                "processing_class.chat_template, or take the tokenizer of an instruct model"
            )

    def _decide(self, env: Any, args: VerifiersGRPOConfig, multi_turn: bool | None) -> bool:
        for flag, where in (
            (multi_turn, "the argument multi_turn"),
            (args.multi_turn, "the config's multi_turn"),
        ):
            if flag is not None:
                detect.log_verdict(env, detect.Verdict(multi_turn=flag, reason=f"{where} says so"))
                return flag
        return self.is_multi_turn_environment(env)

    def close(self) -> None:
        """Closes the environments. A trainer may be closed twice."""
        if self._player is not None:
            self._player.close()
            self._player = None
        if self.has_env and self.source.close is not None:
            self.source.close()


def _preset(args: VerifiersGRPOConfig) -> Algorithm:
    settings: dict[str, Any] = {"name": args.credit, "singleton": "zero"}
    if args.credit in ("gigpo", "hgpo"):
        settings["high_level_gamma"] = args.turn_discount
    return build_algorithm(AlgoConfig(**settings))


def _default_args(model: Any) -> VerifiersGRPOConfig:
    config = getattr(model, "config", None)
    name = model if isinstance(model, str) else getattr(config, "_name_or_path", "")
    return VerifiersGRPOConfig(f"{Path(name).name or 'model'}-GRPO")


def _refuse_without_env(args: Any, given: dict[str, Any]) -> None:
    """Raises ValueError for a setting of multi-turn training where there is no environment."""
    wrong = [name for name, value in given.items() if value is not None]
    if isinstance(args, VerifiersGRPOConfig):
        wrong += [name for name in ("multi_turn", "enable_async_generation") if getattr(args, name)]
        wrong += ["credit"] if args.credit != "group_relative" else []
    if wrong:
        raise ValueError(f"{', '.join(wrong)}: for an environment only; give env, or remove it")


def _need_prompts(trl_kwargs: dict[str, Any]) -> None:
    """Raises ValueError where TRL would stop at the first step for want of a prompt."""
    if trl_kwargs.get("environment_factory"):
        return
    names = getattr(trl_kwargs.get("train_dataset"), "column_names", None)
    if isinstance(names, list) and names and "prompt" not in names:
        raise ValueError(
            f"train_dataset has no column 'prompt'; its columns are {', '.join(names)}"
        )
