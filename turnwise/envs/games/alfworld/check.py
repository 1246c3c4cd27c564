"""Plays games to check them: whether walkthroughs reach their goal; transcripts to compare engines
by."""

import hashlib
import json
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from turnwise.envs.games.alfworld.engine import Engine, Frame
from turnwise.envs.games.alfworld.games import Game, load_games

Played = tuple[str, Frame]


@dataclass(frozen=True, kw_only=True, slots=True)
class GameFailure:
    """A game whose walkthrough does not reach the goal, and why."""

    game_id: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class GamesReport:
    r"""What `check_games` found.

    Example:
        >>> report = GamesReport(path="g.jsonl", num_games=3, num_reached=2, num_steps=40,
        ...     seconds=0.5,
        ...     failures=(GameFailure(game_id="t/1", reason="no walkthrough"),))
        >>> report.ok
        False
        >>> print("\n".join(report.lines()))
        g.jsonl: 2 of 3 walkthroughs reach their goal (40 commands, 0.5 s with loading)
          t/1: no walkthrough
    """

    path: str
    num_games: int
    num_reached: int
    num_steps: int
    """Commands played."""
    seconds: float
    failures: tuple[GameFailure, ...]

    @property
    def ok(self) -> bool:
        """True where every walkthrough reaches its goal."""
        return not self.failures

    def lines(self) -> list[str]:
        """The report for people: one line, then one per failure."""
        head = (
            f"{self.path}: {self.num_reached} of {self.num_games} walkthroughs reach their goal "
            f"({self.num_steps} commands, {self.seconds:.1f} s with loading)"
        )
        return [head, *(f"  {failure.game_id}: {failure.reason}" for failure in self.failures)]


def check_games(path: str | Path, *, engine: str = "plain") -> GamesReport:
    """Plays every game's walkthrough and reports which reach their goal.

    Raises FileNotFoundError or ValueError where the file holds no games; a single game that cannot
    be played is a failure of the report.
    """
    start = time.perf_counter()
    games = load_games(path)
    num_reached = num_steps = 0
    failures: list[GameFailure] = []
    for game in games:
        try:
            reason, steps = _walk_through(game, engine=engine)
        except ValueError as error:
            reason, steps = str(error), 0
        num_steps += steps
        if reason is None:
            num_reached += 1
        else:
            failures.append(GameFailure(game_id=game.id, reason=reason))
    return GamesReport(
        path=str(path),
        num_games=len(games),
        num_reached=num_reached,
        num_steps=num_steps,
        seconds=time.perf_counter() - start,
        failures=tuple(failures),
    )


def _walk_through(game: Game, *, engine: str) -> tuple[str | None, int]:
    """(why the goal was not reached, or None; the commands played)."""
    if not game.walkthrough:
        return "no walkthrough", 0
    player = make_engine(game, engine=engine)
    try:
        shown = list(follow(player, game.walkthrough))
    finally:
        player.close()
    if shown[-1][1].won:
        return None, len(shown) - 1
    refused = [
        command for before, (command, _) in pairwise(shown) if command not in before[1].commands
    ]
    why = f", the first command that is not admissible is {refused[0]!r}" if refused else ""
    return f"the goal does not hold after {len(shown) - 1} commands{why}", len(shown) - 1


def make_engine(game: Game, *, engine: str, task: str | None = None) -> Engine:
    """The engine of that name ("plain" or "textworld") for a game."""
    if engine == "plain":
        return game.engine(task=task)
    if engine == "textworld":
        from turnwise.envs.games.alfworld.textworld import TextWorldEngine

        return TextWorldEngine(game, task=game.task() if task is None else task)
    raise ValueError(f"engine is 'plain' or 'textworld', got {engine!r}")


def follow(engine: Engine, commands: Iterable[str]) -> Iterator[Played]:
    """The opening frame (under an empty command), then each command with its frame."""
    yield "", engine.reset()
    for command in commands:
        yield command, engine.step(command)


def wander(engine: Engine, *, seed: str, steps: int) -> Iterator[Played]:
    """A random walk: the opening frame, then `steps` commands with their frames, won or not.

    Prefers commands that handle objects over walking, and sometimes sends an invalid command.
    """
    rng = random.Random(seed)
    frame = engine.reset()
    yield "", frame
    for _ in range(steps):
        command = _draw(rng, frame.commands)
        frame = engine.step(command)
        yield command, frame


def _draw(rng: random.Random, commands: Sequence[str]) -> str:
    draw = rng.random()
    if draw < 0.04:
        return "dance wildly"
    if draw < 0.7:
        handling = [
            command
            for command in commands
            if command.split()[0] not in ("go", "look", "inventory", "help")
        ]
        commands = handling or commands
    return commands[rng.randrange(len(commands))]


def digest(played: Iterable[Played]) -> str:
    """A digest of everything shown, so that transcripts can be compared without being kept."""
    state = hashlib.sha256()
    for command, frame in played:
        state.update(json.dumps([command, frame.text, frame.commands, frame.won]).encode() + b"\n")
    return state.hexdigest()[:32]
