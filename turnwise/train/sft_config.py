"""The config of an imitation run, from its sources, a recipe and overrides."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnwise.config import Config, load_config, run_config
from turnwise.config.load import config_path
from turnwise.envs.trust import is_run_config


class NoSourceError(ValueError):
    """There is nothing to imitate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Words:
    """The words of the command line, or the arguments of turnwise.sft, sorted."""

    sources: tuple[str, ...]
    config: str | Path | Mapping[str, Any] | None
    """A recipe, a config file or settings."""
    overrides: tuple[str, ...]


def resolve(words: Words, *, embedded: bool | None = None) -> tuple[Config, Path | None]:
    """(the config of the run, the stored config that it is made from or None).

    It is that of the recipe or file, else the one that lies with the demonstrations. Where no
    environment is named, nothing is evaluated.

    Raises:
        NoSourceError: no source is named.
    """
    from turnwise.train.sources import is_player

    overrides = ["train.steps=0", *words.overrides]
    if words.sources:
        overrides.append(f"sft.source={json.dumps(words.sources)}")
    if words.config is not None:
        place = Path() if isinstance(words.config, Mapping) else Path(words.config)
        stored = place if is_run_config(place) else None
        return run_config(words.config, overrides, embedded=embedded), stored
    if not any(word.lstrip("-").startswith("sft.source") for word in overrides):
        raise NoSourceError(
            "there is nothing to imitate; give a source: expert, random, a run directory, a file "
            ".jsonl of episodes or messages"
        )
    stored = _stored_config(words.sources)
    if stored is not None:
        return run_config(_settings_of(stored), overrides, embedded=embedded), stored
    named = any(word.lstrip("-").startswith(("env.", "envs")) for word in overrides)
    if not named and not any(map(is_player, words.sources)):
        overrides = ["eval.before=false", "eval.after=false", *overrides]
    return run_config(None, overrides, embedded=embedded), None


def _stored_config(sources: Sequence[str]) -> Path | None:
    """The config that lies with the first stored demonstrations."""
    for source in map(Path, sources):
        for path in (source / "config.yaml", config_path(source)):
            if path.is_file():
                return path
    return None


def _settings_of(stored: Path) -> dict[str, Any]:
    """Environment, rollout and model of a stored config, without how it was run."""
    tree = load_config(stored).model_dump(mode="json")
    tree["log"]["name"] = None
    del tree["sft"]
    return tree
