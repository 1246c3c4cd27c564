# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false
"""Detects whether an environment is single-turn or multi-turn, and logs the reason once."""

import inspect
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from turnwise.envs.base import EnvError
from turnwise.envs.gate import ask
from turnwise.integrations.trl.guard import guarded
from turnwise.integrations.verifiers.environments import is_taskset

logger = logging.getLogger(__name__)
_TOOL_NAMES = ("oai_tools", "tool_defs", "tools")


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The result for an environment."""

    multi_turn: bool
    reason: str


def is_multi_turn_environment(env: object) -> bool:
    """True where an episode has more than one turn, so that turnwise must play it.

    Example:
        >>> from turnwise.envs.messages import MultiTurnEnv, SingleTurnEnv
        >>> class Sums(SingleTurnEnv): pass
        >>> sums = Sums([{"prompt": "1+1?"}])
        >>> is_multi_turn_environment(sums), is_multi_turn_environment("frozen_lake")
        (False, True)
    """
    verdict = examine(env)
    log_verdict(env, verdict)
    return verdict.multi_turn


def log_verdict(env: object, verdict: Verdict) -> None:
    """Logs a verdict, once per process."""
    _log_once(_name(env), verdict.multi_turn, verdict.reason)


def examine(env: object) -> Verdict:
    """The verdict on an environment object, a class, or a registered name.

    In this order: the environment's own flag `multi_turn`; a rubric of verifiers that scores whole
    groups; the class SingleTurnEnv itself; the members of a group; tools (they need a second turn
    to be of use); SingleTurnEnv among the base classes; a limit of one turn.

    Example:
        >>> examine("bandit")
        Verdict(multi_turn=False, reason="'bandit' has a limit of one turn")
    """
    if isinstance(env, str):
        return _by_name(env)
    if isinstance(env, Mapping):
        return Verdict(multi_turn=True, reason="it is several classes by name, each with tools")
    flag = _peek(env, "multi_turn")
    if isinstance(flag, bool):
        return Verdict(multi_turn=flag, reason=f"its own flag multi_turn is {flag}")
    if _peek(_peek(env, "rubric"), "has_group_rewards") is True:
        return Verdict(
            multi_turn=True, reason="its rubric scores groups, which turnwise plays as a whole"
        )
    if type(env).__name__ == "SingleTurnEnv":
        return Verdict(multi_turn=False, reason="it is a SingleTurnEnv")
    members = _peek(env, "envs")
    if isinstance(members, list | tuple) and members:
        several = [_name(member) for member in members if examine(member).multi_turn]
        if several:
            return Verdict(
                multi_turn=True, reason=f"its members {', '.join(several)} are multi-turn"
            )
        return Verdict(multi_turn=False, reason="all of its members are single-turn")
    for name in _TOOL_NAMES:
        if not inspect.isclass(env) and _peek(env, name):
            return Verdict(multi_turn=True, reason=f"it has tools ({name})")
    return _by_class(env)


def _by_class(env: object) -> Verdict:
    bases = [cls.__name__ for cls in (env if inspect.isclass(env) else type(env)).__mro__]
    if "SingleTurnEnv" in bases:
        return Verdict(multi_turn=False, reason="it derives from SingleTurnEnv")
    if _peek(env, "max_turns") == 1:
        return Verdict(multi_turn=False, reason="its max_turns is 1")
    if "MultiTurnEnv" in bases:
        return Verdict(multi_turn=True, reason="it derives from MultiTurnEnv")
    if "Taskset" in bases or is_taskset(env):
        return Verdict(
            multi_turn=True, reason="it is a verifiers taskset, whose tasks are played by a harness"
        )
    if callable(_peek(env, "reset")):
        return Verdict(multi_turn=True, reason="it has reset, and no limit of one turn")
    if callable(_peek(env, "env_response")):
        return Verdict(multi_turn=True, reason="it has env_response")
    return Verdict(multi_turn=False, reason="nothing about it speaks of several turns")


def _by_name(name: str) -> Verdict:
    from turnwise.config.schema import EnvConfig
    from turnwise.envs.registry import make_env

    env = guarded(f"{name}: making it", lambda: make_env(EnvConfig(name=name)))
    limit = guarded(f"{name}: max_turns", lambda: env.max_turns)
    guarded(f"{name}: close", env.close)
    if limit == 1:
        return Verdict(multi_turn=False, reason=f"{name!r} has a limit of one turn")
    return Verdict(multi_turn=True, reason=f"{name!r} has no limit of one turn")


def _peek(env: object, name: str) -> Any:
    """An attribute, or None if it is missing or raises (as in old verifiers environments)."""
    try:
        return ask(name, lambda: getattr(env, name, None))
    except EnvError:
        return None


def _name(env: object) -> str:
    if isinstance(env, str):
        return env
    return env.__name__ if inspect.isclass(env) else type(env).__name__


@cache
def _log_once(name: str, multi_turn: bool, reason: str) -> None:
    logger.info("%s is %s: %s", name, "multi-turn" if multi_turn else "single-turn", reason)
