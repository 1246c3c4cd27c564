"""ALFWorld: household tasks in text, by an engine in plain Python (the default) or by the original
one."""

from turnwise.envs.games.alfworld.check import GamesReport, check_games
from turnwise.envs.games.alfworld.engine import Frame, PlainEngine
from turnwise.envs.games.alfworld.env import AlfWorldEnv
from turnwise.envs.games.alfworld.games import Game, load_games, save_games
from turnwise.envs.games.alfworld.generate import GameMaker

__all__ = [
    "AlfWorldEnv",
    "Frame",
    "Game",
    "GameMaker",
    "GamesReport",
    "PlainEngine",
    "check_games",
    "load_games",
    "save_games",
]
