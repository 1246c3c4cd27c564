# pyright: reportUnknownVariableType=false
"""Gymnasium's environments as text: `gymnasium:Taxi`, or any other id with discrete actions."""

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

from turnwise.envs.base import BaseEnv
from turnwise.integrations.envs.common import (
    SplitBy,
    load_function,
    require,
    split_rule,
    start_in_split,
    unknown_name,
)
from turnwise.seeding import derive_seed

Observe = Callable[[Any, Any], str]

ACTIONS: Mapping[str, tuple[str, ...]] = {
    "Taxi": ("south", "north", "east", "west", "pickup", "dropoff"),
    "FrozenLake": ("left", "down", "right", "up"),
    "FrozenLake8x8": ("left", "down", "right", "up"),
    "CliffWalking": ("up", "right", "down", "left"),
    "CliffWalkingSlippery": ("up", "right", "down", "left"),
    "Blackjack": ("stick", "hit"),
    "CartPole": ("left", "right"),
    "MountainCar": ("left", "none", "right"),
    "Acrobot": ("negative", "none", "positive"),
    "LunarLander": ("none", "left", "main", "right"),
}
"""Names of the actions by the id without its version. Elsewhere actions are numbers, unless the
option names them."""


class GymnasiumEnv(BaseEnv):
    """A Gymnasium environment by id, with discrete actions and observations written as text.
    `envs.any_object.ObjectEnv` adapts an environment that the caller has made.

    `seed` is passed to Gymnasium's reset and decides the initial state. Later randomness comes from
    `noise_seed`: the members of a group start in the same state and then differ.

    Args:
        id: Gymnasium's id, such as CartPole-v1; without a version the newest one.
        observe: what makes text of (observation, environment): a function, or module:function.
            None: a description of Taxi, FrozenLake, CliffWalking and Blackjack, and the numbers by
            name of the space elsewhere.
        actions: the actions' names in Gymnasium's order. None: well-known ones, or numbers.
        instruction: what the model is told. None: the first paragraph of the environment's own
            description.
        kwargs: keyword arguments of `gymnasium.make`.
        split_by: `opening` keeps any opening from being in both splits, at the price of several
            resets for one start; `seed` takes one reset.

    Example:
        >>> cliff = GymnasiumEnv("CliffWalking")
        >>> print(cliff.reset(seed=1)[0])
        You stand at row 3, column 0 of 4 rows and 12 columns. The goal is at row 3, column 11.
        >>> cliff.step("up")[1]
        -1.0
    """

    def __init__(
        self,
        id: str,
        *,
        observe: str | Observe | None = None,
        actions: Sequence[str] | None = None,
        instruction: str | None = None,
        kwargs: Mapping[str, Any] | None = None,
        split_by: str = "opening",
    ) -> None:
        gymnasium = require("gymnasium", extra="dev")
        base = id.rpartition("/")[2].partition("-v")[0]
        settings = {"disable_env_checker": True} | dict(kwargs or {})
        self._env = gymnasium.make(_resolve(id, gymnasium.registry), **settings)
        space = self._env.action_space
        if not isinstance(space, gymnasium.spaces.Discrete):
            self._env.close()
            raise ValueError(
                f"{id} has actions of {space}; turnwise takes discrete ones, wrap the environment "
                "first"
            )
        self._first = int(space.start)
        names = ACTIONS.get(base) if actions is None else tuple(actions)
        if names is None or (actions is None and len(names) != space.n):
            names = tuple(str(self._first + index) for index in range(int(space.n)))
        if len(names) != space.n or len(set(names)) != len(names):
            raise ValueError(
                f"{id} has {space.n} actions, and names must be as many and different, got {names}"
            )
        self.actions = names
        named = OBSERVERS.get(base, describe) if observe is None else observe
        self._observe = load_function(named, option="observe")
        self.instruction = _introduction(self._env, id) if instruction is None else instruction
        self._split_by: SplitBy = split_rule(split_by)
        self._text = ""

    def reset(
        self, seed: int | None = None, *, noise_seed: int = 0, split: str = "train", **kwargs: Any
    ) -> tuple[str, dict[str, Any]]:
        info: dict[str, Any] = {}

        def start(number: int) -> str:
            observation, found = self._env.reset(seed=number, options=kwargs or None)
            info.clear()
            info.update(found)
            return self._observe(observation, self._env.unwrapped)

        self._text = start_in_split(start, seed or 0, split, by=self._split_by)
        # A group shares its initial state, and from here on each member has a generator of its own.
        noise = derive_seed(seed or 0, "gymnasium/noise", noise_seed)
        self._env.unwrapped.np_random = require("gymnasium.utils.seeding", extra="dev").np_random(
            noise
        )[0]
        return self._text, info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        number = self._first + self.actions.index(action)
        observation, reward, terminated, truncated, info = self._env.step(number)
        self._text = self._observe(observation, self._env.unwrapped)
        ended = bool(terminated)
        return self._text, float(reward), ended, bool(truncated) and not ended, dict(info)

    def render(self) -> str:
        return self._text

    def random_action(self, rng: Random) -> str:
        return rng.choice(self.actions)

    def close(self) -> None:
        self._env.close()


