"""Decides whether code that a stored config names may be loaded. Code of a foreign run directory
needs the user's permission."""

import hashlib
from pathlib import Path

from turnwise.config.known import is_known, is_known_code
from turnwise.config.load import load_config
from turnwise.config.schema import Config, EnvConfig
from turnwise.envs.registry import COMMAND, UnknownEnvError, built_in, find_env

_OF_RUNS = ("metrics.jsonl", "events.jsonl", "ledger.jsonl", "episodes", "checkpoints", "lock")


class UntrustedCodeError(ValueError):
    """A stored config names code that the user has not allowed."""


def named_code(config: Config) -> list[str]:
    """The code that a run of this config would load besides turnwise's own, and the servers that
    would get the user's token or key.

    Example:
        >>> named_code(Config())
        []
        >>> named_code(Config(env=EnvConfig(name="mine.py:Env")))
        ['env.name: mine.py:Env']
    """
    found = _of_env("env", config.env)
    for tag, env in config.envs.items():
        found += _of_env(f"envs.{tag}", env)
    for split, groups in (("train", config.rollout.train), ("val", config.rollout.val)):
        for tag in groups.tags:
            if tag not in config.envs:  # it is an environment's name itself
                found += _of_env(f"rollout.{split}.tags", EnvConfig(name=tag))
    parts = {
        "data.reward": config.data.reward,
        "algo.name": config.algo.name,
        "algo.surrogate": config.algo.surrogate,
        "rollout.agent": config.rollout.agent,
        "rollout.generator": config.rollout.generator,
        **{f"log.callbacks.{index}": name for index, name in enumerate(config.log.callbacks)},
        # A script is code; an endpoint would be sent the user's key.
        **{
            f"sft.source.{index}": name.removeprefix("script:")
            for index, name in enumerate(config.sft.source)
            if name.startswith(("script:", "openai:"))
        },
    }
    found += [f"{key}: {name}" for key, name in parts.items() if name and ":" in name]
    if config.model.trust_remote_code:
        where = config.model.path or "the embedded model"
        found.append(f"model.trust_remote_code: code that comes with {where}")
    if config.backend == "verl":
        found.append("backend: verl, whose checkpoints are unpickled")
    for backend, settings in (("trl", config.trl), ("verl", config.verl)):
        found += [f"{backend}.{key}: {value}" for key, value in settings.items()]
    return found


def code_digests(config: Config) -> dict[str, str]:
    """File -> digest of its text, for the Python files that the config names.

    Example:
        >>> code_digests(Config())
        {}
    """
    files = {_file_of(item) for item in named_code(config)}
    return {
        file: hashlib.sha256(Path(file).read_bytes()).hexdigest()
        for file in sorted(files)
        if file.endswith(".py") and Path(file).is_file()
    }


def is_run_config(path: Path) -> bool:
    """True if the file is the config of a run directory, not one written by hand."""
    return path.name == "config.yaml" and any((path.parent / name).exists() for name in _OF_RUNS)


def refuse_foreign_code(config: Config, *, stored: Path, trust: bool) -> None:
    """Raises if the file `stored` names code that `config` would load, unless the user trusts it,
    or turnwise stored that file for this user and the names lead to the same code as then.

    Code inside the run directory is never trusted automatically: the folder may have been changed
    elsewhere. Code that an override names is the user's choice.

    Raises:
        UntrustedCodeError: lists the code, and how to allow it.
    """
    if trust:
        return
    theirs = set(named_code(load_config(stored)))
    found = [item for item in named_code(config) if item in theirs]
    text = stored.read_text(encoding="utf-8")
    if is_known(text):
        found = [
            item
            for item in found
            if (is_run_config(stored) and _is_inside(item, stored.parent))
            or not _is_same(item, text)
        ]
    if found:
        listed = "\n".join(f"  {item}" for item in found)
        raise UntrustedCodeError(
            f"{stored} names code that would be loaded:\n{listed}\n"
            "The config was not stored by turnwise for you on this machine, it was changed since, "
            "the code is in the same folder, or from here the name leads to another file than in "
            "your run. Read that code; add --trust to allow it"
        )


def _of_env(key: str, env: EnvConfig) -> list[str]:
    shaper = env.shaping.function
    found = [f"{key}.shaping.function: {shaper}"] if shaper and ":" in shaper else []
    try:
        spec = find_env(env.name)
    except UnknownEnvError:
        return found  # creating the environment reports the unknown name
    if not built_in(spec):
        return [*found, f"{key}.name: {env.name}"] if isinstance(spec.target, str) else found
    options = {**spec.given, **env.options}
    named = {name: options.get(name) for name in spec.loads}
    return found + [
        f"{key}.options.{name}: {value}"
        for name, value in named.items()
        if isinstance(value, str) and (":" in value or spec.target == COMMAND)
    ]


def _is_same(item: str, text: str) -> bool:
    """True if the item leads to the same code as when turnwise stored this config."""
    key, _, name = item.partition(": ")
    return is_known_code(text, name, command=key.endswith(".options.command"))


def _is_inside(item: str, folder: Path) -> bool:
    if item.startswith("model.trust_remote_code: "):
        return True  # the models of its checkpoints name that code, and may bring it
    where = _file_of(item)
    return where.endswith(".py") and Path(where).resolve().is_relative_to(folder.resolve())


def _file_of(item: str) -> str:
    """The module or file of one item of `named_code`."""
    return item.partition(": ")[2].rpartition(":")[0]
