"""Games in the browser: who plays, what is shown, and whose code is never loaded."""

import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from inspect_parts import Client, wait_for
from run_fixtures import make_run

from turnwise.config.schema import Config
from turnwise.endpoint.policy import PolicyServer
from turnwise.evaluate.evaluation import PolicyPlayer
from turnwise.generate.hf import HFGenerator
from turnwise.inspect import play
from turnwise.inspect.choices import key_for
from turnwise.inspect.server import InspectServer
from turnwise.rollout.proxy import sampling_for
from turnwise.testing.tiny import tiny_model, tiny_tokenizer
from turnwise.train.load_policy import load_policy

SMALL = {
    "env": {"name": "simple_game", "max_turn": 2, "format": {"style": "raw"}},
    "rollout": {"max_response_tokens": 4, "isolation": "inline"},
}


def tiny_policy(config: Config, run: Path, name: str) -> PolicyPlayer:
    """A model that says anything."""
    model, tokenizer = tiny_model(), tiny_tokenizer()
    generator = HFGenerator(model, tokenizer, slots=config.rollout.slots, max_context=512)
    return PolicyPlayer(generator=generator, tokenizer=tokenizer, name=name, model=model)


def stored(folder: Path, name: str, settings: dict[str, Any]) -> Path:
    """A run with that config, and a checkpoint in name."""
    with make_run(folder, config=Config.model_validate(settings), name=name) as run:
        (run.path / "checkpoints/step_000002").mkdir(parents=True)
    return run.path


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    folder = tmp_path_factory.mktemp("runs")
    stored(folder, "small", SMALL)
    own = {"env": {"name": f"{folder}/evil.py:Env"}}
    (folder / "evil.py").write_text(f"open({str(folder / 'loaded')!r}, 'w')\n")
    stored(folder, "evil", own)
    stored(folder, "remote_code", SMALL | {"model": {"trust_remote_code": True}})
    with InspectServer(
        [folder], load_policy=tiny_policy, cache=tmp_path_factory.mktemp("cache")
    ) as server:
        yield Client(server)
        assert not (folder / "loaded").exists()


def start(client: Client, *, status: int = 200, **body: Any) -> Any:
    return client.post("/api/play", body, status=status)


def test_a_person_plays_to_the_end(client: Client) -> None:
    view = start(client, env="simple_game", player="person", seed=3)
    assert view["waiting"]
    assert not view["done"]
    assert [message["role"] for message in view["messages"]] == ["system", "user"]
    assert "right" in view["actions"]
    url = f"/api/play/{view['session']}"
    client.post(f"{url}/step", {}, status=400)  # a person has to say something
    for _ in range(200):
        if view["done"]:
            break
        view = client.post(f"{url}/step", {"action": "right"})
    assert view["done"]
    assert view["status"] in ("completed", "truncated_turns")
    assert view["turns"][0]["action"] == "right"
    assert view["turns"][0]["text"].endswith("<answer>right</answer>")  # as a model must write it
    assert len(view["messages"]) >= 2 + 2 * len(view["turns"]) - 1
    assert client.get(url)["turns"] == view["turns"]
    client.post(f"{url}/step", {"action": "right"}, status=409)
    client.post(url, method="DELETE")
    client.get(url, status=404)


def test_players_are_watched_turn_by_turn(client: Client) -> None:
    view = start(client, env="frozen_lake", player="expert", seed=1, options={"size": 4})
    assert view["board"].count("P") == 1
    turns = 0
    while not view["done"]:
        assert len(view["turns"]) == turns
        view = client.post(f"/api/play/{view['session']}/step")
        turns += 1
    assert view["success"] is True
    assert view["reward"] == 1.0
    assert "alternatives" not in view["turns"][0]
    view = start(client, env="bandit", player="random")
    assert client.post(f"/api/play/{view['session']}/step")["done"]


def test_a_policy_comes_with_what_it_could_have_said(client: Client) -> None:
    view = start(client, env="simple_game", player="run:small", seed=1)
    assert view["turns"] == []
    view = client.post(f"/api/play/{view['session']}/step")
    view = client.post(f"/api/play/{view['session']}/step")
    assert view["done"]  # the run's own limit of turns
    for turn in view["turns"]:
        assert len(turn["tokens"]) == len(turn["alternatives"]) > 0
        for token, others in zip(turn["tokens"], turn["alternatives"], strict=True):
            assert any(other["text"] == token["text"] for other in others)
            assert len(others) in (5, 6)  # what was said is there, likely or not
            shares = [other["p"] for other in others]
            assert shares == sorted(shares, reverse=True)
            assert sum(shares) <= 1.0 + 1e-6
            # What was said has the probability that the sampler had: it is the same context.
            same = [other["p"] for other in others if other["text"] == token["text"]]
            assert min(abs(math.exp(token["logprob"]) - p) for p in same) < 1e-4