def _resolve(id: str, registry: Mapping[str, Any]) -> str:
    """The registered id. An id with a module in front (my_package:MyEnv-v0) is left to Gymnasium,
    which imports it."""
    if id in registry or ":" in id:
        return id
    versions = [
        int(name[len(id) + 2 :])
        for name in registry
        if name.startswith(f"{id}-v") and name[-1].isdigit()
    ]
    if not versions:
        raise unknown_name("gymnasium", id, sorted(registry))
    return f"{id}-v{max(versions)}"


def describe(observation: Any, env: Any) -> str:
    """The observation in plain words and numbers, by the kind of its space.

    Example:
        >>> from types import SimpleNamespace
        >>> from gymnasium.spaces import Box, Dict, Discrete
        >>> import numpy as np
        >>> space = Dict({"where": Discrete(5), "wind": Box(-1.0, 1.0, (2,))})
        >>> describe({"where": 3, "wind": np.array([0.5, -0.25])},
        ...     SimpleNamespace(observation_space=space))
        'where: 3, wind: [0.5, -0.25]'
    """
    return _words(observation)


def _words(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_words(item)}" for key, item in value.items())
    if isinstance(value, tuple | list):
        return "(" + ", ".join(_words(item) for item in value) + ")"
    if type(value).__module__ == "numpy":
        return _words_of_list(value.tolist())
    return _words_of_list(value)


def _words_of_list(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_words_of_list(item) for item in value) + "]"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _taxi(observation: Any, env: Any) -> str:
    row, column, passenger, destination = env.decode(int(observation))
    stands = [
        f"{name} (row {r}, column {c})" for name, (r, c) in zip("RGYB", env.locs, strict=True)
    ]
    rider = "Passenger in the taxi" if passenger == 4 else f"Passenger at {stands[passenger]}"
    return f"Taxi at row {row}, column {column}. {rider}. Destination: {stands[destination]}."


def _grid_lake(observation: Any, env: Any) -> str:
    rows = [[cell.decode() for cell in row] for row in env.desc]
    here = divmod(int(observation), env.ncol)
    signs = {"S": "_", "F": "_", "H": "O", "G": "G"}
    lines = [[signs[cell] for cell in row] for row in rows]
    lines[here[0]][here[1]] = {"H": "X", "G": "V"}.get(rows[here[0]][here[1]], "P")
    return "\n".join(" ".join(line) for line in lines)


def _cliff(observation: Any, env: Any) -> str:
    row, column = divmod(int(observation), 12)
    return (
        f"You stand at row {row}, column {column} of 4 rows and 12 columns. The goal is at row 3, "
        "column 11."
    )


def _blackjack(observation: Any, env: Any) -> str:
    total, dealer, ace = observation
    usable = " with a usable ace" if ace else ""
    return f"Your hand counts {int(total)}{usable}. The dealer shows {int(dealer)}."


OBSERVERS: Mapping[str, Observe] = {
    "Taxi": _taxi,
    "FrozenLake": _grid_lake,
    "FrozenLake8x8": _grid_lake,
    "CliffWalking": _cliff,
    "CliffWalkingSlippery": _cliff,
    "Blackjack": _blackjack,
}
_LAKE = "Walk on the frozen lake to the goal and avoid the holes. P you, _ ice, O hole, G goal."
INTRODUCTIONS: Mapping[str, str] = {
    "Taxi": (
        "Drive the taxi on a 5x5 grid with walls: fetch the passenger and bring them to the "
        "destination. A step costs 1, delivering pays 20, a wrong pickup or dropoff costs 10."
    ),
    "FrozenLake": _LAKE,
    "FrozenLake8x8": _LAKE,
    "CliffWalking": (
        "Walk to the goal. The cliff is row 3, columns 1 to 10: stepping there costs 100 and puts "
        "you back at the start (row 3, column 0). A step costs 1."
    ),
    "Blackjack": "Get closer to 21 than the dealer without going over.",
}


def _introduction(env: Any, id: str) -> str:
    base = id.rpartition("/")[2].partition("-v")[0]
    if base in INTRODUCTIONS:
        return INTRODUCTIONS[base]
    text = (type(env.unwrapped).__doc__ or "").strip()
    paragraphs = [
        part for part in text.split("\n\n") if part.strip() and not part.strip().startswith("#")
    ]
    return " ".join(paragraphs[0].split()) if paragraphs else f"You are in the environment {id}."
