"""Single-turn or multi-turn: the whole matrix, the reason, and who overrules whom. No TRL is needed
for this."""

import logging

import pytest

from turnwise.envs.base import BaseEnv
from turnwise.envs.messages import MultiTurnEnv, SingleTurnEnv, ToolEnv
from turnwise.integrations.trl import detect
from turnwise.integrations.trl.detect import examine, is_multi_turn_environment

ROWS = [{"prompt": "a"}, {"prompt": "b"}]


class Chat(MultiTurnEnv):
    def is_completed(self, messages, state, **kwargs):
        return len(messages) >= 5

    def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": "go on"}], state


class Sums(SingleTurnEnv):
    pass


class Oldest:
    """As verifiers 0.3.1 has it: asking for oai_tools raises."""

    @property
    def oai_tools(self):
        raise AttributeError("use tool_defs")

    tool_defs = ({"name": "search"},)


class Group:
    def __init__(self, *envs):
        self.envs = list(envs)


class Game(BaseEnv):
    def reset(self, seed=None, **kwargs):
        return "state"

    def step(self, action):
        return "state", 0.0, True, {}


class OneShot(Game):
    max_turns = 1


class Factory:
    def reset(self, **row):
        return None

    def tool(self, x: int) -> str:
        """A tool."""
        return str(x)


def tool(query: str) -> str:
    """Finds things."""
    return query


@pytest.mark.parametrize(
    ("env", "wanted"),
    [
        (SingleTurnEnv(ROWS), False),
        (Sums(ROWS), False),
        (Chat(ROWS), True),
        (Chat(ROWS, max_turns=1), False),
        (ToolEnv([tool], ROWS), True),
        (ToolEnv([], ROWS), True),
        (Oldest(), True),
        (Group(Sums(ROWS), SingleTurnEnv(ROWS)), False),
        (Group(Sums(ROWS), Chat(ROWS)), True),
        (Game(), True),
        (OneShot(), False),
        (OneShot, False),
        (Factory, True),
        ("frozen_lake", True),
        ("bandit", False),
    ],
)
def test_matrix(env, wanted):
    assert is_multi_turn_environment(env) is wanted
    assert examine(env).reason


def test_a_flag_of_the_environment_wins():
    env = Sums(ROWS)
    env.multi_turn = True
    assert examine(env).multi_turn
    assert "flag" in examine(env).reason


def test_tools_on_a_subclass_of_single_turn_count():
    env = Sums(ROWS)
    env.oai_tools = [{"type": "function"}]
    assert is_multi_turn_environment(env)


def test_the_reason_is_logged_once(caplog):
    detect._log_once.cache_clear()
    with caplog.at_level(logging.INFO, logger=detect.__name__):
        for _ in range(3):
            is_multi_turn_environment(Sums(ROWS))
    assert [record.getMessage() for record in caplog.records] == [
        "Sums is single-turn: it derives from SingleTurnEnv"
    ]
