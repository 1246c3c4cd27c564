"""The typed config of a run: schema, loading, other projects' key names, recipes."""

from turnwise.config.load import list_recipes, load_config, parse_overrides, show_config
from turnwise.config.schema import Config
from turnwise.config.store import ConfigStore
from turnwise.config.tree import ConfigError

__all__ = ["Config", "ConfigError", "ConfigStore", "list_recipes", "load_config", "parse_overrides", "show_config"]
