"""turnwise trains language-model agents over many turns with reinforcement learning.

Names are imported when they are first used, so `import turnwise` costs nothing and does not load
torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from turnwise.algos import compute_bi_level_gae_advantage_return
    from turnwise.algos.algorithm import Algorithm
    from turnwise.api import evaluate as evaluate
    from turnwise.api import sft as sft
    from turnwise.api import train as train
    from turnwise.config import (
        Config,
        ConfigError,
        ConfigStore,
        load_config,
        run_config,
        show_config,
    )
    from turnwise.data.batch import Batch
    from turnwise.data.table import columns, rows
    from turnwise.endpoint.env import agent as agent
    from turnwise.envs.base import BaseEnv
    from turnwise.envs.games.simple_game import SimpleGameEnvironment
    from turnwise.envs.messages import MultiTurnEnv, SingleTurnEnv, ToolEnv
    from turnwise.envs.registry import list_envs, make_env, register
    from turnwise.envs.rubric import Rubric
    from turnwise.evaluate.check_env import check_env
    from turnwise.generate.base import Generator, Sampling
    from turnwise.generate.hf import HFGenerator
    from turnwise.generate.scripted import ScriptedGenerator
    from turnwise.log.callbacks import Callback, StopTraining
    from turnwise.log.live import LivePlot
    from turnwise.log.store import RunReader
    from turnwise.rollout.agents import Agent, register_agent
    from turnwise.rollout.context import ContextManager
    from turnwise.rollout.env_state import EnvStateManager
    from turnwise.rollout.proxy import AgentProxy
    from turnwise.rollout.sync import SyncMultiTurnRollout
    from turnwise.train.trainer import PPOTrainer
    from turnwise.trainers import create_trainer
    from turnwise.types import (
        Completion,
        Episode,
        Message,
        Observation,
        Sample,
        Status,
        StepResult,
        Task,
        Turn,
    )
    from turnwise.user_code import register_part

__version__: str

__all__ = [
    "Agent",
    "AgentProxy",
    "Algorithm",
    "BaseEnv",
    "Batch",
    "Callback",
    "Completion",
    "Config",
    "ConfigError",
    "ConfigStore",
    "ContextManager",
    "EnvStateManager",
    "Episode",
    "Generator",
    "HFGenerator",
    "LivePlot",
    "Message",
    "MultiTurnEnv",
    "Observation",
    "PPOTrainer",
    "Rubric",
    "RunReader",
    "Sample",
    "Sampling",
    "ScriptedGenerator",
    "SimpleGameEnvironment",
    "SingleTurnEnv",
    "Status",
    "StepResult",
    "StopTraining",
    "SyncMultiTurnRollout",
    "Task",
    "ToolEnv",
    "Turn",
    "__version__",
    "agent",
    "check_env",
    "columns",
    "compute_bi_level_gae_advantage_return",
    "create_trainer",
    "evaluate",
    "list_envs",
    "load_config",
    "make_env",
    "register",
    "register_agent",
    "register_part",
    "rows",
    "run_config",
    "sft",
    "show_config",
    "train",
]

_HOMES = {
    "turnwise.algos": ("compute_bi_level_gae_advantage_return",),
    "turnwise.algos.algorithm": ("Algorithm",),
    "turnwise.api": ("evaluate", "sft", "train"),
    "turnwise.config": (
        "Config",
        "ConfigError",
        "ConfigStore",
        "load_config",
        "run_config",
        "show_config",
    ),
    "turnwise.data.batch": ("Batch",),
    "turnwise.data.table": ("columns", "rows"),
    "turnwise.endpoint.env": ("agent",),
    "turnwise.envs.base": ("BaseEnv",),
    "turnwise.evaluate.check_env": ("check_env",),
    "turnwise.envs.messages": ("MultiTurnEnv", "SingleTurnEnv", "ToolEnv"),
    "turnwise.envs.registry": ("list_envs", "make_env", "register"),
    "turnwise.envs.rubric": ("Rubric",),
    "turnwise.envs.games.simple_game": ("SimpleGameEnvironment",),
    "turnwise.generate.base": ("Generator", "Sampling"),
    "turnwise.generate.hf": ("HFGenerator",),
    "turnwise.generate.scripted": ("ScriptedGenerator",),
    "turnwise.log.callbacks": ("Callback", "StopTraining"),
    "turnwise.log.live": ("LivePlot",),
    "turnwise.log.store": ("RunReader",),
    "turnwise.rollout.agents": ("Agent", "register_agent"),
    "turnwise.rollout.context": ("ContextManager",),
    "turnwise.rollout.env_state": ("EnvStateManager",),
    "turnwise.rollout.proxy": ("AgentProxy",),
    "turnwise.rollout.sync": ("SyncMultiTurnRollout",),
    "turnwise.train.trainer": ("PPOTrainer",),
    "turnwise.trainers": ("create_trainer",),
    "turnwise.types": (
        *(
            "Completion",
            "Episode",
            "Message",
            "Observation",
            "Sample",
            "Status",
            "StepResult",
            "Task",
            "Turn",
        ),
    ),
    "turnwise.user_code": ("register_part",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("turnwise")
    if name in ("train", "evaluate"):  # packages that can be called (callable_module.py)
        return import_module(f"turnwise.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'turnwise' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return __all__
