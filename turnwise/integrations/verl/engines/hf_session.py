"""The name that keeps the servers of runs on one cluster apart."""

import os

SESSION = "TURNWISE_VERL_SESSION"
"""The environment variable that holds the run's name; every process of a run has the same."""


def server_name(rank: int) -> str:
    """The Ray name of one hf server.

    Example:
        >>> server_name(0).startswith("turnwise_hf_")
        True
    """
    return f"turnwise_hf_{os.environ.get(SESSION, '0')}_{rank}"
