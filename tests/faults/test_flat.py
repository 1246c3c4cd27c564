"""A long run takes no more memory and no more descriptors than a short one."""

import ctypes
import gc
import os
from pathlib import Path

import psutil
import pytest
from kill_runs import config_for

from turnwise.config.schema import Config
from turnwise.log.events import Event, StepDone
from turnwise.train.run import train


class Watch:
    """Notes descriptors after every step, and resident megabytes after every tenth."""

    def __init__(self) -> None:
        self.descriptors: list[int] = []
        self.megabytes: list[float] = []

    def handle(self, event: Event) -> None:
        if not isinstance(event, StepDone):
            return
        self.descriptors.append(len(os.listdir("/proc/self/fd")))
        if event.step % 10 == 0:
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)  # what the allocator keeps for later is no leak
            self.megabytes.append(psutil.Process().memory_info().rss / 2**20)

    def close(self) -> None:
        pass


def watched(folder: Path, steps: int, **rollout: object) -> Watch:
    """Trains that many steps, with an evaluation and a checkpoint in every tenth."""
    plain = config_for(folder).model_dump()
    plain["train"] |= {"steps": steps, "max_idle_steps": steps}
    plain["eval"] |= {"every": 10}
    plain["checkpoint"] |= {"every": 10}
    plain["rollout"] |= rollout
    watch = Watch()
    train(Config.model_validate(plain), sinks=[watch])
    assert len(watch.descriptors) == steps
    return watch


def test_twenty_steps_leave_no_descriptor(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    watch = watched(tmp_path, 20)
    assert max(watch.descriptors[10:]) <= max(watch.descriptors[:10])
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("isolation", ["inline", "process"])
def test_three_hundred_steps_are_flat(isolation: str, tmp_path: Path) -> None:
    watch = watched(tmp_path, 300, isolation=isolation)
    assert max(watch.descriptors[100:]) <= max(watch.descriptors[:100])
    # The first hundred steps fill caches that have a bound.
    early, late = max(watch.megabytes[5:10]), max(watch.megabytes[25:])
    assert late - early < 8.0, watch.megabytes
