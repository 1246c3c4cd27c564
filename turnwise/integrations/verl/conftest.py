"""Keeps doctest collection from importing what registers itself with verl, or needs it."""

collect_ignore = [
    "agent_loop.py",
    "hf_server.py",
    "lockstep.py",
    "overrides.py",
    "pace.py",
    "platform.py",
    "plugin.py",
    "queue.py",
    "trainer.py",
    "updates.py",
]
