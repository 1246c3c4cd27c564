"""How good a player is: evaluation, statistics, players, baselines, replay, and the check of an environment. Never
changes a policy.
"""
