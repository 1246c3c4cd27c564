"""Environments by name. An environment and its packages are imported only when it is created."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Any, cast

from turnwise.config.schema import EnvConfig
from turnwise.envs.base import Env, EnvError, SharedEnv
from turnwise.envs.gate import ask, raised_at
from turnwise.user_code import UnknownNameError, load_named

ENTRY_POINT_GROUP = "turnwise.envs"
Target = str | Callable[..., Any]
_LOCAL_SETTINGS = ("name", "options", "max_turn", "shaping")
"""Settings that a client may set for a remote environment."""


class UnknownEnvError(ValueError):
    """No environment has that name."""


class EnvOptionsError(ValueError):
    """The options are not those of the environment: one is unknown, or one is missing."""


class EnvNotMadeError(ValueError):
    """The environment's own code raised while it was imported or made; the message says where."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvSpec:
    """One row of the table: the name of an environment, and how to create it.

    Example:
        >>> find_env("FrozenLake").name, find_env("frozen_lake").available
        ('frozen_lake', True)
    """

    name: str
    target: Target
    """module:Class, or a callable that creates the environment from its options."""
    aliases: tuple[str, ...] = ()
    summary: str = ""
    """One line for `turnwise envs`."""
    extra: str | None = None
    """The extra of turnwise that installs its packages."""
    needs: tuple[str, ...] = ()
    """Modules that must be importable."""
    also: str | None = None
    """An optional extra that adds features."""
    selects: str | None = None
    """For a row with many environments: the option that selects one, which NAME:TEXT sets."""
    loads: tuple[str, ...] = ()
    """Options that may name code, as module:name, or a server that gets the user's token."""
    given: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Options that the name sets."""

    @property
    def missing(self) -> tuple[str, ...]:
        """The required modules that are not installed."""
        return tuple(module for module in self.needs if find_spec(module) is None)

    @property
    def available(self) -> bool:
        return not self.missing

    @property
    def install(self) -> str:
        """The argument of `pip install`: turnwise with an extra, or the packages themselves."""
        return f"turnwise[{self.extra}]" if self.extra else " ".join(self.needs)


AGENT, COMMAND = "turnwise.endpoint.env:AgentEnv", "turnwise.endpoint.env:CommandEnv"
_BUILT_IN: tuple[EnvSpec, ...] = (
    EnvSpec(
        name="agent",
        target=AGENT,
        summary="Your own program that calls the model, such as agent:solve.py:solve.",
        selects="program",
        loads=("program",),
    ),
    EnvSpec(
        name="command",
        target=COMMAND,
        summary="A command line that calls the model, such as 'command:node agent.js'.",
        selects="command",
        loads=("command",),
    ),
    EnvSpec(
        name="bandit",
        target="turnwise.envs.games.bandit:Bandit",
        summary="Two arms, one turn: a sure small pay or a rare large one. The optimum is known.",
    ),
    EnvSpec(
        name="frozen_lake",
        target="turnwise.envs.games.frozen_lake:FrozenLake",
        summary=(
            "Cross a frozen grid to the goal without falling into a hole; the ice may be slippery."
        ),
        needs=("gymnasium",),
    ),
    EnvSpec(
        name="key_door",
        target="turnwise.envs.games.key_door:KeyDoor",
        aliases=("KeyDoor",),
        summary="Fetch a key, then open the door; only the door pays, six moves or more away.",
    ),
    EnvSpec(
        name="sudoku",
        target="turnwise.envs.games.sudoku:Sudoku",
        aliases=("SimpleSudoku",),
        summary="Fill a grid of 4, 9 or 16 rows; puzzles have one solution.",
    ),
    EnvSpec(
        name="game_2048",
        target="turnwise.envs.games.game_2048:Game2048",
        aliases=("2048", "Game2048"),
        summary="Slide and merge tiles to 2048; tiles appear at random.",
    ),
    EnvSpec(
        name="rubikscube",
        target="turnwise.envs.games.rubikscube:RubiksCube",
        aliases=("RubiksCube", "RubiksCube2x2"),
        summary="Solve a 2x2x2 cube that a few random turns have scrambled.",
    ),
    EnvSpec(
        name="countdown",
        target="turnwise.envs.games.countdown:Countdown",
        summary="Reach a target number with arithmetic that uses every given number once.",
    ),
    EnvSpec(
        name="simple_game",
        target="turnwise.envs.games.simple_game:SimpleGameEnvironment",
        aliases=("SimpleGameEnvironment",),
        summary="Walk along a line to a target. The smallest game with several turns.",
    ),
    EnvSpec(
        name="sokoban",
        target="turnwise.envs.games.sokoban:SokobanEnv",
        summary="Push boxes onto targets; some pushes cannot be undone.",
    ),
    EnvSpec(
        name="alfworld",
        target="turnwise.envs.games.alfworld:AlfWorldEnv",
        summary="Household tasks in text: find, carry, clean, heat, cool and place objects.",
        also="alfworld",
    ),
    EnvSpec(
        name="webshop",
        target="turnwise.envs.games.webshop:WebShopEnv",
        summary="Search a shop and buy what an instruction describes.",
        extra="webshop",
        needs=("bm25s", "Stemmer", "rapidfuzz"),
    ),
    EnvSpec(
        name="math_qa",
        target="turnwise.envs.games.math_qa:MathQAEnv",
        aliases=("MetaMathQA",),
        summary="Math questions with several tries; GSM8K, MetaMathQA or your own.",
        also="math",
    ),
    EnvSpec(
        name="gymnasium",
        target="turnwise.integrations.envs.gymnasium:GymnasiumEnv",
        summary="Any Gymnasium environment with discrete actions, such as gymnasium:Taxi.",
        needs=("gymnasium",),
        selects="id",
        loads=("id", "observe"),
    ),
    EnvSpec(
        name="textarena",
        target="turnwise.integrations.envs.textarena:TextArenaEnv",
        summary="Games of TextArena, such as textarena:Mastermind-v0.",
        extra="textarena",
        needs=("textarena",),
        selects="id",
        loads=("opponent",),
    ),
    EnvSpec(
        name="reasoning_gym",
        target="turnwise.integrations.envs.reasoning_gym:ReasoningGymEnv",
        summary="Puzzles of reasoning-gym, such as reasoning_gym:countdown.",
        extra="reasoning-gym",
        needs=("reasoning_gym",),
        selects="dataset",
    ),
    EnvSpec(
        name="gem",
        target="turnwise.integrations.envs.gem:GemEnv",
        summary="Environments of GEM, such as gem:game:Sudoku-v0-easy.",
        extra="gem",
        needs=("gem",),
        selects="id",
    ),
    EnvSpec(
        name="openenv",
        target="turnwise.integrations.envs.openenv:OpenEnvEnv",
        summary="An environment behind an OpenEnv server, such as openenv:http://host:8000.",
        extra="openenv",
        needs=("openenv",),
        selects="url",
    ),
    EnvSpec(
        name="remote",
        target="turnwise.serve.client:RemoteEnv",
        summary="An environment that `turnwise serve-env` serves, such as http://host:8765.",
        selects="url",
        loads=("url",),
    ),
)

_registered: dict[str, EnvSpec] = {}  # by normalised name: rows added by `register` in this process


def register(
    name: str,
    target: Target,
    *,
    aliases: tuple[str, ...] = (),
    summary: str = "",
    extra: str | None = None,
    needs: tuple[str, ...] = (),
) -> EnvSpec:
    """The new row. Later registrations replace earlier ones of the same name, built-in ones
    included.

    Packages can register without being imported, with an entry point in the group `turnwise.envs`.

    Example:
        >>> register("my_lake", "turnwise.envs.games.frozen_lake:FrozenLake",
        ...     summary="as an example").name
        'my_lake'
        >>> unregister("my_lake")
    """
    spec = EnvSpec(
        name=name, target=target, aliases=aliases, summary=summary, extra=extra, needs=needs
    )
    _registered[_normal(name)] = spec
    return spec


def unregister(name: str) -> None:
    """Removes the row that `register` added under this name. An unknown name is not an error."""
    _registered.pop(_normal(name), None)


def is_registered_here(name: str) -> bool:
    """Whether `register` added the environment in this process, so that no other knows it.

    Example:
        >>> is_registered_here("frozen_lake")
        False
    """
    return ":" not in name and find_env(name) in _registered.values()


def list_envs() -> tuple[EnvSpec, ...]:
    """All environments that a config can name, sorted."""
    rows = {
        _normal(spec.name): spec
        for spec in (*_BUILT_IN, *_from_entry_points(), *_registered.values())
    }
    return tuple(sorted(rows.values(), key=lambda spec: spec.name))


def find_env(name: str) -> EnvSpec:
    """The row for a name or alias (ignoring case, "_" and "-"), or a new row for module:Class.

    NAME:TEXT names one environment of a row with many; a url names a served environment.

    Example:
        >>> find_env("frozen-lakes")
        Traceback (most recent call last):
        turnwise.envs.registry.UnknownEnvError: no environment is called 'frozen-lakes'; did you mean frozen_lake?
    """  # noqa: E501
    if name.startswith(("http://", "https://")):
        name = f"remote:{name}"
    first, separator, rest = name.partition(":")
    if separator:
        several = {_normal(spec.name): spec for spec in list_envs() if spec.selects is not None}
        spec = several.get(_normal(first))
        if spec is None:
            return EnvSpec(name=name, target=name)
        assert spec.selects is not None
        return replace(spec, name=f"{spec.name}:{rest}", given={spec.selects: rest})
    table: dict[str, EnvSpec] = {}
    for spec in list_envs():
        for alias in spec.aliases:
            table.setdefault(_normal(alias), spec)
    table |= {_normal(spec.name): spec for spec in list_envs()}
    if _normal(name) in table:
        return table[_normal(name)]
    near = get_close_matches(_normal(name), table, n=3, cutoff=0.5)
    if name.endswith(".py"):
        hint = f"a file of your own is named with its class, as in {name}:MyEnv"
    elif near:
        hint = f"did you mean {' or '.join(dict.fromkeys(table[key].name for key in near))}?"
    else:
        hint = f"there are {', '.join(spec.name for spec in list_envs())}, or write module:Class"
    raise UnknownEnvError(f"no environment is called {name!r}; {hint}")


def make(name: str, options: Mapping[str, Any] | None = None) -> object:
    """The environment object as its author wrote it, built with `options` as keyword arguments.

    Example:
        >>> type(make("Bandit", {"low": 0.1})).__name__
        'Bandit'

    Raises:
        UnknownEnvError: nothing has that name.
        EnvOptionsError: the options are not those of the environment.
        EnvNotMadeError: its own code raised.
    """
    spec = find_env(name)
    if spec.missing:
        raise ImportError(
            f"environment {spec.name!r} needs {', '.join(spec.missing)}, not installed; run: pip "
            "install "
            f"'{spec.install}'"
        )
    factory = _load(spec.target) if isinstance(spec.target, str) else spec.target
    options = {**spec.given, **(options or {})}
    if spec.selects is not None and spec.selects not in options:
        raise EnvOptionsError(
            f"environment {spec.name!r} has many variants: choose one with the option "
            f"{spec.selects!r}, or as "
            f"{spec.name}:..., where ... is its {spec.selects}"
        )
    _check_options(spec.name, factory, options)
    try:
        return factory(**options)
    except EnvError as error:
        if is_ours(spec.name):  # about a file that its options name
            raise EnvOptionsError(str(error)) from error
        raise
    except (ValueError, ImportError):  # which say what to do
        raise
    except Exception as error:
        raise EnvNotMadeError(raised_at(error)) from error


def make_env(config: EnvConfig, *, max_turn: int | None = None) -> Env:
    """The environment that a config names, as an Env.

    `max_turn` is the run's limit on turns, if the environment's config has none.

    Example:
        >>> env = make_env(EnvConfig(name="bandit"))
        >>> env.make_task(3, "train").id
        'bandit/train/3'
    """
    from turnwise.envs.adapters import as_env

    if config.max_turn is None and max_turn is not None:
        config = config.model_copy(update={"max_turn": max_turn})
    name = config.name if ":" in config.name else find_env(config.name).name

    def build() -> Env | Exception:
        try:
            made = make(config.name, config.options)
            if isinstance(made, SharedEnv):
                refuse_local_settings(config)
            return as_env(made, config=config, name=name)
        except Exception as error:
            return error

    found = ask(f"{name}: making it", build)  # a SystemExit of the user's would end the program
    if issubclass(type(found), Exception):
        raise cast(Exception, found)
    return cast(Env, found)


def is_ours(name: str) -> bool:
    """True if the environment comes with turnwise.

    Example:
        >>> is_ours("bandit"), is_ours("gymnasium:CartPole-v1"), is_ours("mine.py:Env")
        (True, False, False)
    """
    target = find_env(name).target
    return isinstance(target, str) and target.startswith("turnwise.envs.games.")


def built_in(spec: EnvSpec) -> bool:
    """True if a row is in turnwise's own table, including rows of other libraries.

    Example:
        >>> built_in(find_env("gymnasium:CartPole-v1")), built_in(find_env("os:system"))
        (True, False)
    """
    return any((spec.target, spec.selects) == (row.target, row.selects) for row in _BUILT_IN)


def is_remote(name: str) -> bool:
    """True if the environment is served by another process.

    Example:
        >>> is_remote("http://10.0.0.7:8765"), is_remote("bandit")
        (True, False)
    """
    return find_env(name).name.startswith("remote")


def is_program(name: str) -> bool:
    """Whether the environment is a program that calls the model.

    Example:
        >>> is_program("agent:solve.py:solve"), is_program("bandit")
        (True, False)
    """
    return find_env(name).target in (AGENT, COMMAND)


def refuse_local_settings(config: EnvConfig) -> None:
    """Raises if a config sets a key that only the server can apply. Reward normalisation is applied
    here.

    Example:
        >>> refuse_local_settings(EnvConfig(name="http://host:1", system_prompt="Play well."))
        Traceback (most recent call last):
        ValueError: env.system_prompt has no effect on a remote environment; give it to `turnwise serve-env` instead
    """  # noqa: E501
    default = EnvConfig().model_dump()
    for key, value in config.model_dump().items():
        if key not in _LOCAL_SETTINGS and value != default[key]:
            raise ValueError(
                f"env.{key} has no effect on a remote environment; give it to `turnwise serve-env` "
                "instead"
            )
    for key in ("turn_cost", "potential_coef", "clip"):
        if config.shaping.model_dump()[key] != default["shaping"][key]:
            raise ValueError(
                f"env.shaping.{key} has no effect on a remote environment; give it to `turnwise "
                "serve-env` instead"
            )


def _normal(name: str) -> str:
    return name.replace("_", "").replace("-", "").replace(" ", "").casefold()


@cache
def _from_entry_points() -> tuple[EnvSpec, ...]:
    return tuple(
        EnvSpec(
            name=point.name,
            target=point.value,
            summary=f"from {point.dist.name}" if point.dist else "",
        )
        for point in entry_points(group=ENTRY_POINT_GROUP)
    )


def _load(target: str) -> Callable[..., Any]:
    try:
        return load_named(target)
    except UnknownNameError as error:
        raise UnknownEnvError(str(error)) from error
    except Exception as error:
        raise EnvNotMadeError(raised_at(error)) from error


def _check_options(name: str, factory: Callable[..., Any], options: Mapping[str, Any]) -> None:
    parameters = inspect.signature(factory).parameters.values()
    named = [one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    known = [one.name for one in named]
    for key in () if any(one.kind is one.VAR_KEYWORD for one in parameters) else options:
        if key not in known:
            near = get_close_matches(key, known, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known) or 'none'}"
            raise EnvOptionsError(f"environment {name!r} has no option {key!r}; {hint}")
    missing = [one.name for one in named if one.default is one.empty and one.name not in options]
    if missing:
        settings = " and ".join(f"env.options.{key}" for key in missing)
        raise EnvOptionsError(f"environment {name!r} cannot do without {settings}; set it")
