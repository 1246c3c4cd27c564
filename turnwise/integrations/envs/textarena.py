"""Games of TextArena: `textarena:Mastermind-v0`. One seat is the model's; the others, if any, a function's."""

import importlib
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

from turnwise.envs.base import BaseEnv
from turnwise.integrations.envs.common import OwnRandom, require, start_in_split, unknown_name
from turnwise.seeding import derive_seed

Opponent = Callable[[str, Random], str]
SEATS_LIMIT = 1000  # turns of other seats in a row; a game that never comes back is broken


class TextArenaEnv(BaseEnv):
    """A TextArena game. The game explains its own form of actions, such as [1 2 3]; they go into the answer.

    A game pays at its end: what its rules give the model's seat is the reward. TextArena draws from Python's global
    generator, so every episode gets a state of its own for it. One seed is one game.

    Args:
        id: TextArena's id. Its plain variant (-raw) is used, in which an observation is only what is new.
        num_players: seats. With more than one, `opponent` plays the others.
        opponent: (what its seat sees, a random generator) -> action; a function, or module:function.
        seat: the model's.
        kwargs: keyword arguments of `textarena.make`.
    """

    def __init__(
        self,
        id: str,
        *,
        num_players: int = 1,
        opponent: str | Opponent | None = None,
        seat: int = 0,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        textarena = require("textarena", extra="textarena")
        registry: Mapping[str, Any] = importlib.import_module("textarena.envs.registration").ENV_REGISTRY
        if id not in registry:
            raise unknown_name("textarena", id, sorted(registry))
        if num_players > 1 and opponent is None:
            raise ValueError(f"{id} with {num_players} players needs an opponent: set the option to module:function")
        if not 0 <= seat < num_players:
            raise ValueError(f"seat is from 0 to {num_players - 1}, got {seat}")
        self._id = id
        self._seats, self._seat = num_players, seat
        self._opponent = _load(opponent)
        self._own = OwnRandom(0)
        self._rng = Random(0)
        with self._own.drawing():
            self._env: Any = textarena.make(f"{id}-raw" if f"{id}-raw" in registry else id, **(kwargs or {}))
        self.instruction = f"You play {id.partition('-v')[0]}."

    def reset(self, seed: int | None = None, *, noise_seed: int = 0, split: str = "train") -> str:
        def start(number: int) -> str:
            self._own, self._rng = OwnRandom(number), Random(number)
            with self._own.drawing():
                self._env.reset(num_players=self._seats, seed=number)
            text, done = self._advance()
            if done:
                raise RuntimeError(f"{self._id} was over before the first turn")
            return text

        text = start_in_split(start, seed or 0, split)
        # Deals and boards belong to the task, and what other seats do from here on to the episode. A game cannot tell
        # its own dice from its deal, so with one seat there is nothing that noise could vary.
        self._rng = Random(derive_seed(seed or 0, "textarena/opponent", noise_seed))
        return text

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        with self._own.drawing():
            done, _ = self._env.step(action=action)
        text = ""
        if not done:
            text, done = self._advance()
        if not done:
            return text, 0.0, False, {}
        with self._own.drawing():
            rewards, facts = self._env.close()
        reward = float((rewards or {}).get(self._seat, 0.0))
        info = dict((facts or {}).get(self._seat, {}))
        reason = str(info.get("reason") or "The game is over.")
        return "\n".join(part for part in (text, reason) if part), reward, True, {"success": reward >= 1.0, **info}

    def _advance(self) -> tuple[str, bool]:
        """(what the model's seat sees next, whether the game is over), after the other seats have played."""
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
    """What is new for a player, its own words left out."""
    if isinstance(seen, str):
        return seen
    return "\n".join(str(item[1]).strip() for item in seen if item[0] != player)


def _load(target: str | Opponent | None) -> Opponent | None:
    if not isinstance(target, str):
        return target
    module, _, name = target.partition(":")
    if not name:
        raise ValueError(f"opponent is a function, or module:function, got {target!r}")
    return getattr(importlib.import_module(module), name)
