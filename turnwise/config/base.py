"""The config that `turnwise train` runs: the given settings over defaults that depend on the model
and the algorithm.

The schema's defaults hold for every config. The defaults here depend on the given settings. They
come before the schema's defaults; a recipe, a file or the command line overrides them.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, cast

from turnwise.config.load import load_config, translate
from turnwise.config.schema import GROUP_RELATIVE, WITH_CRITIC, Config
from turnwise.config.tree import ConfigError, Tree, default_at, get_path, merge

MAIN_JOB = "frozen_lake"
"""The recipe that runs by default."""
SMALL_MODEL = 500_000_000
"""Largest number of parameters for the higher learning rates. A 135M model trained at 3e-5."""
LEAST_CONTEXT = 4096
"""Smallest context in tokens for a given model, unless the model's own limit is lower."""

_HEADS = "model.embedded.num_heads"
_EMBEDDED: Tree = {
    "model": {
        "embedded": {
            "hidden_size": 48,
            "num_layers": 3,
            "num_heads": 3,
            "warmstart_observations": True,
        }
    },
    "env": {
        "format": {"style": "raw", "think": False, "max_actions_per_turn": 1, "reminder": "never"}
    },
    "rollout": {
        "train": {"env_groups": 128, "group_size": 1},
        "max_response_tokens": 16,
        "max_context": 512,
        "slots": 128,
        "eval_temperature": 1.0,
    },
    "train": {
        "epochs": 3,
        "mini_batches": 4,
        "lr": 1e-3,
        "critic_lr": 2e-3,
        "schedule": "linear",
        "warmup_steps": 5,
        "max_grad_norm": 0.5,
    },
}
_EMBEDDED_SFT: Tree = {"sft": {"lr": 3e-3, "batch_tokens": 2048}}


def run_config(
    source: str | Path | Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
    *,
    embedded: bool | None = None,
) -> Config:
    """The config that `turnwise train SOURCE OVERRIDES` runs, and that `turnwise config show`
    prints.

    Without a source, and without a model, prompts or another environment in the overrides, it is
    the recipe frozen_lake. Otherwise the defaults depend on the model: short replies and a high
    learning rate for the embedded model, long replies and a low learning rate for a given one.

    Args:
        embedded: whether the embedded model plays. None: yes, unless model.path is given.

    Raises:
        ConfigError: as `load_config`.

    Example:
        >>> run_config(None, ["env.name=bandit"]).env.format.style
        'raw'
        >>> run_config(None, ["model.path=org/model"]).env.format.style
        'answer'
        >>> run_config(None, ["env.name=bandit", "env.format.think=true"]).env.format.style
        'answer'
    """
    if source is None and _is_main_job(overrides):
        return load_config(MAIN_JOB, overrides, beneath=_main_job)
    return load_config(source, overrides, beneath=lambda tree: _suited(tree, embedded))


def _is_main_job(overrides: Sequence[str]) -> bool:
    tree = translate(MAIN_JOB, overrides).finish()
    given = [get_path(tree, key) for key in ("model.path", "data.prompts", "envs")]
    tags = [get_path(tree, f"rollout.{split}.tags") or () for split in ("train", "val")]
    return not any(given) and {get_path(tree, "env.name"), *chain(*tags)} == {MAIN_JOB}


def _main_job(tree: Tree) -> Tree:
    _check_thoughts(tree)
    return _imitating(tree)


def _check_thoughts(tree: Tree) -> None:
    if get_path(tree, "env.format.think") and get_path(tree, "env.format.style") == "raw":
        raise ConfigError(
            ["env.format.think: the style raw has no thoughts; set env.format.style=answer"]
        )


def _imitating(tree: Tree) -> Tree:
    """Defaults of imitation for the embedded model."""
    return _EMBEDDED_SFT if get_path(tree, "sft.source") else Tree()


