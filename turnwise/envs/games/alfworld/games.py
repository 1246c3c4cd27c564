"""Games of ALFWorld as rows of JSON: what a game is, how its task is worded, how files of them are
read and written."""

import gzip
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal, cast

from turnwise.envs.games.alfworld.engine import PlainEngine
from turnwise.envs.games.alfworld.pddl import parse_problem
from turnwise.envs.games.alfworld.world import World, build_world
from turnwise.json_lines import read_json, read_json_lines, read_text

TaskText = Literal["template", "human"]

TASKS: Mapping[str, tuple[str, str]] = {
    "pick_and_place_simple": ("put a {obj} in {recep}", "put some {obj} on {recep}"),
    "look_at_obj_in_light": (
        "look at {obj} under the {toggle}",
        "examine the {obj} with the {toggle}",
    ),
    "pick_clean_then_place_in_recep": (
        "put a clean {obj} in {recep}",
        "clean some {obj} and put it in {recep}",
    ),
    "pick_heat_then_place_in_recep": (
        "put a hot {obj} in {recep}",
        "heat some {obj} and put it in {recep}",
    ),
    "pick_cool_then_place_in_recep": (
        "put a cool {obj} in {recep}",
        "cool some {obj} and put it in {recep}",
    ),
    "pick_two_obj_and_place": (
        "put two {obj} in {recep}",
        "find two {obj} and put them in {recep}",
    ),
}
"""The six kinds of task, each with its two wordings."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Game:
    """One game: a room, what lies where, and a task.

    Example:
        >>> game = Game(id="t/1", split="train", task_type="pick_and_place_simple",
        ...     object_target="Mug",
        ...     parent_target="Shelf", pddl_problem="(define)")
        >>> game.wording(0), game.wording(1)
        ('put a mug in shelf', 'put some mug on shelf')
    """

    id: str
    """Unique among the games of a file."""
    split: str
    """"train", or the name of a held-out split such as "valid_unseen"."""
    task_type: str
    """One of `TASKS`."""
    object_target: str
    """The type of object to bring or to look at."""
    parent_target: str = ""
    """The type of receptacle to bring it to; empty where the task has none."""
    toggle_target: str = ""
    """The type of lamp to look at it by; empty where the task has none."""
    pddl_problem: str
    """Objects, initial facts and goal."""
    walkthrough: tuple[str, ...] = ()
    """Commands that reach the goal, where they are known."""
    human_tasks: tuple[str, ...] = ()
    """The task in people's own words, where there are any."""
    floor_plan: str = ""

    def wording(self, variant: int) -> str:
        """The task by template."""
        template = TASKS[self.task_type][variant % 2]
        obj, recep, toggle = (
            self.object_target.lower(),
            self.parent_target.lower(),
            self.toggle_target.lower(),
        )
        return template.format(obj=obj, recep=recep, toggle=toggle)

    def task(self, *, wording: TaskText = "template") -> str:
        """The task, always in the same words for the same game: which wording it gets is a digest
        of its id.

        "human" falls back on the template where the task has no human description.
        """
        digest = int.from_bytes(hashlib.blake2b(self.id.encode(), digest_size=4).digest(), "big")
        if wording == "human" and self.human_tasks:
            return self.human_tasks[digest % len(self.human_tasks)].strip().rstrip(".")
        return self.wording(digest)

    def engine(self, *, task: str | None = None) -> PlainEngine:
        """The plain engine at the start of this game."""
        return PlainEngine(world_of(self), task=self.task() if task is None else task)

    def to_row(self) -> dict[str, Any]:
        """The game in the form of `load_games`."""
        name, _, trial = self.id.partition("/")
        return {
            "split": self.split,
            "task": name,
            "trial": trial,
            "task_type": self.task_type,
            "pddl_params": {
                "object_target": self.object_target,
                "parent_target": self.parent_target,
                "toggle_target": self.toggle_target,
                "mrecep_target": "",
                "object_sliced": False,
            },
            "scene": {"floor_plan": self.floor_plan},
            "human_task_descs": list(self.human_tasks),
            "pddl_problem": self.pddl_problem,
            "walkthrough": list(self.walkthrough),
        }

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> "Game":
        """The game of one row. Raises ValueError where a field is missing or the task is not one of
        `TASKS`."""
        if not isinstance(row, dict):
            raise ValueError(f"a game's row is a JSON object, got {type(row).__name__}")
        missing = [
            key
            for key in ("split", "task", "trial", "task_type", "pddl_params", "pddl_problem")
            if key not in row
        ]
        if missing:
            raise ValueError(f"a game's row has the fields {missing} too, got only {sorted(row)}")
        if row["task_type"] not in TASKS:
            raise ValueError(
                f"a game's task_type is one of {sorted(TASKS)}, got {row['task_type']!r}"
            )
        params = cast(Mapping[str, Any], row["pddl_params"])
        if params.get("object_sliced"):
            raise ValueError(
                f"games with sliced objects are not played, {row['task']}/{row['trial']} has one"
            )
        scene = cast(Mapping[str, Any], row.get("scene") or {})
        return cls(
            id=f"{row['task']}/{row['trial']}",
            split=str(row["split"]),
            task_type=row["task_type"],
            object_target=str(params["object_target"]),
            parent_target=str(params.get("parent_target") or ""),
            toggle_target=str(params.get("toggle_target") or ""),
            pddl_problem=row["pddl_problem"],
            walkthrough=tuple(map(str, row.get("walkthrough") or ())),
            human_tasks=tuple(map(str, row.get("human_task_descs") or ())),
            floor_plan=str(scene.get("floor_plan", "")),
        )


