"""The gate: validates everything that environments, tools, servers and models return.

It guarantees four things. Text is valid Unicode. Numbers are finite and can be squared in float32.
JSON is plain JSON of bounded size. Any exception of foreign code is an EnvError, except the user's
Ctrl-C. The gate repairs values if that keeps their meaning (half a surrogate pair becomes U+FFFD);
other violations of the contract raise an EnvError that names the rule.
"""

from turnwise.envs.gate.calls import ask, ask_within, close_quietly
from turnwise.envs.gate.objects import (
    admit_completion,
    admit_observation,
    admit_result,
    admit_task,
    own_task,
    read_hint,
    read_message,
    read_messages,
)
from turnwise.envs.gate.texts import brief, clean_text, describe, raised_at, words
from turnwise.envs.gate.values import (
    CUT,
    MAX_INFO,
    MAX_TEXT,
    json_safe,
    read_count,
    read_flag,
    read_info,
    read_json,
    read_reward,
    read_text,
)

__all__ = [
    "CUT",
    "MAX_INFO",
    "MAX_TEXT",
    "admit_completion",
    "admit_observation",
    "admit_result",
    "admit_task",
    "ask",
    "ask_within",
    "brief",
    "clean_text",
    "close_quietly",
    "describe",
    "json_safe",
    "own_task",
    "raised_at",
    "read_count",
    "read_flag",
    "read_hint",
    "read_info",
    "read_json",
    "read_message",
    "read_messages",
    "read_reward",
    "read_text",
    "words",
]
