"""The tasks of a run: environments over many turns, one turn, or plain prompts from a file."""

import logging
from collections.abc import Mapping
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass

from turnwise.config.load import list_recipes
from turnwise.config.schema import Config, EnvConfig, GroupsConfig, ShapingConfig
from turnwise.envs.base import EnvError, EnvFactory, EnvTimeoutError
from turnwise.envs.gate import close_quietly, raised_at
from turnwise.envs.prompts import TAG, prompt_factory, read_prompts
from turnwise.envs.registry import list_envs, make_env
from turnwise.log.events import Notice
from turnwise.procs.progress import Progress
from turnwise.procs.threads import DaemonThreads
from turnwise.rollout.plan import env_configs

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """The effective config, the source of its environments, and notices for the user."""

    config: Config
    factories: Mapping[str, EnvFactory]
    notices: tuple[Notice, ...] = ()


def choose_setting(config: Config) -> Setting:
    """Environments where they can be loaded; plain prompts where the config says so, or where
    nothing else is left.

    Raises:
        ValueError: the environment cannot be loaded and there are no prompts to fall back to.
    """
    if not config.train.multi_turn and config.data.prompts is not None:
        return _on_prompts(config)
    try:
        limits = _turn_limits(config)
    except Exception as error:  # whatever an environment's import or constructor raises
        return _fall_back(config, error)
    single = sorted(tag for tag, limit in limits.items() if limit == 1)
    if config.train.multi_turn and len(single) == len(limits):
        notice = Notice(
            kind="single_turn",
            message=f"{', '.join(single)}: a single-turn environment; training is single-turn",
            level="info",
        )
        train = config.train.model_copy(update={"multi_turn": False})
        return Setting(
            config=config.model_copy(update={"train": train}), factories={}, notices=(notice,)
        )
    return Setting(config=config, factories={})


def _turn_limits(config: Config) -> dict[str, int | None]:
    limits: dict[str, int | None] = {}
    for groups in (config.rollout.train, config.rollout.val):
        for tag, env_config in env_configs(config, groups).items():
            limits[tag] = _limit_of(env_config, seconds=config.rollout.reset_timeout)
    return limits


def _limit_of(config: EnvConfig, *, seconds: float) -> int | None:
    """The environment's own limit on turns. One whose constructor hangs is told, in time."""

    def ask() -> int | None:
        env = make_env(config)
        try:
            return env.max_turns
        finally:
            close_quietly(env)

    threads = DaemonThreads(1, "turnwise-setup")
    try:
        with Progress(f"making environment {config.name}"):
            return threads.submit(ask).result(seconds)
    except FutureTimeout:
        raise EnvTimeoutError(
            f"making it took longer than {seconds:g} s (rollout.reset_timeout)"
        ) from None
    finally:
        threads.shutdown()


def _fall_back(config: Config, error: Exception) -> Setting:
    name = config.env.name
    if not config.train.multi_turn or config.data.prompts is None:
        own = isinstance(error, ValueError | EnvError)  # which say what to do
        said = str(error) if own else raised_at(error)
        if name in list_recipes() and name not in {spec.name for spec in list_envs()}:
            said = f"it is a recipe: give it as the config, in Python config={name!r}"
        raise ValueError(f"environment {name!r} cannot be loaded: {said}") from error
    setting = _on_prompts(config)
    notice = Notice(
        kind="single_turn_fallback",
        message=(
            f"MULTI-TURN TRAINING IS OFF: environment {name!r} cannot be loaded "
            f"({raised_at(error)}). "
            f"This run trains SINGLE-TURN on the prompts of {config.data.prompts} instead."
        ),
    )
    logger.warning(notice.message)
    return Setting(
        config=setting.config, factories=setting.factories, notices=(notice, *setting.notices)
    )


def _on_prompts(config: Config) -> Setting:
    """The config with every group playing prompts, one turn each."""

    def groups(old: GroupsConfig) -> GroupsConfig:
        return old.model_copy(update={"tags": (), "n_groups": ()})

    rollout = config.rollout.model_copy(
        update={
            "train": groups(config.rollout.train),
            "val": groups(config.rollout.val),
            "isolation": "inline",
        }
    )
    rows = read_prompts(config.data, seed=config.seed)
    train = config.train.model_copy(update={"multi_turn": False})
    if config.data.epochs is not None:
        seen = config.data.epochs * len(rows["train"])
        train = train.model_copy(update={"steps": max(seen // rollout.train.env_groups, 1)})
    long = config.env.shaping
    shaping = ShapingConfig(
        overlong_tokens=long.overlong_tokens, overlong_penalty=long.overlong_penalty
    )
    changed = config.model_copy(
        update={
            "env": EnvConfig(name=TAG, single_turn=True, shaping=shaping),
            "envs": {},
            "rollout": rollout,
            "train": train,
        }
    )
    return Setting(config=changed, factories={TAG: prompt_factory(config, rows)})
