"""Environments of other libraries. Gymnasium is always there; the others are tested where they are
installed."""

import ast
import importlib.util
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from types import ModuleType, SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest

from turnwise.config.schema import Config, EnvConfig, TrainConfig
from turnwise.envs.base import BadActionError, EnvError
from turnwise.envs.registry import find_env, list_envs, make, make_env
from turnwise.envs.text_turns import TextTurns
from turnwise.evaluate.check_env import check_env
from turnwise.evaluate.players import RandomPlayer, ScriptedPlayer, play_episodes
from turnwise.evaluate.replay import replay_episodes
from turnwise.integrations.envs.common import OwnRandom
from turnwise.integrations.envs.gem import GemEnv
from turnwise.integrations.envs.gymnasium import GymnasiumEnv
from turnwise.integrations.envs.openenv import OpenEnvEnv
from turnwise.integrations.envs.reasoning_gym import ReasoningGymEnv
from turnwise.integrations.envs.textarena import TextArenaEnv
from turnwise.types import Episode, Message, StepResult

LIBRARIES = {
    "textarena": "textarena",
    "reasoning_gym": "reasoning-gym",
    "gem": "gem",
    "openenv": "openenv",
}


def installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


@pytest.mark.parametrize(("name", "extra"), LIBRARIES.items())
def test_a_missing_package_is_named_with_its_extra(name: str, extra: str) -> None:
    if installed(name):
        pytest.skip(f"{name} is installed")
    with pytest.raises(
        ImportError, match=rf"{name}.*not installed; run: pip install 'turnwise\[{extra}\]'"
    ):
        make(f"{name}:something")
    assert not find_env(name).available


def test_missing_packages_are_named_by_the_adapters_themselves() -> None:
    if installed("openenv"):
        pytest.skip("openenv is installed")
    with pytest.raises(
        ImportError, match=r"openenv is not installed; run: pip install 'turnwise\[openenv\]'"
    ):
        OpenEnvEnv("http://127.0.0.1:1")


def test_extras_of_the_doors_are_in_the_project_file() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    for spec in list_envs():
        assert spec.extra is None or f"\n{spec.extra} = [" in text, spec.name


def test_a_door_needs_to_know_which() -> None:
    with pytest.raises(ValueError, match=r"has many variants.*option 'id', or as gymnasium:\.\.\."):
        make("gymnasium")
    assert isinstance(make("gymnasium", {"id": "CartPole-v1"}), GymnasiumEnv)
    assert isinstance(make("Gymnasium:CartPole"), GymnasiumEnv)


@pytest.mark.parametrize(
    "id", ["Taxi", "FrozenLake", "CliffWalking", "Blackjack", "CartPole", "MountainCar"]
)
def test_gymnasium_environments_keep_the_contract(id: str) -> None:
    report = check_env(f"gymnasium:{id}", seeds=4)
    assert report.ok, report


@pytest.mark.parametrize("id", ["Taxi", "FrozenLake", "Blackjack", "CartPole"])
def test_gymnasium_episodes_replay(id: str) -> None:
    config = Config(env=EnvConfig(name=f"gymnasium:{id}"), train=TrainConfig(max_turn=4))
    episodes = play_episodes(config, RandomPlayer(), episodes=4)
    assert replay_episodes(episodes, config) == [None] * 4


def test_actions_have_names_and_reach_gymnasium() -> None:
    plain = gymnasium.make(
        "CliffWalking-v1" if "CliffWalking-v1" in gymnasium.registry else "CliffWalking-v0"
    )
    plain.reset(seed=0)
    env = GymnasiumEnv("CliffWalking")
    env.reset(seed=0)
    for number, name in ((0, "up"), (1, "right"), (3, "left"), (2, "down"), (1, "right")):
        state, reward, *_ = plain.step(number)
        text, found, *_ = env.step(name)
        row, column = divmod(int(state), 12)
        assert (found, text.startswith(f"You stand at row {row}, column {column} ")) == (
            float(reward),
            True,
        )


