"""Where environments run: in this process, in threads, or in worker processes that can be killed.
Contains no environment rules, and does not decide which episodes are played (rollout/).
"""
