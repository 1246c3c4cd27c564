"""Every player plays under the same limits: a step that hangs, and one that ends its process, cost
an episode each."""

import subprocess
from pathlib import Path

import pytest
import warm

from turnwise.config.schema import Config, EnvConfig, RolloutConfig
from turnwise.evaluate.check_env import check_beside, check_env
from turnwise.evaluate.players import RandomPlayer, play_episodes
from turnwise.train.warmstart import play_randomly
from turnwise.types import Status

SOURCE = """
import os, time
from turnwise import BaseEnv

class Dangerous(BaseEnv):
    actions = ("stay", "go")

    def __init__(self, *, end: str):
        self.end = end

    def reset(self, seed=None, **kwargs):
        self.safe = (seed or 0) % 2 == 0
        return "Choose."

    def step(self, action):
        if not self.safe and self.end == "exit":
            os._exit(3)
        if not self.safe and self.end == "sleep":
            time.sleep(30)
        return "Done.", 1.0, True, {"success": True}
"""


@pytest.fixture
def config(tmp_path: Path, request: pytest.FixtureRequest) -> Config:
    (tmp_path / "dangerous.py").write_text(SOURCE)
    env = EnvConfig(name=f"{tmp_path / 'dangerous.py'}:Dangerous", options={"end": request.param})
    return Config(env=env, rollout=RolloutConfig(step_timeout=0.5, retries=0, num_workers=1))


@pytest.mark.parametrize(
    ("config", "status"), [("exit", "env_error"), ("sleep", "env_timeout")], indirect=["config"]
)
def test_a_player_loses_an_episode_and_not_the_evaluation(config: Config, status: str) -> None:
    episodes = play_episodes(config, RandomPlayer(), episodes=6)
    assert {episode.status.value for episode in episodes} == {"completed", status}


@pytest.mark.parametrize("config", ["exit"], indirect=True)
def test_a_warm_start_goes_on_without_the_episodes_that_failed(config: Config) -> None:
    played = play_randomly(config, config.env.name, config.env, count=6)
    assert 0 < len(played) < 6
    assert {episode.status for episode in played} == {Status.COMPLETED}


@pytest.mark.parametrize(
    ("config", "said"),
    [("exit", "ended its process (exit 3)"), ("sleep", "step took longer")],
    indirect=["config"],
)
def test_check_env_reports_it(config: Config, said: str) -> None:
    report = check_beside(config.env.name, seeds=3, config=config.env, limits=config.rollout)
    assert not report.ok
    assert said in str(report)


@pytest.mark.parametrize("config", ["sleep"], indirect=True)
def test_check_env_of_an_object_ends_in_time(config: Config) -> None:
    report = check_env(config.env.name, seeds=3, config=config.env, limits=config.rollout)
    assert [finding.check for finding in report.findings] == ["time"]


@pytest.mark.parametrize("config", ["sleep"], indirect=True)
def test_a_person_is_told_that_the_environment_hangs(config: Config) -> None:
    words = [
        "play",
        config.env.name,
        "env.options.end=sleep",
        "rollout.step_timeout=0.5",
        "--seed",
        "1",
    ]
    command = [*warm.turnwise(), *words]
    done = subprocess.run(command, input="go\n", capture_output=True, text=True, timeout=600)
    assert done.returncode != 0
    assert "env_timeout: step took longer than 0.5 s" in done.stderr
