"""What a word on the command line means: a run directory, a checkpoint, a model, a recipe or a config file."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from turnwise.cli.args import fail, split_source
from turnwise.config import Config, load_config

if TYPE_CHECKING:
    from turnwise.envs.base import EnvFactory


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A config, and where the policy is."""

    config: Config
    run: Path | None = None
    """The run directory, where one was named."""
    model: str | None = None
    """A Hugging Face directory or hub name in place of the config's model."""
    name: str = "policy"


def played(source: Source, *, env: str | None) -> tuple[Config, "Mapping[str, EnvFactory]"]:
    """(config, environments given as objects) of the episodes: those of a run on prompts are prompts, unless another
    environment was asked for."""
    if env is not None or source.config.data.prompts is None:
        return source.config, {}
    from turnwise.train.setup import choose_setting

    setting = choose_setting(source.config)
    return setting.config, setting.factories


def read_source(words: Sequence[str], *, env: str | None = None) -> Source:
    """What the words name, overrides applied. No word: the default recipe.

    `env` replaces the whole environment of the config: the settings of one environment mean nothing to another.

    Example:
        >>> read_source(["bandit", "seed=3"]).config.seed
        3
        >>> read_source([], env="bandit").config.env.name
        'bandit'
    """
    word, overrides = split_source(words)

    def load(source: str | Path) -> Config:
        if env is None:
            return load_config(source, overrides)
        tree = load_config(source).model_dump(mode="json")
        tree["env"], tree["envs"] = {"name": env}, {}
        for part in ("train", "val"):
            tree["rollout"][part] |= {"tags": [], "n_groups": []}
        return load_config(tree, overrides)

    if word is None:
        return Source(config=load("default"))
    path = Path(word)
    if (path / "config.yaml").is_file():
        return Source(config=load(path / "config.yaml"), run=path, name=path.name)
    if (path / "manifest.json").is_file():  # a checkpoint of a run
        run = path.parent.parent
        stored = load(run / "config.yaml")
        return Source(config=stored, run=run, model=str(path / "model"), name=f"{run.name}/{path.name}")
    if (path / "config.json").is_file():
        return Source(config=load("default"), model=word, name=path.name)
    if path.is_dir():
        fail(f"{word} is neither a run directory (config.yaml), a checkpoint (manifest.json) nor a model (config.json)")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", word) and not path.is_file():
        return Source(config=load("default"), model=word, name=word)
    return Source(config=load(word), name=path.stem)  # which says what it could have meant, if it means nothing
