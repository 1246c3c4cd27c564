"""Recognises environments of verifiers, old and new, and makes them a source for a trainer."""

from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

from turnwise.envs.base import EnvError
from turnwise.integrations.verifiers.source import Source


def is_legacy_environment(env: object) -> bool:
    """True for an environment of verifiers 0.3.1 or before."""
    return _derives(env, "Environment")


def is_taskset(env: object) -> bool:
    """True for a taskset or an Env of verifiers 0.4, alone or with what plays it."""
    return isinstance(env, TasksetEnv) or _derives(env, "Taskset") or _derives(env, "Env")


def _derives(env: object, name: str) -> bool:
    return any(
        cls.__name__ == name and cls.__module__.partition(".")[0] == "verifiers"
        for cls in type(env).__mro__
    )


class TasksetEnv:
    """A taskset of verifiers 0.4 with what plays it in this process.

    Args:
        taskset: its tasks give the prompts, the stop conditions and the rewards. Where its package
            has an `Env` of its own, that drives the episode. An `Env` itself may be given too.
        tools: functions that the model may call, beside the toolsets of the taskset. A first
            parameter named `trace` is given the trace.
        user: what the user says to a reply without tool calls, from (messages, task data); None
            ends the episode. May be async. Without it, such a reply ends the episode.
        max_turns: replies of each agent of an episode.
        harness: "chat" is a loop in this process, without tools of its own; "bash" is the same with
            a shell on this machine, for those who trust the model with it. None: the harness of the
            taskset's package, or else "chat".
    """

    multi_turn = True

    def __init__(
        self,
        taskset: Any,
        *,
        tools: Sequence[Callable[..., Any]] = (),
        user: Callable[..., Any] | None = None,
        max_turns: int = 10,
        harness: str | None = None,
    ) -> None:
        if harness not in (None, "chat", "bash"):
            raise ValueError(f"harness is None, 'chat' or 'bash', got {harness!r}")
        self.taskset = taskset
        self.functions = tuple(tools)
        self.user = user
        self.max_turns = max_turns
        self.harness = harness


def verifiers_source(env: Any) -> Source:
    """The source that an environment of verifiers is.

    Raises:
        EnvError: it asks for what turnwise cannot honour; the message names it.
    """
    if is_legacy_environment(env):
        from turnwise.integrations.verifiers.legacy import legacy_source

        return legacy_source(env)
    release = version("verifiers")
    if tuple(int(part) for part in release.split(".")[:2]) < (0, 4):
        raise EnvError(
            f"tasksets need verifiers 0.4, and {release} is installed; what it calls an "
            "Environment can be used with it"
        )
    from turnwise.integrations.verifiers.tasks import taskset_source

    return taskset_source(env if isinstance(env, TasksetEnv) else TasksetEnv(env))
