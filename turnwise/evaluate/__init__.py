"""Evaluation of players, statistics, baselines, replay, and the check of an environment. Never
changes a policy.
"""

from turnwise.callable_module import make_callable

make_callable(__name__, "turnwise.api:evaluate")
