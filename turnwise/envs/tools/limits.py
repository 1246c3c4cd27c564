"""Time limits for tools that may hang: the call runs in a process of its own, which is killed."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

from turnwise.envs.tools.worker import Worker

P = ParamSpec("P")
R = TypeVar("R")


def with_time_limit(
    function: Callable[P, R], *, seconds: float, memory_mb: int | None = None
) -> Callable[P, R]:
    """The same function, but a call that takes longer than `seconds` is killed and raises
    TimeoutError.

    ToolEnv's own limit lets a slow call go on in its thread; this one ends it, whatever it does,
    and can limit its memory too. The function must be importable (defined at the top level of a
    module), and its arguments and result are JSON, as those of tools are. Its process is started by
    the first call and kept.

    Example:
        >>> import statistics
        >>> mean = with_time_limit(statistics.fmean, seconds=30)
        >>> mean([1, 2, 3])
        2.0
    """
    module, name = function.__module__, function.__qualname__
    if module == "__main__" or "<" in name:
        raise ValueError(
            "a function with a time limit is defined at the top level of a module that can be "
            "imported, "
            f"got {module}:{name}; move it into a file of its own"
        )
    if seconds <= 0:
        raise ValueError(f"a time limit is positive, got {seconds} seconds")
    worker = Worker(f"{module}:{name}", memory_mb=memory_mb)

    @functools.wraps(function)
    def limited(*args: P.args, **kwargs: P.kwargs) -> R:
        return worker.call(*args, timeout=seconds, keywords=cast(dict[str, Any], kwargs))

    return limited
