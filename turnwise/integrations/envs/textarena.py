# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
"""Games of TextArena: `textarena:Mastermind-v0`. The model plays one seat; a function plays the
others."""

import importlib
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

from turnwise.envs.base import BaseEnv
from turnwise.envs.gate import describe
from turnwise.integrations.envs.common import (
    MOVE_ERRORS,
    OwnRandom,
    SplitBy,
    load_function,
    require,
    split_rule,
    start_in_split,
    unknown_name,
)
from turnwise.seeding import derive_seed

Opponent = Callable[[str, Random], str]
INVALID_MOVE = -1.0
"""TextArena's reward where an invalid move ends a game. Some games (Slitherlink, ThreeCardMonte,
Cryptarithm in 0.7.4) put the reason in the reward's place."""
SEATS_LIMIT = 1000  # maximum turns of other seats in a row; a game that exceeds it is broken


class TextArenaEnv(BaseEnv):
    """A TextArena game. The game's prompt explains the format of actions, such as [1 2 3].

    The reward is the model's score at the end of the game. A move that the game cannot read ends it
    with TextArena's penalty of -1. TextArena uses Python's global random generator, so every
    episode gets its own generator state. A seed is one game.

    Args:
        id: TextArena's id. Its plain variant (-raw) is used, in which an observation is only what
            is new.
        num_players: seats. With more than one, `opponent` plays the others.
        opponent: (what its seat sees, a random generator) -> action; a function, or
            module:function.
        seat: the model's.
        kwargs: keyword arguments of `textarena.make`.
        split_by: `opening` keeps any opening from being in both splits, at the price of several
            starts for one; `seed` takes one start.
    """

    def __init__(
        self,
        id: str,
        *,
        num_players: int = 1,
        opponent: str | Opponent | None = None,
        seat: int = 0,
        kwargs: Mapping[str, Any] | None = None,
        split_by: str = "seed",
    ) -> None:
        textarena = require("textarena", extra="textarena")
        registry: Mapping[str, Any] = importlib.import_module(
            "textarena.envs.registration"
        ).ENV_REGISTRY
        if id not in registry:
            raise unknown_name("textarena", id, sorted(registry))
        if num_players > 1 and opponent is None:
            raise ValueError(
                f"{id} with {num_players} players needs an opponent: set the option to "
                "module:function"
            )
        if not 0 <= seat < num_players:
            raise ValueError(f"seat is from 0 to {num_players - 1}, got {seat}")
        self._id = id
        self._split_by: SplitBy = split_rule(split_by)
        self._seats, self._seat = num_players, seat
        self._opponent = load_function(opponent, option="opponent")
        self._own = OwnRandom(0)
        self._rng = Random(0)
        with self._own.drawing():
            self._env: Any = textarena.make(
                f"{id}-raw" if f"{id}-raw" in registry else id, **(kwargs or {})
            )
        self.instruction = f"You play {id.partition('-v')[0]}."

    def reset(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, seed: int | None = None, *, noise_seed: int = 0, split: str = "train"
    ) -> str:
        def start(number: int) -> str:
            self._own, self._rng = OwnRandom(number), Random(number)
            with self._own.drawing():
                self._env.reset(num_players=self._seats, seed=number)
            text, done = self._advance()
            if done:
                raise RuntimeError(f"{self._id} was over before the first turn")
            return text

        text = start_in_split(start, seed or 0, split, by=self._split_by)
        # Deals and boards belong to the task; the moves of other seats depend on the noise seed. A
        # game does not separate its dice from its deal, so a single-seat game has no noise.
        self._rng = Random(derive_seed(seed or 0, "textarena/opponent", noise_seed))
        return text

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        try:
            with self._own.drawing():
                done, _ = self._env.step(action=action)
        except MOVE_ERRORS as error:  # what the game did not finish is not to be played on
            return self._invalid(f"The move could not be read: {describe(error)}")
        text = ""
        if not done:
            text, done = self._advance()
        if not done:
            return text, 0.0, False, {}
        with self._own.drawing():
            rewards, facts = self._env.close()
        paid = (rewards or {}).get(self._seat, 0.0)
        if isinstance(paid, str):
            return self._invalid(paid)
        reward = float(paid)
        info = dict((facts or {}).get(self._seat, {}))
        reason = str(info.get("reason") or "The game is over.")
        return (
            "\n".join(part for part in (text, reason) if part),
            reward,
            True,
            {"success": reward >= 1.0, **info},
        )

    def _invalid(self, reason: str) -> tuple[str, float, bool, dict[str, Any]]:
        """The end of a game by a move that it did not take."""
        info = {"success": False, "invalid_move": True, "reason": reason}
        return reason, INVALID_MOVE, True, info

    def _advance(self) -> tuple[str, bool]:
        """(what the model's seat sees next, whether the game is over), after the other seats have
        played."""
        for _ in range(SEATS_LIMIT):
            with self._own.drawing():
                player, seen = self._env.get_observation()
            text = _text(seen, player)
            if player == self._seat:
                return text or "Your turn.", False
            assert self._opponent is not None
            reply = self._opponent(text, self._rng)
            with self._own.drawing():
                done, _ = self._env.step(action=reply)
            if done:
                return "", True
        raise RuntimeError(f"{self._id}: the other seats played {SEATS_LIMIT} times in a row")


def _text(seen: Any, player: int) -> str:
    """New observations of a player, without its own messages."""
    if isinstance(seen, str):
        return seen
    return "\n".join(str(item[1]).strip() for item in seen if item[0] != player)
