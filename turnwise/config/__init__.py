"""The typed config of a run: schema, loading, other projects' key names, recipes.
Imports no torch and starts nothing."""

from turnwise.config.base import run_config
from turnwise.config.load import list_recipes, load_config, parse_overrides, show_config
from turnwise.config.schema import Config
from turnwise.config.store import ConfigStore
from turnwise.config.tree import ConfigError, ConfigWarning

__all__ = [
    "Config",
    "ConfigError",
    "ConfigStore",
    "ConfigWarning",
    "list_recipes",
    "load_config",
    "parse_overrides",
    "run_config",
    "show_config",
]
