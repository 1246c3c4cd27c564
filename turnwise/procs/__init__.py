"""Processes, threads, time limits and event loops, as such. Nothing here knows what an environment or a model is."""
