"""The command line: what each command prints, how mistakes are reported, and that it starts
quickly."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import turnwise
from turnwise import trainers
from turnwise.cli.args import config_from, overrides_from, split_source
from turnwise.cli.main import COMMANDS, available, main
from turnwise.config import Config, load_config
from turnwise.config.yaml_io import parse_yaml
from turnwise.trainers import ppo_multi_turn

ROOT = Path(__file__).parents[2]


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(words)
    return int(caught.value.code or 0)


def python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return done.stdout


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    text = capsys.readouterr().out
    for name in available():
        assert name in text


FIRST_ARGUMENTS = {
    "train": "--resume",
    "watch": "RUN",
    "inspect": "RUNS",
    "sft": "--best",
    "eval": "--player",
    "rollout": "--out",
    "play": "--seed",
    "replay": "file",
    "envs": "--help",
    "check-env": "name",
    "serve-env": "name",
    "serve": "--port",
    "serve-policy": "PROGRAM",
    "work": "url",
    "config": "show",
    "migrate": "FILE",
    "doctor": "run",
    "report": "RUN",
    "compare": "RUN...",
    "export": "RUN",
    "push": "TO",
    "sweep": "--seeds",
    "init": "KIND",
    "completion": "SHELL",
}


def test_every_command_is_offered() -> None:
    assert available() == tuple(COMMANDS)
    assert set(FIRST_ARGUMENTS) == set(COMMANDS)


@pytest.mark.parametrize("name", FIRST_ARGUMENTS)
def test_a_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(name, "--help") == 0
    text = capsys.readouterr().out
    assert f"turnwise {name} " in text
    assert FIRST_ARGUMENTS[name] in text.partition(f"turnwise {name} ")[2].split()


def test_a_command_without_its_file_is_not_offered(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(COMMANDS, "absent", "turnwise.cli.absent")
    assert "absent" not in available()
    assert run("--help") == 0
    assert "absent" not in capsys.readouterr().out
    assert run("absent") == 2
    assert "No such command" in capsys.readouterr().err


def test_config_lists_recipes_and_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("config") == 0
    text = capsys.readouterr().out
    for word in ("frozen_lake", *Config.model_fields):
        assert word in text


def test_config_show_prints_the_resolved_tree(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("extends: frozen_lake\ntrain_cfgs: {max_turn: 4}\n")
    words = [
        str(file),
        "--env.format.format_penalty",
        "-0.5",
        "seed=3",
        "--train_cfgs.bi_level_gae",
        "false",
    ]
    assert run("config", "show", *words) == 0
    shown = load_config(parse_yaml(capsys.readouterr().out))
    assert shown == load_config(file, words[1:])
    assert (shown.train.max_turn, shown.env.format.format_penalty, shown.seed, shown.algo.name) == (
        4,
        -0.5,
        3,
        "ppo",
    )


def test_config_show_puts_the_source_anywhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("config", "show", "--train.max_turn", "3", "bandit") == 0
    assert parse_yaml(capsys.readouterr().out)["env"]["name"] == "bandit"


def test_config_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("config", "keys", "train") == 0
    assert "train.max_turn = 5  Turns per episode" in capsys.readouterr().out
    assert run("config", "keys", "trian") == 2
    assert "did you mean train?" in capsys.readouterr().err


def test_a_wrong_config_is_reported_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("config", "show", "frozen_lake", "--train.max_tun", "3", "seed=x") == 2
    text = capsys.readouterr().err
    assert "Did you mean train.max_turn?" in text
    assert "seed" in text
    assert "Traceback" not in text


def test_envs(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("envs") == 0
    text = capsys.readouterr().out
    for name in ("frozen_lake", "bandit", "countdown", "simple_game"):
        assert name in text


def test_check_env(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check-env", "bandit") == 0
    assert capsys.readouterr().out.strip()
    assert run("check-env", "frozen_lak") == 2
    assert "frozen_lake" in capsys.readouterr().err


BROKEN_ENV = """
from turnwise import BaseEnv

class Broken(BaseEnv):
    def reset(self, seed=None, **kwargs):
        return "start"
    def step(self, action):
        return "next", float("nan"), True, {}
