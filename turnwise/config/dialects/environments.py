"""Other projects' environments: ours of the same rules, with their defaults and option names."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from turnwise.config.dialects.rules import AnyRule, Differs, Note, Only, Rule, choice
from turnwise.config.tree import Tree, is_tree

SHOP_DATA = (
    "without env.options.products, a folder with WebShop's files, the shop is the sample that "
    "comes with turnwise"
)
_GAMES = "without env.options.games, a file of games, games are made up; see docs/envs/alfworld.md"
_ELSEWHERE = {
    "search": "a ToolEnv with a search tool comes nearest: docs/envs/tools.md",
}
_ABSENT = ("deepcoder", "lean", "spatial", "static", "discoveryworld", "appworld", "gym_cards")


def no_env(name: str) -> str:
    """Why another project's environment cannot be played."""
    hint = _ELSEWHERE.get(name, "name one of your own as file.py:Class, see docs/environments.md")
    return f"turnwise has no environment {name!r}; {hint}"


def verl_agent_env(name: Any) -> Any:
    """Our name of verl-agent's environment."""
    family = str(name).partition("/")[0].casefold()
    if family in ("alfworld", "webshop", "sokoban") and not str(name).endswith("AlfredThorEnv"):
        return family
    if family == "alfworld":
        raise ValueError("environments show text, not images: use alfworld/AlfredTWEnv")
    if family in _ABSENT or family in _ELSEWHERE:
        raise ValueError(no_env(family))
    return name


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """RAGEN's environment of one `env_type`."""

    name: str
    """Ours."""
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """RAGEN's defaults where ours differ, under our names."""
    options: Mapping[str, AnyRule] = field(default_factory=dict[str, AnyRule])
    """Keys of env_config that are called otherwise here; the others keep their names."""


_OF_LAKES = {"grid": "grid", "coord": "coordinates", "grid_coord": "both"}
_TEXT = Only("text", why="environments show text, not images")
_NAMES = Differs(why="arms have turnwise's own names, other ones for validation")
_MOVES = Only(None, why="actions have names, not numbers")
_CELLS = ("wall", "floor", "target", "box_on_target", "box", "player", "player_on_target")


def _vocabulary(value: Any) -> Any:
    """RAGEN numbers the cells; ours have names."""
    if not is_tree(value):
        raise ValueError(f"must be the symbols by number, got {value!r}")
    found = {int(number): symbol for number, symbol in cast(Tree, value).items()}
    return {name: found[number] for number, name in enumerate(_CELLS) if number in found}


KINDS: dict[str, Kind] = {
    "sokoban": Kind(
        name="sokoban",
        defaults={"num_boxes": 3},
        options={
            "dim_room": "dim",
            "observation_format": "observation",
            "render_mode": _TEXT,
            "grid_lookup": Rule(to=("vocabulary",), convert=_vocabulary),
            "grid_vocab": Differs(why="the legend is made from the symbols"),
        },
    ),
    "frozen_lake": Kind(
        name="frozen_lake",
        defaults={"p": 0.9, "success_rate": 0.8, "random_goal": True},
        options={
            "observation_format": Rule(to=("observation",), convert=choice(_OF_LAKES)),
            "render_mode": _TEXT,
        },
    ),
    "bandit": Kind(
        name="bandit",
        defaults={"low": 0.1},
        options={
            "lo_arm_score": "low",
            "hi_arm_hiscore": "high",
            "hi_arm_hiscore_prob": "chance",
            "hi_arm_loscore": Only(0.0, why="the daring arm pays nothing where it fails"),
            "split": _NAMES,
            "render_mode": _TEXT,
        },
    ),
    "countdown": Kind(
        name="countdown",
        defaults={"operators": "+-"},
        options={
            "train_path": Differs(why="instances are made from the seed, without a file"),
            "max_instances": Differs(why="instances are made from the seed, without end"),
            "score": "right",
            "format_score": "almost",
            "render_mode": _TEXT,
        },
    ),
    "metamathqa": Kind(
        name="math_qa",
        defaults={"data": "hf:meta-math/MetaMathQA:train"},
        options={
            "dataset_path": Rule(to=("data",), convert=lambda path: f"hf:{path}"),
            "cache_dir": Differs(why="set the environment variable HF_HOME"),
            "split": Differs(why="write it behind the data set: env.options.data = hf:NAME:SPLIT"),
        },
    ),
    "webshop": Kind(
        name="webshop",
        defaults={"reward": "success"},
        options={
            "dataset": Differs(why=SHOP_DATA),
            "file_path": "products",
            "observation_mode": Only("text", why="pages are shown as text"),
            "show_attrs": "show_attributes",
            "human_goals": Rule(
                to=("goals",), convert=lambda human: "human" if human else "synthetic"
            ),
        },
    ),
    "sudoku": Kind(
        name="sudoku",
        options={
            "show_conflicts": Differs(why="a number that breaks a rule is never placed"),
            "show_candidates": Differs(why="see show_valid_numbers"),
            "render_mode": _TEXT,
        },
    ),
    "game_2048": Kind(name="game_2048", options={"render_mode": _TEXT, "action_lookup": _MOVES}),
    "rubikscube": Kind(name="rubikscube", options={"render_mode": _TEXT, "action_lookup": _MOVES}),
    "alfworld": Kind(name="alfworld", options={"eval_dataset": Differs(why=_GAMES)}),
}

