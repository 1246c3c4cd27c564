"""rollout.enough_groups: a training rollout ends with its first groups; slower ones are dropped."""

import threading

import pytest
from pydantic import ValidationError
from rollout_parts import CountEnv, Faulty, config_for, raises, says

from turnwise.config.schema import Config, RolloutConfig, TrainConfig
from turnwise.integrations.trl.mapping import refuse
from turnwise.rollout.proxy import AgentProxy, RolloutError
from turnwise.rollout.sync import SyncMultiTurnRollout
from turnwise.testing.tiny import tiny_tokenizer
from turnwise.types import Message, Observation, StepResult, Task


class Slow(CountEnv):
    """Stands still in the second turn of the last member of some groups, until it is told to go
    on."""

    def __init__(self, slow: set[str], go_on: threading.Event, closed: list[str]) -> None:
        super().__init__()
        self._slow, self._go_on, self._closed = slow, go_on, closed
        self._task = ""

    def reset(self, task: Task, noise_seed: int = 0) -> Observation:
        self._task = task.id
        return super().reset(task, noise_seed)

    def step(self, message: Message) -> StepResult:
        if self._task in self._slow and self.count == 1:
            assert self._go_on.wait(300)
        return super().step(message)

    def close(self) -> None:
        self._closed.append(self._task)


def test_the_slow_groups_are_dropped_whole() -> None:
    """Group 1 never ends: a rollout that waited for it would not end either."""
    config = config_for(groups=3, size=2, enough_groups=2, isolation="thread", num_workers=3)
    go_on, slow = threading.Event(), set[str]()
    closed: list[str] = []
    proxy = AgentProxy(
        config, says(), tiny_tokenizer(), factories={"count": lambda: Slow(slow, go_on, closed)}
    )
    try:
        tasks = [agent.plan.task.id for agent in proxy.env_state.start(0)]
        slow.add(tasks[2])
        threads = threading.active_count()
        result = proxy.play(0)
        assert [(e.group_id, e.index) for e in result.episodes] == [(0, 0), (0, 1), (2, 0), (2, 1)]
        assert result.dropped == ()
        assert result.late == 2
        assert closed.count(tasks[2]) == 2, "both environments of the late group are closed"
        assert threading.active_count() >= threads + 2, "those that stand still are replaced"
        slow.clear()
        assert len(proxy.play(1).episodes) >= 4
    finally:
        go_on.set()
        proxy.close()


def test_all_groups_are_kept_where_none_is_late() -> None:
    proxy = AgentProxy(
        config_for(groups=2, enough_groups=2),
        says(),
        tiny_tokenizer(),
        factories={"count": CountEnv},
    )
    try:
        result = proxy.play(0)
    finally:
        proxy.close()
    assert (len(result.episodes), result.late) == (4, 0)


def test_failed_groups_count_as_over() -> None:
    """A group that fails is over too; a rollout of nothing else says why."""
    proxy = AgentProxy(
        config_for(groups=2, enough_groups=1),
        says(),
        tiny_tokenizer(),
        factories={"count": lambda: Faulty(raises, [0])},
    )
    with pytest.raises(RolloutError, match="the environment broke"):
        proxy.play(0)
    proxy.close()


def test_evaluation_plays_every_group() -> None:
    config = config_for(groups=2, enough_groups=1)
    proxy = AgentProxy(config, says(), tiny_tokenizer(), split="val", factories={"count": CountEnv})
    try:
        result = proxy.play(0)
    finally:
        proxy.close()
    assert (len(result.episodes), result.late) == (4, None)


def test_what_cannot_be_honoured_is_refused_by_name() -> None:
    with pytest.raises(ValidationError, match=r"enough_groups = 9 .* train.env_groups = 8"):
        RolloutConfig(enough_groups=9)
    with pytest.raises(ValidationError, match=r"train.deterministic: true contradicts"):
        Config(rollout=RolloutConfig(enough_groups=4), train=TrainConfig(deterministic=True))
    config = config_for(groups=2, enough_groups=1)
    with pytest.raises(ValueError, match=r"rollout.enough_groups = 1 .* lockstep"):
        SyncMultiTurnRollout(says(), config, tiny_tokenizer())
    config = Config(algo={"name": "grpo"}, rollout=RolloutConfig(enough_groups=4))
    with pytest.raises(ValueError, match=r"rollout.enough_groups = 4 .* backend trl"):
        refuse(config)
