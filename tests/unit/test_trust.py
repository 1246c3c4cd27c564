"""A stranger's run directory runs none of his code: commands that would load it ask for --trust."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from turnwise.cli.main import main
from turnwise.config import Config, load_config, show_config
from turnwise.config.known import is_known, remember
from turnwise.config.schema import EnvConfig, LogConfig
from turnwise.envs.trust import UntrustedCodeError, named_code, refuse_foreign_code
from turnwise.inspect.report import write_report
from turnwise.log.doctor import diagnose, read_chart
from turnwise.log.store import RunDirectory, RunReader
from turnwise.testing.tiny import tiny_model, tiny_tokenizer
from turnwise.train import run as runs
from turnwise.train.checkpoint import CheckpointError, check_files, write_folder
from turnwise.train.load_policy import load_policy
from turnwise.train.networks import save_pretrained

CODE = """
import pathlib
pathlib.Path(__file__).with_name("loaded").touch()
from turnwise.envs.games.bandit import Bandit as Env
def reward(prompt, completion):
    return 1.0
"""


@pytest.fixture
def strange(tmp_path: Path) -> Path:
    """A run directory that came from somewhere, with code beside its config."""
    run = tmp_path / "strange"
    (run / "episodes").mkdir(parents=True)
    (run / "checkpoints" / "step_000001" / "model").mkdir(parents=True)
    (run / "checkpoints" / "step_000001" / "manifest.json").write_text("{}")
    (run / "env.py").write_text(CODE)
    (run / "episodes" / "step_000001.jsonl").write_text("")
    (run / "metrics.jsonl").write_text('{"step": 0, "rollout/reward": 0.5}\n')
    store(run, env={"name": f"{run / 'env.py'}:Env"})
    return run


def store(run: Path, **settings: Any) -> Path:
    (run / "config.yaml").write_text(show_config(load_config(settings)))
    return run / "config.yaml"


def refused(*words: str | Path, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stop:
        main(list(map(str, words)))
    assert stop.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("words", [
    ["eval", "RUN"],
    ["eval", "RUN", "--player", "random"],
    ["eval", "RUN/checkpoints/step_000001"],
    ["eval", "bandit", "--player", "random", "--against", "RUN"],
    ["rollout", "RUN", "--player", "random"],
    ["rollout", "RUN/config.yaml", "--player", "random"],
    ["replay", "RUN/episodes/step_000001.jsonl"],
    ["replay", "RUN/episodes/step_000001.jsonl", "--config", "RUN/config.yaml"],
    ["train", "--resume", "RUN"],
    ["train", "--resume", "RUN", "--dry-run"],
    ["train", "RUN/config.yaml"],
    ["sft", "expert", "RUN/config.yaml"],
    ["sft", "RUN"],
    ["sweep", "RUN/config.yaml"],
    ["serve", "RUN"],
])  # fmt: skip
def test_commands_ask_before_a_runs_own_code_is_loaded(
    strange: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(*[word.replace("RUN", str(strange)) for word in words], capsys=capsys)
    assert "--trust" in said
    assert f"env.name: {strange / 'env.py'}:Env" in said
    assert not (strange / "loaded").exists()


@pytest.mark.parametrize(("settings", "named"), [
    ({"env": {"name": "os:system", "options": {"command": "true"}}}, "env.name: os:system"),
    ({"env": {"name": "turnwise.envs.games.math_data:json.loads"}}, "env.name: turnwise."),
    ({"env": {"name": "turnwise.integrations.envs.gymnasium:GymnasiumEnv"}}, "env.name: turnwise."),
    ({"env": {"name": "gymnasium:antigravity:Env-v0"}}, "env.options.id: antigravity:Env-v0"),
    ({"env": {"name": "gymnasium", "options": {"id": "this:Env-v0"}}}, "env.options.id: this"),
    ({"env": {"name": "gymnasium:Taxi", "options": {"observe": "os:system"}}}, "env.options.obs"),
    ({"env": {"name": "textarena:X", "options": {"opponent": "os:system"}}}, "env.options.opp"),
    ({"envs": {"a": {"name": "a.b:C"}}, "rollout": {"train": {"tags": ["a"]}}}, "envs.a.name: a.b"),
    ({"rollout": {"train": {"tags": ["bandit", "a.b:C"]}}}, "rollout.train.tags.name: a.b:C"),
    ({"rollout": {"val": {"tags": ["command:true"]}}}, "rollout.val.tags.options.command: true"),
    ({"env": {"name": "http://127.0.0.1:9"}}, "env.options.url: http://127.0.0.1:9"),
    ({"data": {"reward": "mine:reward"}}, "data.reward: mine:reward"),
    ({"model": {"path": "a/b", "trust_remote_code": True}}, "model.trust_remote_code"),
    ({"backend": "verl", "verl": {"data.custom_cls.path": "x.py"}}, "verl.data.custom_cls.path"),
    ({"backend": "trl", "trl": {"reward_funcs": "x"}}, "trl.reward_funcs"),
])  # fmt: skip
def test_every_way_of_naming_code_is_seen(
    strange: Path, settings: dict[str, Any], named: str
) -> None:
    stored = store(strange, **settings)
    with pytest.raises(UntrustedCodeError, match="--trust") as error:
        refuse_foreign_code(load_config(stored), stored=stored, trust=False)
    assert named in str(error.value)
    refuse_foreign_code(load_config(stored), stored=stored, trust=True)


@pytest.mark.parametrize("name", ["bandit", "FrozenLake", "gymnasium:Taxi-v3", "gem:game:X-v0"])
def test_what_comes_with_turnwise_needs_no_flag(strange: Path, name: str) -> None:
    stored = store(strange, env={"name": name})
    assert named_code(load_config(stored)) == []
    refuse_foreign_code(load_config(stored), stored=stored, trust=False)


def test_the_flag_loads_it_and_an_override_needs_none(
    strange: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    play = ["rollout", str(strange), "--player", "random", "--episodes", "2"]
    play += ["--out", str(tmp_path / "out.jsonl")]
    main_ok([*play, "--env", "bandit"])
    assert not (strange / "loaded").exists()
    main_ok([*play, "--trust"])
    assert (strange / "loaded").exists()
    main_ok(["replay", str(tmp_path / "out.jsonl")])  # its config was stored here just now


def main_ok(words: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code in (0, None)


def test_the_readers_of_runs_load_no_code(
    strange: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_report(strange)
    diagnose(read_chart(RunReader(strange)))
    with pytest.raises(SystemExit):
        main(["doctor", str(strange)])
    assert RunReader(strange).config.env.name.endswith("env.py:Env")
    assert not (strange / "loaded").exists()


def test_ones_own_runs_are_known_until_they_are_changed(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(CODE)
    config = Config(env=EnvConfig(name=f"{tmp_path / 'mine.py'}:Env"))
    with RunDirectory.create(LogConfig(dir=str(tmp_path), name="own"), config) as run:
        stored = run.path / "config.yaml"
    refuse_foreign_code(run.config, stored=stored, trust=False)
    stored.write_text(stored.read_text().replace("seed: 0", "seed: 1"))
    with pytest.raises(UntrustedCodeError):
        refuse_foreign_code(load_config(stored), stored=stored, trust=False)
    with pytest.raises(UntrustedCodeError):
        runs.train(resume=stored.parent)


@pytest.mark.parametrize("name", ["mine.py:Env", "mine_of_trust:Env", "agent:mine.py:Env"])
def test_a_name_that_leads_elsewhere_is_not_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A copy of one's run, with other code where its relative name leads."""
    own, strange = tmp_path / "own", tmp_path / "strange"
    for folder in (own, strange):
        folder.mkdir()
        for file in ("mine.py", "mine_of_trust.py"):
            (folder / file).write_text(CODE)
    monkeypatch.syspath_prepend("")  # as with `python -m turnwise`
    monkeypatch.chdir(own)
    config = load_config({"env": {"name": name}})
    with RunDirectory.create(LogConfig(dir="runs", name="r"), config):
        pass
    stored = Path("runs/r/config.yaml")
    shutil.copytree("runs", strange / "runs")
    monkeypatch.chdir(strange)
    refuse_foreign_code(config, stored=stored, trust=False)  # the same code
    for file in ("mine.py", "mine_of_trust.py"):
        Path(file).write_text(CODE + "# more\n")
    with pytest.raises(UntrustedCodeError, match="leads to another file than in your run"):
        refuse_foreign_code(config, stored=stored, trust=False)
    monkeypatch.chdir(own)
    for file in ("mine.py", "mine_of_trust.py"):
        Path(file).write_text(CODE + "# edited since\n")
    refuse_foreign_code(config, stored=stored, trust=False)
    assert not list(tmp_path.rglob("loaded"))


