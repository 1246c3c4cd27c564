"""ALFWorld: household tasks in text, by an engine in plain Python (the default) or by the original one."""

from turnwise.envs.alfworld.check import GamesReport, check_games
from turnwise.envs.alfworld.engine import Frame, PlainEngine
from turnwise.envs.alfworld.env import AlfWorldEnv
from turnwise.envs.alfworld.games import Game, load_games, save_games
from turnwise.envs.alfworld.generate import GameMaker

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
