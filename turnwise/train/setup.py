"""What a run trains on: environments over many turns, one turn, or plain prompts from a file."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from turnwise.config.schema import Config, EnvConfig, GroupsConfig
from turnwise.envs.base import EnvFactory
from turnwise.envs.prompts import TAG, prompt_factory
from turnwise.envs.registry import make_env
from turnwise.log.events import Notice
from turnwise.rollout.plan import env_configs

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """The config that is really run, where its environments come from, and what somebody should know about it."""

    config: Config
    factories: Mapping[str, EnvFactory]
    notices: tuple[Notice, ...] = ()


def choose_setting(config: Config) -> Setting:
    """Environments where they can be loaded; plain prompts where the config says so, or where nothing else is left.

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
        return Setting(config=config.model_copy(update={"train": train}), factories={}, notices=(notice,))
    return Setting(config=config, factories={})


def _turn_limits(config: Config) -> dict[str, int | None]:
    limits: dict[str, int | None] = {}
    for groups in (config.rollout.train, config.rollout.val):
        for tag, env_config in env_configs(config, groups).items():
            env = make_env(env_config)
            limits[tag] = env.max_turns
            env.close()
    return limits


def _fall_back(config: Config, error: Exception) -> Setting:
    name = config.env.name
    if not config.train.multi_turn or config.data.prompts is None:
        raise ValueError(
            f"environment {name!r} cannot be loaded ({type(error).__name__}: {error}), and data.prompts names "
            "no prompts to train on instead; fix env.name (see `turnwise envs`), or give data.prompts and data.reward"
        ) from error
    setting = _on_prompts(config)
    notice = Notice(
        kind="single_turn_fallback",
        message=(
            f"MULTI-TURN TRAINING IS OFF: environment {name!r} cannot be loaded ({type(error).__name__}: {error}). "
            f"This run trains SINGLE-TURN on the prompts of {config.data.prompts} instead."
        ),
    )
    logger.warning(notice.message)
    return Setting(config=setting.config, factories=setting.factories, notices=(notice, *setting.notices))


def _on_prompts(config: Config) -> Setting:
    """The config with every group playing prompts, one turn each."""

    def groups(old: GroupsConfig) -> GroupsConfig:
        return old.model_copy(update={"tags": (), "n_groups": ()})

    rollout = config.rollout.model_copy(
        update={"train": groups(config.rollout.train), "val": groups(config.rollout.val), "isolation": "inline"}
    )
    changed = config.model_copy(
        update={
            "env": EnvConfig(name=TAG, single_turn=True),
            "envs": {},
            "rollout": rollout,
            "train": config.train.model_copy(update={"multi_turn": False}),
        }
    )
    return Setting(config=changed, factories={TAG: prompt_factory(config)})
