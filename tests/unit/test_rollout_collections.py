"""The garbage collector during rollouts: left alone for the most part, and nothing is kept for
good."""

import gc
import weakref

import pytest

from turnwise.procs import garbage as collector
from turnwise.procs.garbage import fewer_collections


class Node:
    def __init__(self) -> None:
        self.me = self


def test_what_a_rollout_leaves_behind_is_collected_once_enough_came_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(collector, "KEPT_OBJECTS", 20_000)
    monkeypatch.setattr(collector._Held, "kept", 0)
    with fewer_collections():
        node = Node()
        found = weakref.ref(node)
        del node
    assert found() is not None  # a cycle, which nobody has looked for
    kept: list[list[list[int]]] = []
    while found() is not None and len(kept) < 10:
        with fewer_collections():
            kept.append([[] for _ in range(9_000)])
    assert found() is None
    assert 2 <= len(kept) <= 4


def test_it_is_collected_too_where_every_rollout_frees_what_the_one_before_left() -> None:
    with fewer_collections():
        node = Node()
        found = weakref.ref(node)
        del node
    rounds = 0
    while found() is not None and rounds < 100:
        with fewer_collections():
            pass
        rounds += 1
    assert found() is None


def test_a_rollout_is_not_walked_through_when_it_ends() -> None:
    times: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            times.append(info["generation"])

    gc.collect()
    gc.callbacks.append(note)
    try:
        with fewer_collections():
            kept = [[] for _ in range(30_000)]
        made = [[] for _ in range(100)]
    finally:
        gc.callbacks.remove(note)
    assert len(kept) + len(made) == 30_100
    assert times == []


def test_a_program_that_froze_its_heap_keeps_it_and_is_left_alone_too() -> None:
    times: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        times.append(info["generation"])

    gc.freeze()
    frozen, threshold = gc.get_freeze_count(), gc.get_threshold()
    gc.callbacks.append(note)
    try:
        with fewer_collections():
            kept = [[] for _ in range(30_000)]
            assert len(kept) == 30_000
            assert times == []
        # Threads of other tests may free some of them; thawed, there would be none.
        assert gc.get_freeze_count() > 0.9 * frozen
        assert gc.get_threshold() == threshold
    finally:
        gc.callbacks.remove(note)
        gc.unfreeze()
