"""Where environments run: in this process, in threads, or in worker processes that can be killed. No rules of any
environment live here, and nothing that decides which episode is played (rollout/).
"""
