"""Games in the browser: people play environments and watch others play them."""

import asyncio
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnwise.config.schema import Config
from turnwise.inspect.choices import (
    game_config,
    key_for,
    list_choices,
    policy_config,
    read_options,
    read_seed,
    read_text,
    refuse_code,
)
from turnwise.inspect.folder import InspectError, Skips
from turnwise.inspect.runs import Run, Runs
from turnwise.procs.threads import DaemonThreads
from turnwise.types import Json

if TYPE_CHECKING:
    from turnwise.evaluate.evaluation import PolicyPlayer
    from turnwise.inspect.game import Game

MOST_GAMES = 8
"""Games at the same time; the one that was left longest makes room for another."""
IDLE_SECONDS = 1800.0
"""A game without a request for so long is ended when another begins."""
LOOK_SECONDS = 0.02
LoadPolicy = Callable[[Config, Path, str], "PolicyPlayer"]
"""(config, run directory, name) -> its policy."""


class Games:
    """The games of a server.

    Args:
        runs: whose policies can be watched.
        named: environments that the user named on the command line.
        load_policy: loads the last checkpoint of a run.
    """

    def __init__(self, runs: Runs, named: Sequence[str], *, load_policy: LoadPolicy) -> None:
        self._runs, self._named, self._load = runs, tuple(named), load_policy
        self._games: dict[str, Game] = {}
        self._policy: tuple[Any, PolicyPlayer] | None = None
        self._alone = threading.Lock()
        """Held while the policy speaks: games share it."""
        self._threads = DaemonThreads(2, "turnwise-play")

    def choices(self) -> dict[str, Json]:
        """/api/envs."""
        return list_choices(self._runs, self._named)

    async def start(self, body: dict[str, Json]) -> dict[str, Json]:
        """POST /api/play: a new game, when its first turn can be asked for."""
        self._make_room()
        making = self._threads.submit(self._make, body)
        game = await asyncio.wrap_future(making)
        self._games[game.name] = game
        game.start()
        view = await _settled(game)
        if game.agent is None:  # it ended before it began
            del self._games[game.name]
            raise InspectError(game.error or "the environment did not start", status=422)
        return view

    def view(self, name: str) -> dict[str, Json]:
        """GET /api/play/ID."""
        return self._find(name).view()

    async def step(self, name: str, body: dict[str, Json]) -> dict[str, Json]:
        """POST /api/play/ID/step: the game after its next turn."""
        game, action = self._find(name), read_text(body, "action")
        if game.player == "person" and not action.strip():
            raise InspectError("say what you do: an action, or a reply", status=400)
        game.go(action)
        return await _settled(game)

    async def end(self, name: str) -> dict[str, Json]:
        """DELETE /api/play/ID."""
        self._find(name).leave()
        del self._games[name]
        return {"session": name, "done": True}

    def close(self) -> None:
        """Ends all games."""
        for game in self._games.values():
            game.leave()
        for game in self._games.values():
            game.join(5.0)
        self._threads.shutdown()

    def _find(self, name: str) -> "Game":
        game = self._games.get(name)
        if game is None:
            raise InspectError("this game is over and gone; start another")
        game.touched = time.monotonic()
        return game

    def _make_room(self) -> None:
        oldest = sorted(self._games.values(), key=lambda game: game.touched)
        late = time.monotonic() - IDLE_SECONDS
        surplus = len(oldest) - MOST_GAMES + 1
        for place, game in enumerate(oldest):
            if place < surplus or game.touched < late:
                game.leave()
                del self._games[game.name]

    def _make(self, body: dict[str, Json]) -> "Game":
        player, env = read_text(body, "player", "person"), read_text(body, "env")
        options, seed = read_options(body), read_seed(body)
        if player.startswith("run:"):
            return self._policy_game(self._runs.find(player[4:]), env, options, seed)
        config = game_config(env, options)
        refuse_code(config, self._named)
        from turnwise.evaluate.baselines import ExpertPlayer
        from turnwise.evaluate.players import RandomPlayer, chat_player
        from turnwise.inspect.game import Game, ToldPlayer, person_speaker, player_speaker
        from turnwise.rollout.speakers import PlayerError

        name = secrets.token_urlsafe(12)
        if player == "person":
            return Game(name, config, seed=seed, player=player, speaker=person_speaker)
        tokens = None
        if player in ("random", "expert"):
            who: Any = RandomPlayer() if player == "random" else ExpertPlayer()
        elif player.startswith("openai:"):
            where = player[7:]
            try:
                key = key_for(where.partition("#")[0])
                who = ToldPlayer(chat_player(where, config, api_key=key))
                tokens = who.tokens
            except PlayerError as error:
                raise InspectError(str(error), status=422) from None
        else:
            raise InspectError(
                f"players are person, random, expert, run:RUN and openai:URL#MODEL, got "
                f"{player[:80]!r}",
                status=400,
            )
        return Game(
            name,
            config,
            seed=seed,
            player=player,
            speaker=lambda game: player_speaker(game, who),
            tokens=tokens,
        )

    def _policy_game(self, run: Run, env: str, options: dict[str, Json], seed: int) -> "Game":
        skips = Skips()
        stored = run.config(skips)[1]
        if stored is None:
            raise InspectError("; ".join(skips.words()), status=422)
        config = policy_config(stored, env, options)
        refuse_code(config, self._named)
        from turnwise.inspect.game import Game, policy_speaker, policy_tokens
        from turnwise.rollout.proxy import sampling_for

        policy = self._loaded(run, config)
        temperature = sampling_for(config.rollout, "val").temperature
        return Game(
            secrets.token_urlsafe(12),
            config,
            seed=seed,
            player=f"run:{run.name}",
            speaker=lambda game: policy_speaker(game, policy, alone=self._alone),
            tokens=policy_tokens(policy, temperature, alone=self._alone),
        )

    def _loaded(self, run: Run, config: Config) -> "PolicyPlayer":
        """The run's policy. One is kept: games of another end."""
        try:
            checkpoints = sorted(path.name for path in (run.folder.path / "checkpoints").iterdir())
        except OSError:
            checkpoints = []
        key = run.folder.path, checkpoints, config.model, config.rollout
        if self._policy is not None and self._policy[0] == key:
            return self._policy[1]
        for game in list(self._games.values()):
            if game.player.startswith("run:"):
                game.leave()
                self._games.pop(game.name, None)
        self._policy = None
        from turnwise.rollout.speakers import PlayerError

        try:
            policy = self._load(config, run.folder.path, run.name)
        except (PlayerError, ValueError, OSError, RuntimeError) as error:
            raise InspectError(f"the policy cannot be loaded: {error}", status=422) from None
        self._policy = key, policy
        return policy


async def _settled(game: "Game") -> dict[str, Json]:
    """The game's view, once a turn can be asked for or it is over."""
    while game.state == "busy":
        await asyncio.sleep(LOOK_SECONDS)
    return game.view()
