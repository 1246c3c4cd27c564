# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false
"""verl's PPO config, composed by Hydra from verl's own files."""

from collections.abc import Mapping, Sequence
from typing import Any


def raw_config(overrides: Sequence[str]) -> Any:
    """verl's whole PPO config with these overrides, references unresolved."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_module
    from hydra.core.global_hydra import GlobalHydra

    GlobalHydra.instance().clear()
    with initialize_config_module(config_module="verl.trainer.config", version_base=None):
        return hydra_compose("ppo_trainer", overrides=list(overrides))


def compose(settings: Mapping[str, Any]) -> Any:
    """verl's whole PPO config with these settings in it, references resolved."""
    from omegaconf import OmegaConf

    config = raw_config(to_overrides(settings))
    OmegaConf.resolve(config)
    return config


def to_overrides(settings: Mapping[str, Any]) -> list[str]:
    """The settings as Hydra takes them on a command line.

    Example:
        >>> to_overrides({"trainer.logger": ["console"], "data.seed": None, "data.shuffle": False})
        ["++trainer.logger=['console']", '++data.seed=null', '++data.shuffle=False']
    """
    return [f"++{key}={_hydra(value)}" for key, value in settings.items()]


def _hydra(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, str):
        return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_hydra, value)) + "]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_hydra(inner)}" for key, inner in value.items()) + "}"
    return str(value)
