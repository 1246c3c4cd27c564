"""Resolves a word on the command line: a run directory, a checkpoint, a model, a recipe or a config
file."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from turnwise.cli.args import fail, refuse_code, split_source
from turnwise.config import Config, load_config, run_config
from turnwise.config.base import MAIN_JOB
from turnwise.envs.trust import is_run_config

if TYPE_CHECKING:
    from turnwise.envs.base import EnvFactory


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A config, and the location of the policy."""

    config: Config
    run: Path | None = None
    """The run directory, if one was named."""
    model: str | None = None
    """A Hugging Face directory or hub name in place of the config's model."""
    name: str = "policy"


def played(source: Source, *, env: str | None) -> tuple[Config, "Mapping[str, EnvFactory]"]:
    """(config, environments given as objects) of the episodes. A run on prompts plays prompts,
    unless `env` names an environment."""
    if env is not None or source.config.data.prompts is None:
        return source.config, {}
    from turnwise.train.setup import choose_setting

    setting = choose_setting(source.config)
    return setting.config, setting.factories


def read_source(
    words: Sequence[str],
    *,
    env: str | None = None,
    player: str | None = None,
    trust: bool = False,
) -> Source:
    """The source that the words name, with overrides applied. No word: the run of `turnwise train`.

    `env` replaces the whole environment of the config, because settings of one environment do not
    fit another. A `player` does not get the embedded model's settings; a player behind an endpoint
    does not get the main job's either. Code that a run's own config names is refused unless `trust`
    is given.

    Example:
        >>> read_source(["bandit", "seed=3"]).config.seed
        3
        >>> read_source([], env="bandit").config.env.name
        'bandit'
    """
    word, overrides = split_source(words)

    if word is not None and word.partition(":")[0] in ("openai", "script"):
        fail(f"{word} is a player, not a run or a model; write --player {word}")
    embedded = None if player is None else False
    endpoint = player is not None and player.startswith("openai:")

    def load(source: str | Path | None) -> Config:
        if source is None and (env is not None or endpoint):
            named = {"env": {"name": env or MAIN_JOB}}
            return run_config(named, overrides, embedded=embedded)
        if env is None:
            return run_config(source, overrides, embedded=embedded)
        tree = run_config(source, embedded=embedded).model_dump(mode="json")
        tree["env"], tree["envs"] = {"name": env}, {}
        for part in ("train", "val"):
            tree["rollout"][part] |= {"tags": [], "n_groups": []}
        return load_config(tree, overrides)

    def model(path: str) -> Config:
        named = {"env": {"name": env}} if env is not None else {}
        return run_config({"model": {"path": path}, **named}, overrides)

    if word is None:
        return Source(config=load(None))
    path = Path(word)

    def of_run(run: Path) -> Config:
        config = load(run / "config.yaml")
        refuse_code(config, stored=run / "config.yaml", trust=trust)
        return config

    # A pushed model comes with the config of its run: it is a model all the same.
    if (path / "config.json").is_file():
        return Source(config=model(word), model=word, name=path.name)
    if (path / "config.yaml").is_file():
        return Source(config=of_run(path), run=path, name=path.name)
    if (path / "manifest.json").is_file() and (path / "model").is_dir():  # a checkpoint of a run
        run = path.parent.parent
        stored = of_run(run)
        return Source(
            config=stored, run=run, model=str(path / "model"), name=f"{run.name}/{path.name}"
        )
    if path.is_dir():
        fail(
            f"{word} is neither a run directory (config.yaml), a checkpoint (manifest.json) nor a "
            "model (config.json)"
        )
    if "/" in word and not path.exists() and path.parent.is_dir():
        fail(
            f"there is no run, checkpoint, model or config at {word}; `ls {path.parent}` shows some"
        )
    if re.fullmatch(r"[\w.-]+/[\w.-]+", word) and not path.is_file():
        return Source(config=model(word), model=word, name=word)
    config = load(word)  # raises an error with a suggestion if the word is unknown
    if is_run_config(path):
        refuse_code(config, stored=path, trust=trust)
    return Source(config=config, name=path.stem)
