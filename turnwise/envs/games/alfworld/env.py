"""ALFWorld as an environment: household tasks in text, by commands such as "take mug 1 from shelf
2"."""

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any, Literal

from turnwise.envs.base import BaseEnv, EnvError
from turnwise.envs.games.alfworld.check import make_engine
from turnwise.envs.games.alfworld.engine import Engine, Frame, PlainEngine
from turnwise.envs.games.alfworld.games import TASKS, Game, TaskText, load_games
from turnwise.envs.games.alfworld.generate import GameMaker
from turnwise.envs.games.alfworld.planner import find_plan
from turnwise.envs.games.alfworld.rooms import load_plans, sample_plans
from turnwise.envs.games.alfworld.search import Memory, next_command
from turnwise.envs.games.alfworld.thoughts import thought
from turnwise.seeding import derive_seed

EngineName = Literal["plain", "textworld"]
_LONGEST_COMMAND = 200


class AlfWorldEnv(BaseEnv):
    """A household in text. Winning pays `win_reward` and ends the episode; `max_steps` commands
    truncate it.

    Games come from a file of games, from floor plans (endless made games), or, with neither, from
    the project's own twenty rooms. Without a file, "train" and "val" games never share a room; with
    one, they never share a game. With both, training games are made on floor plans, and validation
    plays the file's: their rooms are not used for training.

    Example:
        >>> env = AlfWorldEnv()
        >>> text, info = env.reset(seed=3)
        >>> text.splitlines()[-1][:19], len(info["admissible_commands"]) > 5
        ('Admissible actions:', True)
        >>> env.step("sing a song")[0].splitlines()[0]
        'Nothing happens.'
    """

    instruction = (
        "You are in a house and have a task to do there. Walk from one piece of furniture to the "
        "next, open what is "
        "closed, pick things up one at a time, use what you find, and bring things where they "
        "belong. Answer with one "
        "command, such as: go to shelf 1, open drawer 2, take mug 1 from shelf 1, move mug 1 to "
        "desk 1, "
        "clean apple 1 with sinkbasin 1, heat egg 1 with microwave 1, cool egg 1 with fridge 1, "
        "use desklamp 1, look."
    )
    expert = "searching player"

    def __init__(
        self,
        *,
        games: str | None = None,
        floorplans: str | None = None,
        engine: EngineName = "plain",
        task_types: Sequence[str] = tuple(TASKS),
        task_text: TaskText = "template",
        val_split: str | None = None,
        max_steps: int = 50,
        win_reward: float = 10.0,
        show_admissible: bool = True,
    ) -> None:
        """`games`: a JSON-lines file of games. `floorplans`: a JSON file of rooms to make games on.

        `val_split` names the file's split that "val" stands for; None takes all that are not
        "train".
        """
        if engine not in ("plain", "textworld"):
            raise ValueError(f"engine is 'plain' or 'textworld', got {engine!r}")
        if engine == "textworld":
            from turnwise.envs.games.alfworld.textworld import require_original

            require_original()  # fails before the run begins, not in its first episode
        if task_text not in ("template", "human"):
            raise ValueError(f"task_text is 'template' or 'human', got {task_text!r}")
        if max_steps < 1:
            raise ValueError(f"max_steps is at least 1, got {max_steps}")
        self._task_types = tuple(task_types)
        self._floorplans = floorplans
        self._splits: dict[str, tuple[Game, ...]] = {}
        """The games of the file. Those of a split that is not here are made."""
        self._without: tuple[str, ...] = ()
        """Rooms that no game is made in."""
        if games is not None:
            source = Path(games)
            stamp = source.stat().st_mtime_ns if source.exists() else 0
            chosen = [game for game in _games(games, stamp) if game.task_type in self._task_types]
            if floorplans is None:
                self._splits = split_games(chosen, val_split=val_split)
            else:
                self._splits = {"val": held_out_games(chosen, val_split=val_split)}
                self._without = rooms_of(self._splits["val"])
        if games is None or floorplans is not None:
            _maker(floorplans, self._task_types, self._without)
        self._engine_name: EngineName = engine
        self._task_text: TaskText = task_text
        self._max_steps, self._win_reward, self._show_admissible = (
            max_steps,
            win_reward,
            show_admissible,
        )
        self._game: Game | None = None
        self._engine: Engine | None = None
        self._frame: Frame | None = None
        self._steps = 0
        self._seed = 0
        self._over = True
        self._memory = Memory()

    def reset(
        self,
        seed: int | None = None,
        *,
        split: str = "train",
        game_id: str | None = None,
        **kwargs: Any,
    ) -> tuple[str, dict[str, Any]]:
        """The game number `seed` of the split (counted round and round in a file), or the file's
        game `game_id`."""
        if kwargs:
            raise EnvError(
                f"alfworld's reset takes seed, split and game_id, got {sorted(kwargs)} too"
            )
        game = self._choose(seed or 0, split=split, game_id=game_id)
        if self._engine is None or game != self._game:
            self.close()
            task = game.task(wording=self._task_text)
            self._engine, self._game = make_engine(game, engine=self._engine_name, task=task), game
        self._frame = self._engine.reset()
        self._steps = 0
        self._seed = seed or 0
        self._over = False
        self._memory = Memory()
        return self._text(self._frame), {
            **self._info(self._frame),
            "game": game.id,
            "task_type": game.task_type,
        }

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Plays one command. Case and surplus spaces do not matter; what is not admissible changes
        nothing."""
        if self._over or self._engine is None or self._frame is None:
            raise EnvError("alfworld: step needs a running episode; call reset first")
        command = " ".join(action[: 2 * _LONGEST_COMMAND].lower().split())[:_LONGEST_COMMAND]
        valid = command in self._frame.commands
        self._frame = self._engine.step(command)
        if isinstance(self._engine, PlainEngine):
            self._memory.note(command, engine=self._engine, valid=valid)
        self._steps += 1
        won = self._frame.won
        truncated = not won and self._steps >= self._max_steps
        self._over = won or truncated
        info = {**self._info(self._frame), "action_is_valid": valid}
        return self._text(self._frame), self._win_reward * won, won, truncated, info

    def render(self) -> str:
        """The last thing that was shown, and the commands one per line."""
        return (
            ""
            if self._frame is None
            else "\n".join([self._frame.text, *(f"  {c}" for c in self._frame.commands)])
        )

    def state_key(self) -> str | None:
        return None if self._engine is None else self._engine.state_key()

    def potential(self) -> float | None:
        """Minus the share of `win_reward` that the commands still needed are of `max_steps`; plain
        engine only.

        It falls to -win_reward where no way to the goal is known.
        """
        if not isinstance(self._engine, PlainEngine) or self._game is None:
            return None
        plan = find_plan(self._game, engine=self._engine)
        left = self._max_steps if plan is None else min(len(plan), self._max_steps)
        return -self._win_reward * left / self._max_steps

    def random_action(self, rng: Random) -> str | None:
        """One of the admissible commands."""
        return None if self._frame is None else rng.choice(self._frame.commands)

    def expert_action(self) -> str | None:
        """The next action of a player that searches and remembers what it has seen; plain engine
        only."""
        if not isinstance(self._engine, PlainEngine) or self._game is None or self._over:
            return None
        return next_command(
            self._game,
            engine=self._engine,
            memory=self._memory,
            sees_commands=self._show_admissible,
        )

    def expert_thought(self) -> str | None:
        """The thought of that player before its action, worded by the episode's seed; plain engine
        only."""
        command = self.expert_action()
        if command is None or self._game is None or not isinstance(self._engine, PlainEngine):
            return None
        rng = Random(derive_seed(self._seed, "alfworld.thought", self._steps))
        return thought(command, game=self._game, engine=self._engine, memory=self._memory, rng=rng)

    def walkthrough(self) -> tuple[str, ...] | None:
        """Commands that win the current game from its start, where they are known."""
        return self._game.walkthrough if self._game is not None and self._game.walkthrough else None

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
        self._engine = self._game = self._frame = None
        self._over = True

    def _choose(self, seed: int, *, split: str, game_id: str | None) -> Game:
        if game_id is not None:
            if not self._splits:
                raise EnvError(
                    f"game_id names a game of a file, but no file was given: {game_id!r}"
                )
            for game in (game for games in self._splits.values() for game in games):
                if game.id == game_id:
                    return game
            raise EnvError(f"the file has no game {game_id!r}")
        part = "train" if split == "train" else "val"
        if part not in self._splits:
            return _made(self._floorplans, self._task_types, self._without, seed, part)
        return self._splits[part][seed % len(self._splits[part])]

    def _text(self, frame: Frame) -> str:
        if not self._show_admissible:
            return frame.text
        return f"{frame.text}\nAdmissible actions: {', '.join(frame.commands)}"

    def _info(self, frame: Frame) -> dict[str, Any]:
        return {"success": frame.won, "admissible_commands": list(frame.commands)}


# A run has hundreds of environments, and the members of a group play the same game, so loaded data
# is shared.


@lru_cache(maxsize=4)
def _games(path: str, stamp: int) -> tuple[Game, ...]:
    del stamp  # a file that changes is read again
    return load_games(path)


@lru_cache(maxsize=8)
def _maker(
    floorplans: str | None, task_types: tuple[str, ...], without: tuple[str, ...]
) -> GameMaker:
    plans = sample_plans() if floorplans is None else load_plans(floorplans)
    return GameMaker([plan for plan in plans if plan.name not in without], task_types=task_types)


@lru_cache(maxsize=256)
def _made(
    floorplans: str | None,
    task_types: tuple[str, ...],
    without: tuple[str, ...],
    seed: int,
    split: str,
) -> Game:
    return _maker(floorplans, task_types, without).make(seed, split=split)


def rooms_of(games: Sequence[Game]) -> tuple[str, ...]:
    """The names of the rooms that these games are played in.

    Raises:
        ValueError: a game does not name its room.
    """
    nameless = [game.id for game in games if not game.floor_plan]
    if nameless:
        raise ValueError(
            f"games are made in other rooms than those of validation, and {nameless[0]} does not "
            "name its room (scene.floor_plan); give games or floorplans, not both"
        )
    return tuple(sorted({game.floor_plan for game in games}))


def split_games(
    games: Sequence[Game], *, val_split: str | None = None
) -> dict[str, tuple[Game, ...]]:
    """The games to train on and the games to validate on, by the names that the file gives its
    splits.

    Where the file has but one kind, a tenth of it is held out: those whose ids have the lowest
    digests.
    """
    train = [game for game in games if game.split == "train"]
    val = _named(games, val_split)
    if not train or not val:
        pool = sorted(train or val, key=lambda game: hashlib.blake2b(game.id.encode()).digest())
        if len(pool) < 2:
            raise ValueError(
                f"train and val need at least one game each, the file has {len(pool)} of these "
                "task types"
            )
        held_out = max(1, len(pool) // 10)
        train, val = pool[held_out:], pool[:held_out]
        train, val = [g for g in games if g in train], [g for g in games if g in val]
    return {"train": tuple(train), "val": tuple(val)}


def held_out_games(games: Sequence[Game], *, val_split: str | None = None) -> tuple[Game, ...]:
    """The games to validate on, where others are made to train on."""
    found = _named(games, val_split)
    if not found:
        raise ValueError(
            "validation needs games of another split than train, and the file has none"
        )
    return tuple(found)


def _named(games: Sequence[Game], val_split: str | None) -> list[Game]:
    """The games of this split; None: of all but "train"."""
    found = [
        game
        for game in games
        if (game.split != "train" if val_split is None else game.split == val_split)
    ]
    if val_split == "train" or (val_split is not None and not found):
        raise ValueError(
            f"val_split is one of {sorted({g.split for g in games} - {'train'})}, got {val_split!r}"
        )
    return found
