"""The choices for a game: environments that come with turnwise or that the user named, by people,
simple players, models behind an API, and policies of runs. Never code that a run names."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from inspect import Parameter, signature
from typing import Any, cast
from urllib.parse import urlsplit

from turnwise.config.schema import Config, EnvConfig
from turnwise.config.tree import is_tree
from turnwise.envs.registry import (
    AGENT,
    COMMAND,
    EnvSpec,
    UnknownEnvError,
    built_in,
    find_env,
    list_envs,
)
from turnwise.envs.trust import named_code
from turnwise.inspect.folder import InspectError, Skips
from turnwise.inspect.runs import Run, Runs
from turnwise.types import Json
from turnwise.user_code import UnknownNameError, load_named

ELSEWHERE = ("remote", "openenv")
"""Environments that are served by another process: their address has to be named by the user."""
MOST_TURNS = 1000
"""Turns of a game whose environment has no limit."""
MOST_RUNS = 200
"""Runs whose policies are offered."""
WITHOUT_END = 7 * 86400.0


def list_choices(runs: Runs, named: Sequence[str]) -> dict[str, Json]:
    """The answer of /api/envs."""
    rows = [{"name": name, "options": "", "summary": "your own"} for name in named]
    for spec in list_envs():
        if spec.name not in named and _is_offered(spec) and spec.available:
            options = f"{spec.selects}=..." if spec.selects else _options(spec)
            rows.append({"name": spec.name, "options": options, "summary": spec.summary})
    players: list[dict[str, Json]] = [
        {"name": "person", "label": "you"},
        {"name": "random", "label": "random player"},
        {"name": "expert", "label": "the environment's expert"},
    ]
    for run in runs.scan()[0][:MOST_RUNS]:
        if _has_checkpoint(run):
            row: dict[str, Json] = {"name": f"run:{run.name}", "label": f"policy of {run.name}"}
            config = run.config(Skips())[1]
            try:
                if config is None:
                    raise InspectError("its config cannot be read")
                env = config.env.name
                refuse_code(policy_config(config, env, {}), named)
                row["env"] = env
            except InspectError as error:
                row["refused"] = str(error)
            players.append(row)
    return {"envs": rows, "players": players}


def game_config(env: str, options: Mapping[str, Json]) -> Config:
    """The config of a game without a policy.

    Raises:
        InspectError: there are no such options.
    """
    config = _validated({"env": {"name": env, "options": dict(options)}})
    limit = config.env.model_copy(update={"max_turn": MOST_TURNS})
    return _for_one(config.model_copy(update={"env": limit}))


def policy_config(stored: Config, env: str, options: Mapping[str, Json]) -> Config:
    """The config of a game that a run's policy plays: with the run's settings of the model, of its
    rollouts, and of the environment if it is the run's own.

    Raises:
        InspectError: there are no such options.
    """
    if env in stored.envs:
        chosen = stored.envs[env]
    elif not env or _same(env, stored.env.name):
        chosen = stored.env
    else:
        chosen = EnvConfig(name=env)
    tree = chosen.model_dump(mode="json")
    tree["options"] = {**tree["options"], **options}
    base = Config()
    train = {
        name: stored.train.model_dump()[name]
        for name in ("device", "deterministic", "multi_turn", "max_turn")
    }
    # Groups of a training rollout say nothing about one game, and their tags name other entries.
    groups = {"train": base.rollout.train.model_dump(mode="json")}
    data = {
        "seed": stored.seed,
        "model": stored.model.model_dump(mode="json"),
        "env": tree,
        "rollout": stored.rollout.model_dump(mode="json") | groups,
        "train": base.train.model_dump(mode="json") | train,
    }
    return _for_one(_validated(data))


def refuse_code(config: Config, named: Sequence[str]) -> None:
    """Refuses a game that would load code which the user did not name on the command line.

    Raises:
        InspectError: says which.
    """
    name = config.env.name
    try:
        spec = find_env(name)
    except UnknownEnvError as error:
        raise InspectError(str(error), status=422) from None
    if name not in named and built_in(spec) and not _is_offered(spec):
        raise InspectError(
            f"{name} runs a program or asks another machine; allow it with `turnwise inspect "
            f"--env {name}`",
            status=403,
        )
    of_name = named_code(Config(env=EnvConfig(name=name)))
    found = [item for item in named_code(config) if item not in of_name]
    if name not in named:
        found += [f"{item} (allow it with `turnwise inspect --env {name}`)" for item in of_name]
    if found:
        raise InspectError(
            f"code that a run or a page names is not loaded: {'; '.join(found)}", status=403
        )


def key_for(url: str) -> str | None:
    """OPENAI_API_KEY, for OpenAI itself and for the server of OPENAI_BASE_URL. Another address,
    which came from the page, does not get it.

    Example:
        >>> key_for("http://example.org/v1") is None
        True
    """
    own = [("https", "api.openai.com")]
    base = urlsplit(os.environ.get("OPENAI_BASE_URL") or "")
    own.append((base.scheme, base.netloc))
    asked = urlsplit(url)
    return os.environ.get("OPENAI_API_KEY") if (asked.scheme, asked.netloc) in own else None


def read_text(body: Mapping[str, Json], name: str, default: str = "") -> str:
    """A text of a request."""
    value = body.get(name, default)
    if not isinstance(value, str) or len(value) > 100_000:
        raise InspectError(f"{name} is a text, got {value!r:.80}", status=400)
    return value


def read_options(body: Mapping[str, Json]) -> dict[str, Json]:
    """The environment's options of a request."""
    value: Json = body.get("options")
    if value is not None and not is_tree(value):
        raise InspectError(f"options is an object, got {value!r:.80}", status=400)
    return dict(value or {})


