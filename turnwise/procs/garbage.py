"""Python's garbage collector during a rollout."""

import gc
from collections.abc import Generator
from contextlib import contextmanager

YOUNG_OBJECTS = 500_000
"""Container objects that are made before the collector looks at the young ones (Python's own default: 700)."""
KEPT_OBJECTS = 1_500_000
"""Container objects that rollouts leave behind before the collector looks at everything."""


class _Held:
    """How many rollouts run, and what to restore after the last of them."""

    count = 0
    threshold: tuple[int, int, int] | None = None
    frozen = False
    """Whether the heap as it was before is out of the collector's sight meanwhile."""
    kept = 0
    """Objects that were left behind since everything was last looked at."""


@contextmanager
def calm_collector() -> Generator[None]:
    """Keeps the collector from walking through everything that was there before, models and libraries, again and
    again: a rollout makes many objects and nearly no cycles, and would spend two fifths of its time on that.

    Afterwards what is left, the episodes, counts as old: it is looked at with everything else, which is seen to when
    enough has come together. Where something froze objects for good, which some interpreters and libraries do, it stays
    so, and what is left counts as young. The collector stays on, for what environments may leave behind. May be entered
    more than once. Where the program switched it off, nothing is changed.

    Example:
        >>> before = gc.get_threshold()
        >>> with calm_collector():
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
                # What was freed meanwhile, an earlier rollout's episodes perhaps, is taken off Python's count.
                _Held.kept += max(gc.get_count()[0], KEPT_OBJECTS // 75)
                gc.freeze()
                gc.unfreeze()
            gc.set_threshold(*_Held.threshold)
            _Held.threshold = None
            if _Held.kept > KEPT_OBJECTS:
                _Held.kept = 0
                gc.collect()
