"""One time limit for many waiters: who is late is told so, and nobody else."""

import asyncio
import threading
from pathlib import Path

import pytest
from rollout_parts import CountEnv, config_for, says

from turnwise.cli.play import play_game
from turnwise.config import Config
from turnwise.config.schema import EnvConfig, RolloutConfig
from turnwise.envs.base import EnvError
from turnwise.evaluate.players import ScriptedPlayer
from turnwise.isolation.measure import choose_isolation
from turnwise.procs.deadlines import Deadlines
from turnwise.rollout.env_state import EnvStateManager
from turnwise.rollout.proxy import AgentProxy
from turnwise.testing.tiny import tiny_tokenizer
from turnwise.train.sources import play_tasks
from turnwise.types import Episode, Status, Task


def test_only_who_is_late_is_told_so() -> None:
    async def run() -> list[object]:
        deadlines = Deadlines(1.0)
        waits = [0.0, 30.0, 0.02, 30.0, 0.05]
        jobs = [
            asyncio.create_task(deadlines.wait(asyncio.sleep(seconds, seconds)))
            for seconds in waits
        ]
        return await asyncio.gather(*jobs, return_exceptions=True)

    found = asyncio.run(run())
    assert found[0::2] == [0.0, 0.02, 0.05]
    assert all(isinstance(error, TimeoutError) for error in found[1::2])


def test_a_task_may_wait_again_after_it_was_late() -> None:
    async def run() -> tuple[str, str, int]:
        deadlines = Deadlines(0.3)
        with pytest.raises(TimeoutError, match=r"not over after 0\.3 s"):
            await deadlines.wait(asyncio.sleep(30))
        task = asyncio.current_task()
        assert task is not None
        return "late", await deadlines.wait(asyncio.sleep(0.01, "in time")), task.cancelling()

    assert asyncio.run(run()) == ("late", "in time", 0)


def test_who_is_cancelled_by_another_is_not_late() -> None:
    async def run() -> None:
        deadlines = Deadlines(60.0)
        job = asyncio.create_task(deadlines.wait(asyncio.sleep(30)))
        await asyncio.sleep(0.01)
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job
        # Cancelled by both in the same moment: the other one is heard.
        job = asyncio.create_task(deadlines.wait(asyncio.sleep(30)))
        await asyncio.sleep(0.01)
        deadlines._late.add(job)
        job.cancel()
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job

    asyncio.run(run())


def test_who_is_late_while_a_cancellation_is_being_handled_is_late_all_the_same() -> None:
    told: list[str] = []

    async def run() -> None:
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:  # cleans up, within a limit
            with pytest.raises(TimeoutError):
                await Deadlines(0.05).wait(asyncio.sleep(30))
            told.append("late")
            raise

    async def cancel() -> None:
        job = asyncio.create_task(run())
        await asyncio.sleep(0.01)
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job

    asyncio.run(cancel())
    assert told == ["late"]


def test_errors_and_results_pass_through() -> None:
    async def fails() -> None:
        raise KeyError("from inside")

    async def run() -> None:
        with pytest.raises(KeyError, match="from inside"):
            await Deadlines(1.0).wait(fails())

    asyncio.run(run())


def test_every_loop_has_its_timer() -> None:
    deadlines = Deadlines(0.05)
    # Each asyncio.run is another loop, and the one before may have left its timer behind.
    for _ in range(3):
        assert asyncio.run(deadlines.wait(asyncio.sleep(0, 1))) == 1
        with pytest.raises(TimeoutError):
            asyncio.run(deadlines.wait(asyncio.sleep(30)))


class Stuck(CountEnv):
    """One method never returns. The probe is bound to its thread, like a connection of sqlite3."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self._method, self._thread = method, threading.get_ident()

    def make_task(self, seed: int, split: str) -> Task:
        assert threading.get_ident() == self._thread
        if self._method == "make_task":
            threading.Event().wait()
        return super().make_task(seed, split)

    def close(self) -> None:
        if self._method == "close":
            threading.Event().wait()


@pytest.mark.parametrize("isolation", ["inline", "thread"])
@pytest.mark.parametrize("method", ["make_task", "close"])
def test_a_method_outside_the_episode_that_hangs_has_a_limit(method: str, isolation: str) -> None:
    seconds = {"make_task": (0.2, 60.0), "close": (60.0, 0.2)}[method]
    limits = dict(zip(("reset_timeout", "step_timeout"), seconds, strict=True))
    config = config_for(isolation=isolation, num_workers=2, retries=0, **limits)
    factories = {"count": lambda: Stuck(method)}
    proxy = AgentProxy(config, says(), tiny_tokenizer(), factories=factories)
    episodes = proxy.play_all(0)
    proxy.close()
    if method == "close":
        assert {episode.status for episode in episodes} == {Status.COMPLETED}
    else:
        assert all("make_task took longer than 0.2 s" in str(e.error) for e in episodes)


@pytest.mark.parametrize("method", ["make_task", "close"])
def test_players_wait_for_no_method_without_a_limit(method: str) -> None:
    """Demonstrations of `sft` and warm starts: tasks are made before anything is played."""
    seconds = {"make_task": (0.2, 60.0), "close": (60.0, 0.2)}[method]
    limits = dict(zip(("reset_timeout", "step_timeout"), seconds, strict=True))
    config = config_for(isolation="inline", num_workers=2, retries=0, **limits)

    def play() -> list[Episode]:
        return play_tasks(
            config,
            ScriptedPlayer("test", lambda situation: "go"),
            "count",
            config.env,
            count=3,
            purpose="test",
            task_seed=lambda number: number,
            factories={"count": lambda: Stuck(method)},
        )

    if method == "close":
        assert len(play()) == 3
    else:
        with pytest.raises(EnvError, match=r"count: make_task took longer than 0\.2 s"):
            play()


def test_one_episode_at_a_time_waits_for_no_task_without_a_limit() -> None:
    """As verl's agent loop asks for them. Its members of one step wait once."""
    config = config_for(isolation="inline", reset_timeout=0.2)
    state = EnvStateManager(config, factories={"count": lambda: Stuck("make_task")})
    asked = [state.task("count", seed, step=4) for seed in (1, 2)]
    assert {error for _, error in asked} == {"count: make_task took longer than 0.2 s"}
    assert [task.seed for task, _ in asked] == [1, 2]
    state.close()


NO_TASK = """
import time

from turnwise.envs.games.bandit import Bandit
from turnwise.envs.text_turns import TextTurns


class NoTask(TextTurns):
    def make_task(self, seed, split):
        time.sleep(600)


def make():
    from turnwise.config.schema import EnvConfig

    return NoTask(Bandit(), config=EnvConfig(name="bandit"), name="no_task")
"""


def test_a_task_that_is_never_made_hangs_neither_the_measurement_nor_a_game(tmp_path: Path) -> None:
    (tmp_path / "no_task.py").write_text(NO_TASK)
    env = EnvConfig(name=f"{tmp_path / 'no_task.py'}:make")
    rollout = RolloutConfig(reset_timeout=0.5)
    assert choose_isolation({"x": env}, rollout, factories={}) == ("process", {"x": float("inf")})
    with pytest.raises(EnvError, match=r"make_task took longer than 0\.5 s"):
        play_game(
            Config(env=env, rollout=rollout.model_copy(update={"isolation": "inline"})),
            seed=0,
            split="train",
            as_model=False,
        )
