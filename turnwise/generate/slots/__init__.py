"""The CPU engine: passes of a transformers model over a cache of slots. Knows no environments."""
