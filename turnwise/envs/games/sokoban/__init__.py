"""Sokoban: an engine on plain arrays, rooms by reverse play, Boxoban level files, and solvers for
tests and demonstrations."""

from turnwise.envs.games.sokoban.engine import Board, Level, LevelError
from turnwise.envs.games.sokoban.env import SokobanEnv
from turnwise.envs.games.sokoban.levels import LevelReport, check_levels, read_levels
from turnwise.envs.games.sokoban.rooms import RoomSpec, make_room
from turnwise.envs.games.sokoban.solver import SolverLimit, fewest_moves, solve

__all__ = [
    "Board",
    "Level",
    "LevelError",
    "LevelReport",
    "RoomSpec",
    "SokobanEnv",
    "SolverLimit",
    "check_levels",
    "fewest_moves",
    "make_room",
    "read_levels",
    "solve",
]
