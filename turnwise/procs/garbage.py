"""Python's garbage collector during a rollout."""

import gc
from collections.abc import Generator
from contextlib import contextmanager

YOUNG_OBJECTS = 500_000
"""Allocations before a collection of the young generation (Python's default: 700)."""
KEPT_OBJECTS = 1_500_000
"""Objects left by rollouts before a full collection."""


class _Held:
    """The number of running rollouts, and the settings to restore after the last one."""

    count = 0
    threshold: tuple[int, int, int] | None = None
    frozen = False
    """True if the existing heap is frozen during the rollouts."""
    kept = 0
    """Objects left since the last full collection."""


@contextmanager
def fewer_collections() -> Generator[None]:
    """Keeps the garbage collector from scanning models and libraries again and again. A rollout
    allocates many objects and almost no cycles; collections would take two fifths of its time.

    Afterwards the remaining objects, the episodes, belong to the old generation, and a full
    collection runs when enough of them have accumulated. Objects that were frozen before stay
    frozen; then the remaining objects stay in the young generation. The collector stays enabled,
    for cycles made by environments. The context may be nested. If the program has disabled the
    collector, nothing changes.

    Example:
        >>> before = gc.get_threshold()
        >>> with fewer_collections():
        ...     gc.get_threshold()[0] >= YOUNG_OBJECTS
        True
        >>> gc.get_threshold() == before, gc.get_freeze_count()
        (True, 0)
    """
    if _Held.count == 0 and gc.isenabled():
        _Held.threshold = gc.get_threshold()
        _Held.frozen = not gc.get_freeze_count()
        if _Held.frozen:
            gc.freeze()
        gc.set_threshold(max(YOUNG_OBJECTS, _Held.threshold[0]), *_Held.threshold[1:])
    _Held.count += 1
    try:
        yield
    finally:
        _Held.count -= 1
        if _Held.count == 0 and _Held.threshold is not None:
            if _Held.frozen:
                # Objects freed in between, such as earlier episodes, lower Python's count.
                _Held.kept += max(gc.get_count()[0], KEPT_OBJECTS // 75)
                gc.freeze()
                gc.unfreeze()
            gc.set_threshold(*_Held.threshold)
            _Held.threshold = None
            if _Held.kept > KEPT_OBJECTS:
                _Held.kept = 0
                gc.collect()