def test_members_of_a_group_start_alike_and_slip_apart() -> None:
    def play(noise_seed: int) -> list[str]:
        env = GymnasiumEnv("FrozenLake", kwargs={"is_slippery": True})
        return [env.reset(seed=1, noise_seed=noise_seed)[0]] + [
            env.step("right")[0] for _ in range(3)
        ]

    walks = [play(noise_seed) for noise_seed in range(6)]
    assert len({walk[0] for walk in walks}) == 1
    assert len({tuple(walk) for walk in walks}) > 1
    assert play(2) == walks[2]


def shout(observation: Any, env: Any) -> str:
    return f"STATE {len(observation)}!"


def test_observations_and_actions_can_be_the_users() -> None:
    options = {
        "observe": f"{__name__}:shout",
        "actions": ["west", "east"],
        "instruction": "Balance.",
    }
    env = make_env(EnvConfig(name="gymnasium:CartPole-v1", options=options))
    assert env.reset(env.make_task(0, "train")).messages[-1].content == "STATE 4!"
    result = env.step(
        Message(role="assistant", content="<think></think><answer>East || west</answer>")
    )
    assert (result.action, result.reward) == ("east || west", 2.0)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gymnasium:Taxy", {}, r"has no 'Taxy'; did you mean Taxi"),
        ("gymnasium:Pendulum-v1", {}, "turnwise takes discrete ones"),
        ("gymnasium:CartPole-v1", {"actions": ["one"]}, "has 2 actions, and names must be as many"),
        ("gymnasium:CartPole-v1", {"observe": "nothing"}, "module:function"),
        ("gymnasium:CartPole-v1", {"obsreve": "x"}, "did you mean 'observe'"),
        ("gymnasium:CartPole-v1", {"split_by": "luck"}, "split_by is opening or seed, got 'luck'"),
    ],
)
def test_mistakes_are_explained(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(name, options)


class Counted(gymnasium.Env[int, int]):
    """Few states in sight, and every reset counts."""

    action_space = gymnasium.spaces.Discrete(2)
    observation_space = gymnasium.spaces.Discrete(40)
    resets = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[int, dict[str, Any]]:
        super().reset(seed=seed)
        Counted.resets += 1
        return int(self.np_random.integers(40)), {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        return 0, 0.0, True, False, {}


def openings(rule: str, split: str, *, num: int = 30) -> tuple[set[str], int]:
    """(openings of so many tasks of the split, resets of Gymnasium's that they took)."""
    if "Counted-v0" not in gymnasium.registry:
        gymnasium.register("Counted-v0", entry_point=Counted)
    env = GymnasiumEnv("Counted-v0", split_by=rule)
    before = Counted.resets
    found = {env.reset(seed=seed, split=split)[0] for seed in range(num)}
    return found, Counted.resets - before


def test_a_split_by_seed_takes_one_reset_and_by_opening_keeps_openings_apart() -> None:
    by_seed = {split: openings("seed", split) for split in ("train", "val")}
    assert [resets for _, resets in by_seed.values()] == [30, 30]
    assert by_seed["train"][0] & by_seed["val"][0], "40 states, drawn 60 times: some are in both"
    by_opening = {split: openings("opening", split) for split in ("train", "val")}
    assert by_opening["val"][1] > 60
    assert not by_opening["train"][0] & by_opening["val"][0]


def test_a_slow_search_for_an_opening_names_the_remedy(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("turnwise.integrations.envs.common.LONG_SECONDS", 0.0)
    openings("opening", "val", num=5)
    assert "split_by: seed" in caplog.text


def test_own_random_isolates_and_restores() -> None:
    random.seed(5)
    np.random.seed(5)
    before = random.getstate()
    first, second = OwnRandom(1), OwnRandom(2)
    drawn: list[tuple[float, float]] = []
    for own in (first, second, first, second):
        with own.drawing():
            drawn.append((random.random(), float(np.random.random())))
    assert random.getstate() == before
    alone = OwnRandom(1)
    with alone.drawing():
        assert [(random.random(), float(np.random.random())) for _ in range(2)] == [
            drawn[0],
            drawn[2],
        ]


def wrong(situation: Any) -> str:
    return (
        "<think></think><answer>"
        + ("[1 2 3 4]", "[6 5 4 3]", "hm")[situation.turn % 3]
        + "</answer>"
    )


@pytest.mark.skipif(not installed("textarena"), reason="needs the extra textarena")
@pytest.mark.parametrize(
    "id", ["Mastermind-v0", "Sudoku-v0", "TowerOfHanoi-v0", "FrozenLake-v0", "Minesweeper-v0"]
)
def test_textarena_games(id: str) -> None:
    report = check_env(f"textarena:{id}", seeds=5)
    assert report.ok, report
    config = Config(env=EnvConfig(name=f"textarena:{id}"), train=TrainConfig(max_turn=4))
    episodes = play_episodes(config, ScriptedPlayer("wrong", wrong), episodes=4)
    assert all(not episode.status.failed for episode in episodes)
    assert replay_episodes(episodes, config) == [None] * 4


@pytest.mark.skipif(not installed("textarena"), reason="needs the extra textarena")
def test_textarena_with_an_opponent() -> None:
    with pytest.raises(ValueError, match="needs an opponent"):
        make("textarena:TicTacToe-v0", {"num_players": 2})
    options = {"num_players": 2, "opponent": f"{__name__}:takes_any_cell"}
    env = make_env(EnvConfig(name="textarena:TicTacToe-v0", options=options))
    env.reset(env.make_task(0, "train"), 3)
    results = [
        env.step(Message(role="assistant", content=f"<think></think><answer>[{cell}]</answer>"))
        for cell in (4,)
    ]
    assert not results[0].terminated
    assert "Player 1" in results[0].messages[0].content


def takes_any_cell(text: str, rng: Random) -> str:
    return f"[{rng.choice([0, 1, 2, 3, 5, 6, 7, 8])}]"


@pytest.mark.skipif(not installed("reasoning_gym"), reason="needs the extra reasoning-gym")
@pytest.mark.parametrize("dataset", ["chain_sum", "word_sorting", "knights_knaves"])
def test_reasoning_gym_data_sets(dataset: str) -> None:
    report = check_env(f"reasoning_gym:{dataset}", seeds=5)
    assert report.ok, report
    env = make_env(EnvConfig(name=f"reasoning_gym:{dataset}"))
    assert isinstance(env, TextTurns)
    env.reset(env.make_task(2, "train"))
    answer = env.step(Message(role="assistant", content="<think></think><answer>no</answer>")).info[
        "answer"
    ]
    env.reset(env.make_task(2, "train"))
    right = env.step(Message(role="assistant", content=f"<think></think><answer>{answer}</answer>"))
    assert (right.reward, right.info["success"], right.terminated) == (1.0, True, True)


@pytest.mark.skipif(not installed("reasoning_gym"), reason="needs the extra reasoning-gym")
@pytest.mark.parametrize(
    ("dataset", "answer"),
    [("prime_factorization", "[2]"), ("boxnet", "[2]"), ("game_of_life", '{"a": 1}')],
)
def test_an_answer_that_reasoning_gym_cannot_read_is_the_models_fault(
    dataset: str, answer: str
) -> None:
    config = Config(env=EnvConfig(name=f"reasoning_gym:{dataset}"))
    player = ScriptedPlayer("bad", lambda situation: f"<think></think><answer>{answer}</answer>")
    assert_failed_actions(play_episodes(config, player, episodes=3), config, over=True)


@pytest.mark.skipif(not installed("textarena"), reason="needs the extra textarena")
@pytest.mark.parametrize("id", ["Slitherlink-v0", "ThreeCardMonte-v0", "Cryptarithm-v0"])
def test_a_move_that_textarena_cannot_read_is_the_models_fault(id: str) -> None:
    config = Config(env=EnvConfig(name=f"textarena:{id}"), train=TrainConfig(max_turn=6))
    player = ScriptedPlayer("bad", lambda situation: "<think></think><answer>[x]</answer>")
    for episode in play_episodes(config, player, episodes=3):
        assert (episode.status.value, episode.reward) == ("completed", -1.0)
        assert episode.success is False
        assert "Bad action" in episode.turns[-1].messages[-1].content


@pytest.mark.skipif(not installed("gem"), reason="needs the extra gem")
@pytest.mark.parametrize(
    "id", ["game:GuessTheNumber-v0-easy", "game:Minesweeper-v0-easy", "game:Mastermind-v0-easy"]
)
def test_gem_environments(id: str) -> None:
    report = check_env(f"gem:{id}", seeds=5)
    assert report.ok, report
    config = Config(env=EnvConfig(name=f"gem:{id}"), train=TrainConfig(max_turn=4))
    episodes = play_episodes(config, RandomPlayer(), episodes=4)
    assert all(not episode.status.failed for episode in episodes)
    assert replay_episodes(episodes, config) == [None] * 4


OPENENV_SERVER = """
import sys, uvicorn
from openenv.core.env_server import Environment, create_fastapi_app
from openenv.core.env_server.types import Action, Observation, State

class Say(Action):
    message: str

class Heard(Observation):
    text: str

class Echo(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    def __init__(self):
        super().__init__()
        self._state = State(episode_id="e", step_count=0)
    def reset(self, seed=None, episode_id=None, **kwargs):
        self._state = State(episode_id="e", step_count=0)
        self.seed = seed
        return Heard(text=f"say something, number {seed}", done=False, reward=0.0)
    def step(self, action, timeout_s=None, **kwargs):
        self._state.step_count += 1
        done = self._state.step_count == 2
        said = action.message
        return Heard(text=f"you said {said!r}", done=done, reward=float(len(said)))
    @property
    def state(self):
        return self._state

app = create_fastapi_app(Echo, Say, Heard, max_concurrent_envs=8)
uvicorn.run(app, port=int(sys.argv[1]), log_level="warning")
"""


@pytest.fixture
def openenv_url() -> Iterator[str]:
    import socket
    import urllib.request

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    server = subprocess.Popen([sys.executable, "-c", OPENENV_SERVER, str(port)])
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=1).close()
                break
            except OSError:
                assert server.poll() is None, "the server ended"
                assert time.monotonic() < deadline
                time.sleep(0.2)
        yield url
    finally:
        server.kill()
        server.wait()


@pytest.mark.skipif(not installed("openenv"), reason="needs the extra openenv")
def test_openenv_servers(openenv_url: str) -> None:
    config = Config(env=EnvConfig(name=f"openenv:{openenv_url}"), train=TrainConfig(max_turn=4))
    env = make_env(config.env)
    assert "say something, number 14" in env.reset(env.make_task(7, "train")).messages[-1].content
    result = env.step(Message(role="assistant", content="<think></think><answer>hello</answer>"))
    assert (result.messages[-1].content, result.reward, result.done) == (
        "you said 'hello'",
        5.0,
        False,
    )
    env.close()
    episodes = play_episodes(config, ScriptedPlayer("wrong", wrong), episodes=3)
    assert [episode.status.value for episode in episodes] == ["completed"] * 3
    assert replay_episodes(episodes, config) == [None] * 3


@pytest.mark.skipif(not installed("openenv"), reason="needs the extra openenv")
def test_an_action_that_an_openenv_server_refuses_is_the_models_fault(openenv_url: str) -> None:
    options = {"action_field": "shout"}  # the server's actions have no such field
    env = EnvConfig(name=f"openenv:{openenv_url}", options=options)
    config = Config(env=env, train=TrainConfig(max_turn=2))
    episodes = play_episodes(config, ScriptedPlayer("wrong", wrong), episodes=2)
    assert_failed_actions(episodes, config, over=False)
    assert "VALIDATION_ERROR" in episodes[0].turns[0].messages[-1].content


def assert_failed_actions(episodes: list[Episode], config: Config, *, over: bool) -> None:
    """Every turn of the episodes was a failed action, with the penalty, and the model was told."""
    assert episodes
    for episode in episodes:
        assert episode.status.value == ("completed" if over else "truncated_turns"), episode.error
        for turn in episode.turns:
            assert turn.action is None
            assert turn.reward == config.env.format.format_penalty < 0
            assert "could not be read" in turn.messages[-1].content or over is False


class Refusing:
    """Stands in for the client of an OpenEnv server: refuses "bad", breaks at "gone"."""

    def __init__(self, base_url: str, message_timeout_s: float) -> None:
        self.closed = False

    def sync(self) -> "Refusing":
        return self

    def reset(self, seed: int) -> Any:
        return SimpleNamespace(observation={"text": f"number {seed}"})

    def step(self, body: dict[str, str]) -> Any:
        json.dumps(body)
        if body["message"] == "bad":
            raise RuntimeError("Server error: Invalid message \ud83c (code: VALIDATION_ERROR)")
        if body["message"] == "gone":
            raise RuntimeError("Server error: no such session (code: SESSION_ERROR)")
        return SimpleNamespace(observation={"text": "heard"}, reward=1.0, done=True, metadata=None)

    def close(self) -> None:
        self.closed = True


def test_a_refused_action_costs_the_penalty_and_a_broken_server_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = ModuleType("openenv.core.generic_client")
    client.GenericEnvClient = Refusing  # pyright: ignore[reportAttributeAccessIssue]
    for name, module in {"openenv": ModuleType("openenv"), client.__name__: client}.items():
        monkeypatch.setitem(sys.modules, name, module)
    config = EnvConfig(name="openenv:http://127.0.0.1:9", options={"action_field": "message"})
    env = TextTurns(
        OpenEnvEnv("http://127.0.0.1:9", action_field="message"), config=config, name="openenv"
    )
    task = env.make_task(7, "train")

    def say(text: str) -> StepResult:
        return env.step(
            Message(role="assistant", content=f"<think></think><answer>{text}</answer>")
        )

    env.reset(task)
    refused = say("bad")
    assert refused.reward_parts == {"env": 0.0, "format": config.format.format_penalty}
    assert not refused.done
    assert refused.info["valid"] is False
    assert (
        "The action was refused. Server error: Invalid message \ufffd"
        in refused.messages[0].content
    )
    assert say("good").reward == 1.0, "the episode went on"
    env.reset(task)
    with pytest.raises(EnvError, match="SESSION_ERROR"):
        say("gone")
    env.close()


@pytest.mark.parametrize("depth", [300, 970, 5_000])
def test_an_action_that_is_nested_too_deeply_is_the_models_fault(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = ModuleType("openenv.core.generic_client")
    client.GenericEnvClient = Refusing  # pyright: ignore[reportAttributeAccessIssue]
    for name, module in {"openenv": ModuleType("openenv"), client.__name__: client}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(OpenEnvEnv, "_only_text_field", lambda self: None)
    env = OpenEnvEnv("http://127.0.0.1:9")
    env.reset(7)
    action = '{"message": "bad", "more": ' + "[" * depth + "]" * depth + "}"
    with pytest.raises(BadActionError):
        env.step(action)


class Scores:
    """Stands in for a data set of reasoning-gym: reads whole numbers only, or evaluates answers as
    some do, or reads nothing at all. One that holds a function cannot be sent to a process."""

    def __init__(self, *, broken: bool, read: Any = int) -> None:
        self._broken, self._read = broken, read

    def __getitem__(self, index: int) -> dict[str, str]:
        return {"question": "1 + 1?", "answer": "2"}

    def score_answer(self, answer: str, entry: dict[str, str]) -> float:
        if self._broken:
            raise KeyError("metadata")
        return float(self._read(answer) == int(entry["answer"]))


def test_an_unreadable_answer_costs_the_penalty_and_a_broken_data_set_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gym, factory = ModuleType("reasoning_gym"), ModuleType("reasoning_gym.factory")
    factory.DATASETS = ["sums"]  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "reasoning_gym", gym)
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", factory)

    def answer(text: str, *, broken: bool = False, read: Any = int) -> StepResult:
        gym.create_dataset = lambda name, **settings: Scores(broken=broken, read=read)  # pyright: ignore
        env = TextTurns(ReasoningGymEnv("sums"), config=EnvConfig(), name="sums")
        env.reset(env.make_task(0, "train"))
        return env.step(
            Message(role="assistant", content=f"<think></think><answer>{text}</answer>")
        )

    assert answer("2").reward == 1.0
    bad = answer("[2]")
    assert bad.reward_parts == {"env": 0.0, "format": EnvConfig().format.format_penalty}
    assert bad.terminated
    assert bad.info["success"] is False
    assert "ValueError" in bad.info["refused"]
    with pytest.raises(EnvError, match="KeyError"):
        answer("2", broken=True)
    assert answer("2", read=lambda text: int(text)).reward == 1.0
    monkeypatch.setattr("turnwise.integrations.envs.reasoning_gym.SCORE_SECONDS", 0.5)
    assert answer("1 + 1", read=eval).reward == 1.0
    for text in ("9**9**9**9", "exit()"):
        bad = answer(text, read=eval)
        assert bad.reward == EnvConfig().format.format_penalty
        assert bad.terminated
        assert "more than 0.5 s" in bad.info["refused"]


class Sums:
    """Stands in for an environment of GEM that reads whole numbers only, and breaks at 0."""

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        return "1 + 1?", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if int(action) == 0:
            raise OSError("no such file")
        return "Answered.", float(int(action) == 2), True, True, {}


def test_an_action_that_gem_cannot_read_is_the_models_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gem, table = ModuleType("gem"), ModuleType("gem.envs.registration")
    gem.make = lambda id: Sums()  # pyright: ignore[reportAttributeAccessIssue]
    table.ENV_REGISTRY = {"rg:sums": None}  # pyright: ignore[reportAttributeAccessIssue]
    for module in (gem, table, ModuleType("gem.envs")):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    env = TextTurns(GemEnv("rg:sums"), config=EnvConfig(), name="gem")

    def answer(text: str) -> StepResult:
        env.reset(env.make_task(0, "train"))
        return env.step(
            Message(role="assistant", content=f"<think></think><answer>{text}</answer>")
        )

    assert answer("2").reward == 1.0
    bad = answer("[2]")
    assert bad.reward_parts == {"env": 0.0, "format": EnvConfig().format.format_penalty}
    assert bad.terminated
    assert "ValueError" in bad.info["refused"]
    with pytest.raises(EnvError, match="no such file"):
        answer("0")


class SwappedGame:
    """Stands in for a game of TextArena whose invalid move has the reason in the reward's place."""

    def reset(self, num_players: int, seed: int) -> None:
        self.over = False

    def get_observation(self) -> tuple[int, str]:
        return 0, "Your move, as [k]."

    def step(self, action: str) -> tuple[bool, dict[str, Any]]:
        if action == "[crash]":
            raise IndexError(action)
        if action == "[open":
            ast.literal_eval(action)
        if action == "[lost]":
            raise OSError("no such file")
        self.over = True
        return True, {}

    def close(self) -> tuple[dict[int, Any], dict[int, dict[str, Any]]]:
        return {0: "Bad action. Use `[k]`."}, {0: {"reason": "Invalid Move: 0.0"}}


def test_a_reason_in_the_rewards_place_is_a_lost_game(monkeypatch: pytest.MonkeyPatch) -> None:
    arena, table = ModuleType("textarena"), ModuleType("textarena.envs.registration")
    arena.make = lambda id: SwappedGame()  # pyright: ignore[reportAttributeAccessIssue]
    table.ENV_REGISTRY = {"Monte-v0": None}  # pyright: ignore[reportAttributeAccessIssue]
    for name, module in {"textarena": arena, table.__name__: table}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "textarena.envs", ModuleType("textarena.envs"))
    env = TextArenaEnv("Monte-v0")
    for move in ("[x]", "[crash]", "[open"):
        env.reset(seed=0)
        text, reward, done, info = env.step(move)
        assert (reward, done, info["success"], info["invalid_move"]) == (-1.0, True, False, True)
        assert info["reason"] in text
    env.reset(seed=0)
    with pytest.raises(OSError, match="no such file"):
        env.step("[lost]")


@pytest.mark.skipif(not installed("openenv"), reason="needs the extra openenv")
def test_an_openenv_server_that_is_not_there() -> None:
    with pytest.raises(ConnectionError, match="is the server running"):
        OpenEnvEnv("http://127.0.0.1:9", timeout=2.0)
