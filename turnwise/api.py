"""The Python interface: `turnwise.train`, `turnwise.sft` and `turnwise.evaluate`.
docs/python.md shows them.

What a config names, these take as objects too: each is given a name, and the rest is the path that
every run takes.
"""

import copy
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from turnwise.algos.algorithm import Algorithm
from turnwise.config.base import run_config
from turnwise.config.schema import Config
from turnwise.envs.trust import is_run_config, refuse_foreign_code
from turnwise.evaluate.evaluation import EvalResult, PolicyPlayer
from turnwise.evaluate.evaluation import evaluate as evaluate_player
from turnwise.evaluate.player_names import KINDS, load_player
from turnwise.evaluate.players import Player, ScriptedPlayer, Situation
from turnwise.generate.base import Generator
from turnwise.log.callbacks import Callback
from turnwise.log.store import RunReader
from turnwise.rollout.agents import Agent
from turnwise.train import run
from turnwise.train.load_policy import load_policy
from turnwise.train.setup import choose_setting
from turnwise.train.sft_config import Words, resolve
from turnwise.train.trainer import RunResult
from turnwise.user_code import name_of

Source = str | os.PathLike[str] | Mapping[str, Any] | Config
Demonstrations = str | os.PathLike[str] | Callable[[Situation], str]
OwnCallback = Callback | type[Callback] | str


def train(
    env: str | Callable[..., Any] | object | None = None,
    model: str | os.PathLike[str] | None = None,
    algorithm: str | Callable[..., Any] | Algorithm | None = None,
    *,
    loss: str | Callable[..., Any] | None = None,
    shaper: str | Callable[..., float] | None = None,
    agent: str | type[Agent] | None = None,
    generator: str | Callable[..., Generator] | None = None,
    callbacks: OwnCallback | Sequence[OwnCallback] = (),
    config: Source | None = None,
    overrides: Mapping[str, Any] | None = None,
    resume: str | os.PathLike[str] | None = None,
    quiet: bool = False,
    trust: bool = False,
) -> RunResult:
    """Trains and returns the result. Works inside a running event loop.

    Args:
        env: an environment's name, `file.py:Class`, a class or function that makes one, or an
            object that is copied for every episode at once.
        model: a Hugging Face directory or hub name. None: the config's, or the embedded model.
        algorithm: a name, an advantage estimator, or an Algorithm.
        loss: the loss of a token in place of the algorithm's.
        shaper: adds to every turn's reward.
        agent: what stands between environment and model.
        generator: makes the generator from `model`, `tokenizer` and `config`.
        callbacks: one or several objects, classes or names.
        config: a recipe, a YAML file, a mapping or a Config to start from.
        overrides: settings by dotted key, such as {"train.steps": 20}.
        resume: a run directory to go on with, from its last checkpoint.
        quiet: nothing on the console.
        trust: load the code that a run's own config names, even if another user made it.

    Raises:
        ValueError: settings contradict each other, or a part of yours failed its check.
    """
    given: dict[str, Any] = {
        "env.name": _named(env),
        "model.path": None if model is None else os.fspath(model),
        "algo.name": _named(algorithm),
        "algo.surrogate": _named(loss),
        "env.shaping.function": _named(shaper),
        "rollout.agent": _named(agent),
        "rollout.generator": _named(generator),
    }
    settings = {key: value for key, value in given.items() if value is not None}
    source = config
    if resume is not None and source is None:
        source = Path(resume) / "config.yaml"
    resolved = _config(source, {**settings, **(overrides or {})})
    stored = Path(resume) / "config.yaml" if resume is not None else None
    if stored is None and isinstance(source, str | os.PathLike) and is_run_config(Path(source)):
        stored = Path(source)
    if stored is not None:
        refuse_foreign_code(resolved, stored=stored, trust=trust)
    return run.train(
        resolved,
        resume=None if resume is None else Path(resume),
        sinks=() if quiet else None,
        callbacks=callbacks,
    )