def test_a_model_behind_an_api_plays(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config.model_validate(SMALL)
    policy = tiny_policy(config, Path(), "tiny")
    sampling = sampling_for(config.rollout, "train")
    with PolicyServer(policy.generator, policy.tokenizer, sampling, token="secret") as server:
        url = f"{server.url}/v1"
        monkeypatch.setenv("OPENAI_BASE_URL", url)
        monkeypatch.setenv("OPENAI_API_KEY", "secret")
        player = f"openai:{url}#policy"
        view = start(client, env="simple_game", player=player, seed=3)
        view = client.post(f"/api/play/{view['session']}/step")
        assert len(view["turns"]) == 1
        (turn,) = view["turns"]
        assert turn["text"] != ""
        # This endpoint tells the tokens that were said, and none that could have been.
        assert len(turn["tokens"]) == len(turn["alternatives"]) > 0
        for token, others in zip(turn["tokens"], turn["alternatives"], strict=True):
            (said,) = others
            assert said["text"] == token["text"]
            assert said["p"] == pytest.approx(math.exp(token["logprob"]))


def test_two_games_share_a_policy(client: Client) -> None:
    one, two = (start(client, env="simple_game", player="run:small", seed=s) for s in (1, 2))
    first = [client.post(f"/api/play/{view['session']}/step") for view in (one, two, one, two)]
    assert [view["done"] for view in first] == [False, False, True, True]


def test_code_that_a_run_or_a_page_names_is_refused_by_name(client: Client) -> None:
    refused = start(client, env="simple_game", player="run:remote_code", status=403)
    assert "model.trust_remote_code" in refused["error"]
    refused = start(client, env="", player="run:evil", status=403)
    assert "evil.py:Env" in refused["error"]
    for env in ("os:system", "command:touch owned", "agent:solve.py:solve", "http://10.0.0.1:1"):
        refused = start(client, env=env, player="random", status=403)
        assert "--env" in refused["error"]
    refused = start(
        client, env="gymnasium", options={"id": "evil:Game-v0"}, player="random", status=403
    )
    assert "env.options.id: evil:Game-v0" in refused["error"]
    players = {one["name"]: one for one in client.get("/api/envs")["players"]}
    assert "refused" not in players["run:small"]
    assert "evil.py:Env" in players["run:evil"]["refused"]


def test_what_cannot_be_played_is_said(client: Client) -> None:
    assert (
        "did you mean 'size'"
        in start(client, env="frozen_lake", options={"siz": 3}, status=422)["error"]
    )
    assert "no environment is called" in start(client, env="frozn", status=422)["error"]
    assert "players are" in start(client, env="bandit", player="god", status=400)["error"]
    assert (
        "names no model"
        in start(client, env="bandit", player="openai:http://127.0.0.1:1/v1", status=422)["error"]
    )
    for wrong in ({"seed": -1}, {"seed": "x"}, {"options": [1]}, {"env": 3}):
        start(client, **({"env": "bandit"} | wrong), status=400)
    start(client, env="bandit", player="run:nobody", status=404)


def test_the_key_goes_to_its_own_server_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9000/v1")
    assert key_for("https://api.openai.com/v1") == "secret"
    assert key_for("http://127.0.0.1:9000/v1") == "secret"
    for other in ("http://api.openai.com/v1", "https://api.openai.com.evil/v1", "http://x:9000/v1"):
        assert key_for(other) is None


def test_games_that_are_left_make_room(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(play, "MOST_GAMES", 2)
    views = [start(client, env="bandit", player="person") for _ in range(3)]
    client.get(f"/api/play/{views[0]['session']}", status=404)
    for view in views[1:]:
        assert client.get(f"/api/play/{view['session']}")["waiting"]


OWN = '''
class Env:
    """Counts to two."""

    def reset(self, seed=None):
        self.count = 0
        return "say something"

    def step(self, action):
        if action == "break":
            raise RuntimeError("out of order")
        self.count += 1
        return f"heard {action}", 1.0, self.count == 2, {}
'''


def test_an_environment_of_the_users_own_and_one_that_fails(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    name = f"{tmp_path}/own.py:Env"
    with InspectServer([tmp_path], envs=[name], load_policy=tiny_policy) as server:
        client = Client(server)
        assert client.get("/api/envs")["envs"][0]["name"] == name
        view = start(client, env=name, player="person")
        view = client.post(f"/api/play/{view['session']}/step", {"action": "hello"})
        assert view["turns"][0]["messages"][0]["content"] == "heard hello"
        view = client.post(f"/api/play/{view['session']}/step", {"action": "break"})
        assert view["done"]
        assert view["status"] == "env_error"
        assert "out of order" in view["error"]


def test_a_trained_run_is_loaded_and_plays(tmp_path: Path) -> None:
    """The real way: a checkpoint of a run, through load_policy."""
    import turnwise

    result = turnwise.train(
        "bandit",
        config={
            "train": {"steps": 1},
            "rollout": {"train": {"env_groups": 2, "group_size": 2}},
            "eval": {"before": False, "after": False, "baselines": False},
            "model": {"embedded": {"warmstart_episodes": 8}},
            "log": {"dir": str(tmp_path), "name": "real"},
        },
        quiet=True,
    )

    def load(config: Config, run: Path, name: str) -> PolicyPlayer:
        return load_policy(config, run=run, name=name)

    with InspectServer([result.path], load_policy=load) as server:
        client = Client(server)
        view = start(client, env="bandit", player="run:real")
        view = client.post(f"/api/play/{view['session']}/step")
        assert view["done"]
        assert view["turns"][0]["alternatives"]
        shutil.rmtree(result.path / "checkpoints")
        wait_for(lambda: len(client.get("/api/envs")["players"]) == 3)
        refused = start(client, env="bandit", player="run:real", status=422)
        assert "no complete checkpoint" in refused["error"]