def _suited(tree: Tree, embedded: bool | None) -> Tree:
    """Defaults for the tree of given settings."""
    _check_thoughts(tree)
    algorithm = get_path(tree, "algo.name") or default_at("algo.name")
    path = get_path(tree, "model.path")
    prompts = get_path(tree, "data.prompts") is not None
    if path is not None or prompts or embedded is False:
        base = _for_given_model(tree, path)
        if prompts and get_path(tree, "env.name") is None and not get_path(tree, "envs"):
            base = merge(base, {"train": {"multi_turn": False}})
        return base
    base = _EMBEDDED
    if get_path(tree, "model.embedded.hidden_size") is not None:  # 3 heads may not divide it
        base = merge(base, {"model": {"embedded": {"num_heads": default_at(_HEADS)}}})
    if algorithm in GROUP_RELATIVE or ":" in algorithm:  # a user's estimator may compare
        base = merge(base, {"rollout": {"train": {"env_groups": 16, "group_size": 8}}})
    base = merge(base, _imitating(tree))
    if get_path(tree, "env.format.think"):
        thoughtful = {
            "env": {"format": {"style": "answer"}},
            "rollout": {"max_response_tokens": 64},
        }
        base = merge(base, thoughtful)
    if algorithm in WITH_CRITIC:
        base = merge(base, {"algo": {"lam": 0.9, "value_clip": None, "entropy_coef": 0.002}})
        if (get_path(tree, "backend") or default_at("backend")) == "native":
            base = merge(base, {"model": {"critic": "shared"}})
    return base


def _for_given_model(tree: Tree, path: object) -> Tree:
    """Learning rates by model size, a context within the model's limit, reply length by format."""

    def value(key: str) -> Any:
        found = get_path(tree, key)
        return default_at(key) if found is None else found

    lora = bool(value("model.lora.rank"))
    shape: Mapping[str, Any] = _shape(path) if isinstance(path, str) else Tree()
    small = 0 < _parameters(shape) <= SMALL_MODEL
    lr = (1e-4 if small else 2e-5) if lora else (1e-5 if small else 1e-6)
    imitation = (2e-4 if small else 1e-4) if lora else (5e-5 if small else 1e-5)
    thinks = value("env.format.think") and value("env.format.style") == "answer"
    reply = 256 if thinks or get_path(tree, "data.prompts") is not None else 64
    base: Tree = {
        "train": {"lr": lr, "critic_lr": 1e-5},
        "rollout": {"max_response_tokens": reply},
    }
    if get_path(tree, "sft.source"):
        base["sft"] = {"lr": imitation}
    longest = shape.get("max_position_embeddings")
    given = value("rollout.max_response_tokens") if _has_reply(tree) else reply
    turns = value("env.max_turn") or value("train.max_turn")
    if isinstance(longest, int) and isinstance(given, int) and isinstance(turns, int):
        # Half for the replies, half for the environment's messages.
        needed = max(LEAST_CONTEXT, 2 * turns * given)
        base["rollout"]["max_context"] = min(longest, needed)
    return base


def _has_reply(tree: Tree) -> bool:
    return get_path(tree, "rollout.max_response_tokens") is not None


def _shape(path: str) -> Mapping[str, Any]:
    """The content of a local model's config.json; empty if there is no readable file."""
    try:
        data = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(data, dict):
        return {}
    inner = cast(Tree, data).get("text_config")
    return cast(Tree, inner if isinstance(inner, dict) else data)


def _parameters(shape: Mapping[str, Any]) -> int:
    """Approximate number of parameters of a model of this shape; 0 if unknown.

    Example:
        >>> _parameters({"hidden_size": 576, "num_hidden_layers": 30, "intermediate_size": 1536,
        ...              "vocab_size": 49152}) // 1_000_000
        147
    """
    names = ("hidden_size", "num_hidden_layers", "vocab_size")
    sizes = [shape.get(name) for name in names]
    if not all(isinstance(size, int) for size in sizes):
        return 0
    hidden, layers, vocabulary = cast("list[int]", sizes)
    inner = shape.get("intermediate_size")
    width = inner if isinstance(inner, int) else 4 * hidden
    return vocabulary * hidden + layers * (4 * hidden * hidden + 3 * hidden * width)