def world_of(game: Game) -> World:
    """The tables of a game, kept for the games played last."""
    return _world(game.pddl_problem)


@lru_cache(maxsize=256)
def _world(problem: str) -> World:
    return build_world(parse_problem(problem))


def load_games(path: str | Path) -> tuple[Game, ...]:
    """The games of a JSON-lines file, gzipped or not, in its order; or of a folder, as
    alfworld-download lays it out.

    Raises ValueError with the number of the line (or the file) that is not a game, or where two
    games share an id.
    """
    source = Path(path)
    if not source.exists():
        raise FileNotFoundError(
            "games are read from a JSON-lines file (.jsonl, .jsonl.gz) or a folder of games, "
            f"there is none at {source}"
        )
    games: dict[str, Game] = {}
    for where, game in _folder_games(source) if source.is_dir() else _file_games(source):
        if game.id in games:
            raise ValueError(f"{where}: games have different ids, {game.id!r} is there twice")
        games[game.id] = game
    if not games:
        raise ValueError(f"there is at least one game in what is loaded, {source} has none")
    return tuple(games.values())


def _file_games(file: Path) -> Iterator[tuple[str, Game]]:
    for number, game in read_json_lines(file, Game.from_row):
        yield f"{file}, line {number}", game


def _folder_games(folder: Path) -> Iterator[tuple[str, Game]]:
    """The game of each folder SPLIT/TASK/TRIAL that holds one, without the tasks that ALFWorld
    leaves out."""
    for file in sorted(folder.glob("**/traj_data.json")):
        trial = file.parent
        game_file, problem_file = trial / "game.tw-pddl", trial / "initial_state.pddl"
        left_out = "movable" in trial.parent.name or "Sliced" in trial.parent.name
        if left_out or not (game_file.is_file() or problem_file.is_file()):
            continue
        game = read_json(game_file, dict[str, Any]) if game_file.is_file() else {}
        if game.get("solvable") is False:
            continue
        yield str(file), read_json(file, partial(_game_of, trial=trial, played=game))


def _game_of(about: Mapping[str, Any], *, trial: Path, played: Mapping[str, Any]) -> Game:
    notes = about.get("turk_annotations", {}).get("anns", ())
    problem = played.get("pddl_problem") or read_text(trial / "initial_state.pddl")
    return Game.from_row(
        {
            "split": trial.parent.parent.name,
            "task": trial.parent.name,
            "trial": trial.name,
            "task_type": about["task_type"],
            "pddl_params": about["pddl_params"],
            "scene": about.get("scene"),
            "human_task_descs": [note["task_desc"] for note in notes],
            "pddl_problem": problem,
            "walkthrough": played.get("walkthrough"),
        }
    )


def save_games(path: str | Path, *, games: Iterable[Game]) -> None:
    """Writes games as JSON lines, gzipped where the name ends in .gz."""
    file = Path(path)
    with (
        gzip.open(file, "wt", encoding="utf-8")
        if file.suffix == ".gz"
        else file.open("w", encoding="utf-8") as out
    ):
        for game in games:
            out.write(json.dumps(game.to_row(), ensure_ascii=False) + "\n")
