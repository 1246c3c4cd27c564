"""Players by name: random, expert, scripted, behind an endpoint."""

import os

from turnwise.config.schema import Config
from turnwise.evaluate.baselines import ExpertPlayer
from turnwise.evaluate.players import Player, RandomPlayer, ScriptedPlayer, chat_player
from turnwise.rollout.speakers import PlayerError
from turnwise.user_code import UnknownNameError, load_named

KINDS = ("random", "expert", "script", "openai")
"""How the names of players begin."""


def load_player(spec: str, config: Config) -> Player:
    """The player of this name: random, expert, openai:URL#MODEL, or script:WHERE:FUNCTION.

    Raises:
        PlayerError: the name is unknown.
    """
    kind, _, rest = spec.partition(":")
    if kind == "random" and not rest:
        return RandomPlayer()
    if kind == "expert" and not rest:
        return ExpertPlayer()
    if kind == "script" and ":" in rest:
        try:
            return ScriptedPlayer(spec, load_named(rest))
        except UnknownNameError as error:
            raise PlayerError(
                f"{error}; a script is called with a Situation and returns text"
            ) from error
    if kind == "openai" and rest:
        return chat_player(rest, config, api_key=os.environ.get("OPENAI_API_KEY"))
    raise PlayerError(
        f"unknown player {spec!r}; players are random, expert, script:FILE.py:FUNCTION (or "
        "script:MODULE:FUNCTION) and openai:URL#MODEL, or name a run directory or a model"
    )