"""


def test_check_env_fails_for_a_broken_environment(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "broken.py").write_text(BROKEN_ENV)
    assert run("check-env", f"{tmp_path / 'broken.py'}:Broken") == 1
    assert "nan" in capsys.readouterr().out.lower()


def test_split_source() -> None:
    assert split_source([]) == (None, [])
    assert split_source(["a.yaml", "x=1", "--y", "-3"]) == ("a.yaml", ["x=1", "--y", "-3"])
    assert overrides_from(["--a.b=3", "c=4"]) == ["--a.b=3", "c=4"]
    with pytest.raises(SystemExit):
        split_source(["a.yaml", "b.yaml"])
    with pytest.raises(SystemExit):
        overrides_from(["a.yaml"])
    assert config_from([]) == load_config("frozen_lake")


@pytest.mark.parametrize(
    "words",
    [
        "import turnwise",
        *(f"from turnwise.cli.main import main; main(['{word}'])" for word in ("config", "--help")),
    ],
)
def test_starting_does_not_load_torch(words: str) -> None:
    heavy = ["torch", "transformers", "gymnasium", "numpy"]
    report = f"lambda: print('|' + json.dumps([name for name in {heavy!r} if name in sys.modules]))"
    found = python(f"import atexit, json, sys\natexit.register({report})\n{words}").rpartition("|")[
        2
    ]
    assert json.loads(found) == []


@pytest.mark.parametrize(
    "words", [["--help"], ["config"], ["config", "show", "frozen_lake"], ["envs"]]
)
def test_it_starts_in_under_a_second(words: list[str]) -> None:
    # CPU time of the child, so that a busy machine does not fail the test; the best of three.
    def seconds() -> float:
        before = os.times()
        subprocess.run(
            [sys.executable, "-m", "turnwise", *words], capture_output=True, check=True, cwd=ROOT
        )
        after = os.times()
        return (
            after.children_user
            + after.children_system
            - before.children_user
            - before.children_system
        )

    assert any(seconds() < 1.0 for _ in range(3))


def test_importing_turnwise_takes_a_moment_only() -> None:
    code = (
        "import time; start = time.process_time(); import turnwise; print(time.process_time() - "
        "start)"
    )
    assert any(float(python(code)) < 0.1 for _ in range(3))


@pytest.mark.parametrize("name", turnwise.__all__)
def test_every_public_name_can_be_imported(name: str) -> None:
    assert getattr(turnwise, name) is not None


def test_the_lazy_table_and_the_typed_imports_agree() -> None:
    tree = ast.parse((ROOT / "turnwise" / "__init__.py").read_text())
    typed = {
        (node.module, alias.name)
        for branch in tree.body
        if isinstance(branch, ast.If)
        for node in branch.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert typed == {(module, name) for module, names in turnwise._HOMES.items() for name in names}
    assert {name for _, name in typed} | {"__version__"} == set(turnwise.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'PPOTrainr'"):
        turnwise.PPOTrainr  # noqa: B018


BACKENDS = [("VerifiersGRPOTrainer", "trl"), ("AgentTrainer", "verl")]


@pytest.mark.parametrize(("name", "extra"), BACKENDS)
def test_trainers_of_missing_backends_name_the_extra(
    name: str,
    extra: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(trainers, "find_spec", asked.append)  # it finds nothing
    with pytest.raises(ImportError, match=rf"{name} needs {extra}.*turnwise\[{extra}\]"):
        getattr(trainers, name)
    assert asked == [extra]


FRONTS = [
    [sys.executable, "-m", "turnwise.trainers.ppo_multi_turn"],
    [sys.executable, str(ROOT / "examples" / "run_multi_turn_ppo.py")],
    [str(ROOT / "scripts" / "run_multi_turn_ppo.sh")],
]
FLAGS = [
    "--multi_turn",
    "true",
    "--bi_level_gae",
    "true",
    "--max_turn",
    "3",
    "--learning_rate",
    "5e-7x",
]


SMALL = [
    "train.steps=1",
    "eval.episodes=2",
    "rollout.train.env_groups=2",
    "rollout.train.group_size=2",
    "rollout.val.env_groups=2",
    "rollout.max_response_tokens=16",
    "model.embedded.warmstart_episodes=8",
    "model.embedded.warmstart_epochs=1",
]


def run_front(command: list[str], *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable}
    return subprocess.run(
        [*command, *words], capture_output=True, text=True, cwd=cwd, env=environment
    )


@pytest.mark.slow
@pytest.mark.parametrize("command", FRONTS)
def test_the_fronts_train(command: list[str], tmp_path: Path) -> None:
    done = run_front(command, *FLAGS[:-1], "5e-7", *SMALL, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    written = load_config(run / "config.yaml")
    assert (written.train.max_turn, written.train.lr, written.algo.name) == (
        3,
        5e-7,
        "bi_level_gae",
    )


@pytest.mark.parametrize("command", FRONTS)
def test_the_fronts_read_their_flags(command: list[str], tmp_path: Path) -> None:
    done = run_front(command, *FLAGS, cwd=tmp_path)
    assert done.returncode == 2
    assert (
        "train.lr: input should be a valid number, got '5e-7x' (written as learning_rate)"
        in done.stderr
    )


MISTAKES = [
    (["env.name=frozen_lak"], "did you mean frozen_lake?"),
    (["env.options.size=99"], "size is from 2 to 16, got 99"),
    (["rollout.train.group_size=1", "algo.name=grpo"], "group"),
]


@pytest.mark.parametrize(("words", "said"), MISTAKES)
def test_a_mistake_that_only_the_run_finds_is_a_message(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as caught:
        ppo_multi_turn.main([*SMALL, *words, f"log.dir={tmp_path}"])
    assert caught.value.code == 2
    told = capsys.readouterr().err
    assert said in told
    assert "Traceback" not in told


def test_the_classes_that_users_know_stand_beside_the_trainers() -> None:
    from turnwise.trainers import Environment, EnvironmentRewardAdapter, PPOTrainer

    assert ppo_multi_turn.PPOTrainer is PPOTrainer is turnwise.PPOTrainer
    assert issubclass(turnwise.SingleTurnEnv, Environment)
    assert issubclass(turnwise.MultiTurnEnv, Environment)
    rows = [{"question": "1+1?", "answer": "2"}]
    rubric = turnwise.Rubric([lambda text, answer: float(text == answer)])
    score = EnvironmentRewardAdapter(turnwise.SingleTurnEnv(rows, rubric, val_fraction=0.0))
    reply = [{"role": "assistant", "content": "2"}]
    assert score(prompts=[[]], completions=[reply], turnwise_row=[0]) == [1.0]


def test_the_front_shows_its_usage(capsys: pytest.CaptureFixture[str]) -> None:
    ppo_multi_turn.main(["--help"])
    assert "usage" in capsys.readouterr().out
