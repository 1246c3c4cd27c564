"""A whole config of verl's with the keys `agent` and `env_template` beside it, read as ours: what
verl's keys say is translated, what they leave at verl's defaults too, and what cannot be honoured
is refused by name."""

from collections.abc import Mapping
from typing import Any, cast

from turnwise.config.dialects.keys import ESTIMATORS, PASSED_ON, RULES
from turnwise.config.load import load_config
from turnwise.config.schema import WITH_CRITIC, Config
from turnwise.config.tree import set_path
from turnwise.integrations.verl.config.keys import flat, schema, sections
from turnwise.integrations.verl.config.placement import Placement

_MINI_BATCHES = ("actor_rollout_ref.actor.ppo_mini_batch_size", "critic.ppo_mini_batch_size")
_CLIP = "actor_rollout_ref.actor.clip_ratio"
_HELD_OUT = "actor_rollout_ref.rollout.val_kwargs"
_PLACED = ("trainer.nnodes", "trainer.n_gpus_per_node", "trainer.device")
_ONLY_IF_CHANGED = frozenset(
    f"trainer.{key}" for key in ("logger", "project_name", "experiment_name", "default_local_dir")
)
"""Shared keys; verl's default values for them are ignored."""


def read_whole(config: Any) -> tuple[Config, Placement]:
    """(our config, where it runs).

    Raises:
        ValueError: mini-batches that are no whole share of a step.
        ConfigError: keys that contradict each other, or that neither project knows.
    """
    from omegaconf import OmegaConf

    given = _flat_config(config)
    given = {key: value for key, value in given.items() if _counts(key, given)}
    changed = _changed(config, given)
    silent = _ONLY_IF_CHANGED | _replaced(given)
    known = RULES.keys() - PASSED_ON - silent
    keys = {
        key: value
        for key, value in given.items()
        if key in known and value is not None and value != -1
    } | changed
    placement = Placement(
        **{
            name: OmegaConf.select(config, key)
            for name, key in zip(("nodes", "gpus", "device"), _PLACED, strict=True)
        }
    )
    groups = int(given["data.train_batch_size"])
    keys["train.mini_batches"] = _mini_batches(given, groups)
    keys["train.device"] = placement.device
    lengths = [given[f"data.max_{part}_length"] for part in ("prompt", "response")]
    keys["rollout.max_context"] = given["actor_rollout_ref.rollout.max_model_len"] or sum(lengths)
    tree: dict[str, Any] = {}
    for key, value in keys.items():
        if key not in (*_PLACED, *_MINI_BATCHES, "actor_rollout_ref.rollout.max_model_len"):
            set_path(tree, key, value)
    return load_config(tree, ["backend=verl"]), placement


def _counts(key: str, given: Mapping[str, Any]) -> bool:
    """Whether verl would read the key: it has two kinds of KL and two counts of steps."""
    if key == "trainer.total_epochs":
        return given["trainer.total_training_steps"] is None
    if key == "algorithm.kl_penalty" or key.startswith("algorithm.kl_ctrl."):
        return bool(given["algorithm.use_kl_in_reward"])
    if key in ("actor_rollout_ref.actor.kl_loss_coef", "actor_rollout_ref.actor.kl_loss_type"):
        return bool(given["actor_rollout_ref.actor.use_kl_loss"])
    if key == f"{_HELD_OUT}.do_sample":  # says what the temperature says
        return bool(given[key]) != (given[f"{_HELD_OUT}.temperature"] > 0)
    return True


def _replaced(given: Mapping[str, Any]) -> set[str]:
    """Keys whose default counts for nothing beside the others."""
    found: set[str] = set()
    if None not in (given[f"{_CLIP}_low"], given[f"{_CLIP}_high"]):
        found.add(_CLIP)
    if ESTIMATORS.get(given["algorithm.adv_estimator"]) not in WITH_CRITIC:
        found.add("critic.cliprange_value")
    return found


def _mini_batches(given: Mapping[str, Any], groups: int) -> int:
    sizes = {key: int(given[key]) for key in _MINI_BATCHES}
    for key, size in sizes.items():
        if size != sizes[_MINI_BATCHES[0]] or groups % size:
            raise ValueError(
                f"{key} = {size}: actor and critic train on mini-batches of one size, which "
                f"divides data.train_batch_size = {groups}; make it so"
            )
    return groups // sizes[_MINI_BATCHES[0]]


def _flat_config(config: Any) -> dict[str, Any]:
    from omegaconf import OmegaConf

    found = flat(cast(Any, OmegaConf.to_container(config, resolve=True)))
    return {key: value for key, value in found.items() if value != "???"}


def _changed(config: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the given keys that differ from verl's defaults, or from what the defaults refer
    to."""
    defaults = flat(schema())
    resolved: dict[str, Any] = {}
    found: dict[str, Any] = {}
    for key, value in given.items():
        name = next((name for name in (key, *sections(key)) if name in defaults), None)
        if name is not None and name not in resolved:
            resolved[name] = _resolved(config, name, defaults[name])
        default: Any = None if name is None else resolved[name]
        if name != key and isinstance(default, Mapping):  # a section that refers to another one
            default = flat(cast(Any, default)).get(key.removeprefix(f"{name}."), "???")
            is_changed = default != value
        else:
            is_changed = name != key or default != value
        if is_changed:
            found[key] = value
    return found


def _resolved(config: Any, name: str, default: Any) -> Any:
    """The default of a key, as plain data: what it refers to is taken from the config."""
    from omegaconf import OmegaConf

    if isinstance(default, str) and "${" in default:
        probe = config.copy()
        OmegaConf.set_struct(probe, False)
        OmegaConf.update(probe, name, default, merge=False)
        default = OmegaConf.select(probe, name)
    return (
        OmegaConf.to_container(default, resolve=True) if OmegaConf.is_config(default) else default
    )