_KEYS = ("env_type", "max_actions_per_traj", "env_instruction", "env_config")
_ASIDE: dict[str, str] = {
    "max_tokens": "a number in the prompt there; replies are bounded by "
    "rollout.max_response_tokens",
    "parallel_friendly": "environments run where rollout.isolation says",
    "max_workers": "environments run where rollout.isolation says; see rollout.num_workers",
}


def custom_env(tag: str, keys: Mapping[str, Any], note: Note) -> tuple[Tree, list[str]]:
    """(settings of `envs.TAG`, what is wrong) of an entry of RAGEN's custom_envs."""
    problems = [
        f"custom_envs.{tag}.{key} means nothing here; an environment's keys are "
        f"{', '.join((*_KEYS, *_ASIDE))}"
        for key in keys
        if key not in _KEYS and key not in _ASIDE
    ]
    for key in (key for key in keys if key in _ASIDE):
        note(f"custom_envs.{tag}.{key}", _ASIDE[key], moot=True)
    named = keys.get("env_type")
    if isinstance(named, str) and (named in _ABSENT or named in _ELSEWHERE):
        return {}, [*problems, f"custom_envs.{tag}.env_type: {no_env(named)}"]
    kind = KINDS.get(str(named)) or Kind(name="" if named is None else str(named))
    env: Tree = {"name": kind.name} if kind.name else {}
    if (limit := keys.get("max_actions_per_traj")) is not None:
        env["max_actions_per_episode"] = limit
    if keys.get("env_instruction"):  # empty: the environment's own
        env["system_prompt"] = keys["env_instruction"]
    given: Any = keys.get("env_config") or Tree()
    if not is_tree(given):
        return {}, [*problems, f"custom_envs.{tag}.env_config: must hold options, got {given!r}"]
    options: Tree = dict(kind.defaults)
    for key, value in _arms_and_sides(cast(Tree, given)).items():
        path = f"custom_envs.{tag}.env_config.{key}"
        match kind.options.get(key, key):
            case str() as name:
                options[name] = value
            case Rule() as rule:
                try:
                    options[rule.to[0]] = rule.convert(value)
                except ValueError as error:
                    problems.append(f"{path}: {error}")
            case Only() as only if not only.accepts(value):
                problems.append(f"{path}: {value!r} means nothing here: {only.why}")
            case Differs() as differs:
                note(path, differs.why)
            case _:
                pass
    return env | ({"options": options} if options else {}), problems


def _arms_and_sides(options: Mapping[str, Any]) -> Tree:
    """Pairs of keys that are one option here: a bandit's two arms, a room's two sides."""
    found = dict(options)
    for first, second, ours in (("lo_arm_name", "hi_arm_name", "arms"), ("dim_x", "dim_y", "dim")):
        if first in found and second in found:
            found[ours] = [found.pop(first), found.pop(second)]
    return found
