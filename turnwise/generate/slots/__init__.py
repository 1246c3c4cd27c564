"""The engine of the CPU: passes of a transformers model over a cache of slots."""