def read_seed(body: Mapping[str, Json]) -> int:
    """The task's seed of a request."""
    value = body.get("seed", 0)
    if type(value) is not int or not 0 <= value < 2**63:
        raise InspectError(f"seed is a whole number from 0, got {value!r:.80}", status=400)
    return value


def _for_one(config: Config) -> Config:
    """The config that plays one episode, without a stall timeout: a person may play slowly."""
    groups = config.rollout.val.model_copy(
        update={"env_groups": 1, "group_size": 1, "tags": (), "n_groups": ()}
    )
    changes = {"val": groups, "retries": 0, "stall_timeout": WITHOUT_END, "slots": 1}
    return config.model_copy(update={"rollout": config.rollout.model_copy(update=changes)})


def _validated(data: Mapping[str, Any]) -> Config:
    try:
        return Config.model_validate(data)
    except ValueError as error:
        said = " ".join(str(error).split())
        raise InspectError(f"these settings cannot be used: {said[:400]}", status=422) from None


def _same(one: str, other: str) -> bool:
    """Whether two names mean the same environment."""
    try:
        return find_env(one) == find_env(other)
    except UnknownEnvError:
        return one == other


def _is_offered(spec: EnvSpec) -> bool:
    first = spec.name.partition(":")[0]
    return built_in(spec) and spec.target not in (AGENT, COMMAND) and first not in ELSEWHERE


def _options(spec: EnvSpec) -> str:
    """The options of an environment of ours, with their defaults."""
    if not isinstance(spec.target, str) or not spec.target.startswith("turnwise.envs.games."):
        return ""
    try:
        made = cast(Any, load_named(spec.target))
    except (UnknownNameError, ImportError):
        return ""
    shown: list[str] = []
    for name, parameter in signature(made).parameters.items():
        if parameter.kind in (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL):
            continue
        value = parameter.default
        plain = isinstance(value, bool | int | float | str)
        shown.append(f"{name}={json.dumps(value) if plain else '...'}")
    return " ".join(shown)


def _has_checkpoint(run: Run) -> bool:
    try:
        with os.scandir(run.folder.path / "checkpoints") as entries:
            names = [entry.name for entry in entries]
    except OSError:
        return False
    # The checkpoint of step 0 is the model before training.
    return any(re.fullmatch(r"step_0*[1-9][0-9]*", name) for name in names)