def sft(
    source: Demonstrations | Sequence[Demonstrations],
    env: str | Callable[..., Any] | object | None = None,
    model: str | os.PathLike[str] | None = None,
    *,
    best: bool | int = False,
    callbacks: OwnCallback | Sequence[OwnCallback] = (),
    config: Source | None = None,
    overrides: Mapping[str, Any] | None = None,
    quiet: bool = False,
    trust: bool = False,
) -> RunResult:
    """Imitates demonstrations and returns the result. docs/imitation.md describes it;
    `turnwise.train(resume=..)` resumes such a run.

    Args:
        source: one or several: "expert", "random", "openai:URL#MODEL", a function from a Situation
            to the reply's text, a run directory, or a file of episodes or messages.
        env: the environment that players play and that is evaluated.
        model: a Hugging Face directory or hub name. None: the config's, or the embedded model.
        best: True: learn from the episodes that succeeded. A number: from that many of each task.
        config: a recipe, a YAML file, a mapping or a Config to start from.
        overrides: settings by dotted key, such as {"sft.epochs": 2}.
        trust: load the code that a run's own config names, even if another user made it.

    Raises:
        ValueError: settings contradict each other, or a source cannot be learned from.
    """
    keep = "all" if best is False else "success" if best is True else best
    given: dict[str, Any] = {
        "env.name": _named(env),
        "model.path": None if model is None else os.fspath(model),
        "sft.keep": None if keep == "all" else keep,
    }
    settings = {key: value for key, value in given.items() if value is not None}
    words = Words(
        sources=_sources(source),
        config=_plain(config),
        overrides=tuple(_words({**settings, **(overrides or {})})),
    )
    resolved, stored = resolve(words)
    if stored is not None:
        refuse_foreign_code(resolved, stored=stored, trust=trust)
    return run.train(resolved, sinks=() if quiet else None, callbacks=callbacks)


def evaluate(
    policy: RunResult | str | Path | Player | Callable[[Situation], str],
    env: str | Callable[..., Any] | object | None = None,
    *,
    episodes: int | None = None,
    split: str = "val",
    config: Source | None = None,
    overrides: Mapping[str, Any] | None = None,
    trust: bool = False,
) -> EvalResult:
    """How a policy or player does on held-out tasks, with 95 % intervals, and its episodes.

    Args:
        policy: a run (its last checkpoint, with its config), a model's directory or hub name,
            "random", "expert", "openai:URL#MODEL", a function from a Situation to the reply's text,
            or a Player.
        env: the environment, in place of the config's.
        episodes: tasks, each played once. None: the config's.
        trust: load the code that a run's own config names, even if another user made it.

    Raises:
        EvaluationError: every episode failed.
    """
    path = policy.path if isinstance(policy, RunResult) else None
    where = str(policy) if isinstance(policy, str | Path) else None
    if where is not None and (Path(where) / "config.yaml").is_file():
        path = Path(where)
    settings = {"env.name": _named(env)} if env is not None else {}
    source = config if path is None or config is not None else RunReader(path).config
    resolved = _config(source, {**settings, **(overrides or {})})
    if path is not None:
        refuse_foreign_code(resolved, stored=path / "config.yaml", trust=trust)
    player: Player | PolicyPlayer
    if path is not None:
        player = load_policy(resolved, run=path, name=path.name)
    elif where is not None and where.partition(":")[0] in KINDS:
        player = load_player(where, resolved)
    elif where is not None:
        player = load_policy(resolved, model=where, name=Path(where).name)
    elif isinstance(policy, RunResult):
        raise AssertionError("a run has a path")
    elif hasattr(policy, "reply"):
        player = policy  # pyright: ignore[reportAssignmentType]
    else:
        player = ScriptedPlayer(getattr(policy, "__name__", "script"), policy)  # pyright: ignore[reportArgumentType]
    setting = choose_setting(resolved) if resolved.data.prompts is not None else None
    return evaluate_player(
        resolved if setting is None else setting.config,
        player,
        episodes=episodes,
        split=split,
        factories=None if setting is None else setting.factories,
    )


def _config(source: Source | None, settings: Mapping[str, Any]) -> Config:
    """The config that the command line would come to with the same words."""
    return run_config(_plain(source), _words(settings))


def _sources(source: Demonstrations | Sequence[Demonstrations]) -> tuple[str, ...]:
    """Names of the sources; a function is a scripted player."""
    if isinstance(source, str | os.PathLike):
        return (os.fspath(source),)
    if callable(source):
        return (f"script:{name_of(source)}",)
    return tuple(name for one in source for name in _sources(one))


def _words(settings: Mapping[str, Any]) -> list[str]:
    return [f"{key}={json.dumps(value)}" for key, value in settings.items()]


def _plain(source: Source | None) -> str | Path | Mapping[str, Any] | None:
    if isinstance(source, Config):
        return source.model_dump(mode="json")
    return Path(source) if isinstance(source, os.PathLike) else source


def _named(part: object) -> str | None:
    """The name of a part for the config; an object that is no function or class makes copies of
    itself."""
    if part is None or isinstance(part, str):
        return part
    if callable(part) or isinstance(part, Algorithm):
        return name_of(part)

    def copied() -> object:
        return copy.deepcopy(part)

    copied.__qualname__ = copied.__name__ = type(part).__name__
    return name_of(copied)