def test_a_command_is_ones_own_in_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config({"env": {"name": "command:make agent"}})
    monkeypatch.chdir(tmp_path)
    with RunDirectory.create(LogConfig(dir="runs", name="r"), config) as run:
        stored = run.path.resolve() / "config.yaml"
    refuse_foreign_code(config, stored=stored, trust=False)
    monkeypatch.chdir(tmp_path / "runs")
    with pytest.raises(UntrustedCodeError, match="make agent"):
        refuse_foreign_code(config, stored=stored, trust=False)


def test_code_inside_a_run_is_never_known(strange: Path) -> None:
    stored = strange / "config.yaml"
    remember(stored.read_text())
    with pytest.raises(UntrustedCodeError, match=r"env\.py"):
        refuse_foreign_code(load_config(stored), stored=stored, trust=False)


def test_code_of_checkpoints_is_never_known(
    strange: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = store(
        strange, env={"name": "bandit"}, model={"path": "a/b", "trust_remote_code": True}
    )
    remember(stored.read_text())
    model = strange / "checkpoints" / "step_000001" / "model"
    named = {"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}
    (model / "config.json").write_text(json.dumps(named))
    (model / "own.py").write_text(f"open({str(strange / 'loaded')!r}, 'w').close()")
    said = refused("eval", model.parent, capsys=capsys)
    assert "model.trust_remote_code: code that comes with a/b" in said
    assert not (strange / "loaded").exists()


def test_memory_of_configs_survives_what_happens_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr("turnwise.config.known._KEPT", 5)
    for number in range(40):
        remember(str(number))
        assert is_known(str(number))
    assert not is_known("0")
    (tmp_path / "turnwise" / "configs").write_bytes(b"\xff\x00torn")
    assert not is_known("39")
    remember("39")
    assert is_known("40") is False
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/nothing")
    remember("1")
    assert not is_known("1")


def test_the_first_model_is_checked_like_a_checkpoint(strange: Path) -> None:
    initial = strange / "initial_model"
    for _ in range(2):  # written anew over what is there
        write_folder(initial, lambda path: save_pretrained(tiny_model(), tiny_tokenizer(), path))
    config = Config()
    assert load_policy(config, run=strange, first=True).name == "policy"
    weights = initial / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is torn or was edited"):
        load_policy(config, run=strange, first=True)
    data[-1] ^= 1
    weights.write_bytes(data)
    check_files(initial)
    (initial / "further.py").touch()
    with pytest.raises(CheckpointError, match=r"further\.py"):
        check_files(initial)
