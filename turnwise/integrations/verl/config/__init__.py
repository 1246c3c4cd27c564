"""From a config of ours to verl's: settings, refusals, what must be installed."""
