"""Commands on finished runs (compare, export, report, push), sweep, init and completion."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import warm
from python_parts import SMALL
from run_fixtures import fill_step, make_episode, make_run, page_data

import turnwise
from turnwise.cli.completion import words_by_command
from turnwise.cli.main import COMMANDS, main
from turnwise.cli.sources import read_source
from turnwise.config.schema import Config
from turnwise.inspect.report import ReportSink
from turnwise.log.events import RunEnded, RunStarted, StepDone
from turnwise.log.store import RunReader
from turnwise.types import Task

ROOT = Path(__file__).parents[2]


def stored_run(path: Path, name: str, *, won: int, seed: int = 0, steps: int = 3) -> Path:
    """A run whose last evaluation solved the first `won` of eight tasks."""
    config = Config.model_validate({"seed": seed, "train": {"steps": steps}})
    with make_run(path, config=config, name=name) as run:
        for step in range(1, steps + 1):
            episodes = [make_episode(f"s{step}-{i}", success=i == 0, index=i) for i in range(3)]
            fill_step(run, step, episodes, {"rollout/reward": step / 10, "rollout/success": 0.5})
        held = [
            make_episode(f"e{i}", success=i < won, task=Task(id=f"val/{i}", seed=i, split="val"))
            for i in range(8)
        ]
        run.write_metrics(
            steps,
            {
                "eval/success": won / 8,
                "eval/success_low": won / 8 - 0.1,
                "eval/success_high": won / 8 + 0.1,
                "eval/reward": won / 8,
                "eval/reward_low": 0.0,
                "eval/reward_high": 1.0,
                "eval/episodes": 8.0,
                "baseline/random_success": 0.125,
            },
        )
        run.write_episodes(steps, held, split="eval")
    return run.path


def command(*words: object, code: int = 0) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([str(word) for word in words])
    assert (stopped.value.code or 0) == code


def test_compare_shows_differences_curves_and_a_paired_test(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = stored_run(tmp_path, "a", won=0)
    b = stored_run(tmp_path, "b", won=8, seed=1)
    page = tmp_path / "page.html"
    command("compare", a, b, "--out", page)
    shown = capsys.readouterr().out
    assert "seed: a 0, b 1" in shown
    assert "log." not in shown
    assert "b is better than a on 8 tasks" in shown
    assert "p = 0.0078" in shown
    data = page_data(page.read_text())
    assert data["/api/compare?runs=a,b"]["paired"]["difference"] == 1.0
    assert [len(data[f"/api/run/{name}/metrics"]["rows"]) for name in "ab"] == [4, 4]
    command("compare", a, code=2)
    assert "two runs or more" in capsys.readouterr().err
    command("compare", a, tmp_path, code=2)
    assert "is not a run directory" in capsys.readouterr().err
    metrics = b / "metrics.jsonl"
    metrics.write_bytes(b"\xef\xbb\xbf" + metrics.read_bytes())
    command("compare", a, b, code=2)
    assert "metrics.jsonl, line 1" in capsys.readouterr().err


def test_export_writes_tables_that_others_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = stored_run(tmp_path, "a", won=3)
    command("export", run)
    rows = [json.loads(line) for line in (run / "episodes.jsonl").read_text().splitlines()]
    assert (len(rows), rows[0]["success"], rows[0]["reward"], rows[0]["tokens"]) == (
        9,
        True,
        1.0,
        3,
    )
    command("export", run, "--format", "parquet", "--per", "turn", "--step", "2")
    pyarrow = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.read_table(run / "episodes.parquet")
    assert table.num_rows == 3
    assert table["completion_ids"][0].as_py() == [117, 112, 2]
    command("export", run, "--format", "sft", "--split", "val")
    sft = [json.loads(line) for line in (run / "episodes_sft.jsonl").read_text().splitlines()]
    assert len(sft) == 3
    assert [message["role"] for message in sft[0]["messages"]] == ["user", "assistant"]
    command("export", run, "--format", "sft", "--min-reward", "5", code=2)
    assert "no such episode to write" in capsys.readouterr().err
    command("export", run, "--format", "csv", code=2)
    assert "--format is one of jsonl, parquet" in capsys.readouterr().err


def test_a_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = stored_run(tmp_path, "a", won=3)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    command("export", run, "--format", "parquet", code=2)
    assert "needs the package 'pyarrow'" in capsys.readouterr().err
    assert not list(run.glob("episodes.parquet*"))


def test_a_report_has_outcome_findings_curves_and_any_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = stored_run(tmp_path, "a", won=4, steps=30)
    command("report", run, "--step", "7", "--episodes", "2")
    data = page_data((run / "report.html").read_text())
    about = data["/api/run/a"]
    assert about["steps"] == {"step": [7], "eval": []}
    assert data["/api/run/a/episodes?split=step&step=7"]["total"] == 2
    assert len(data["/api/run/a/metrics"]["rows"]) == 31
    assert about["outcome"][0]["success"] == [0.4, 0.5, 0.6]  # without a summary, from the metrics
    assert (about["step"], about["steps_planned"]) == (30, 30)
    assert "Episodes of 1 of 31 stored steps" in data["export"]["note"]
    command("report", run, "--step", "99", code=2)
    assert "it has 1 to 30" in capsys.readouterr().err


def test_the_report_is_rewritten_while_the_run_goes_on_and_when_it_is_interrupted(
    tmp_path: Path,
) -> None:
    path = stored_run(tmp_path, "a", won=4, steps=5)
    page = path / "report.html"
    sink = ReportSink(seconds=0.0)
    sink.handle(RunStarted(path=path, config=RunReader(path).config))
    sink.handle(StepDone(step=3, metrics={}))
    going_on = page_data(page.read_text())
    assert going_on["export"]["running"]
    assert going_on["/api/run/a"]["steps"] == {"step": [1, 5], "eval": [5]}  # quickly written
    page.unlink()
    sink.handle(StepDone(step=4, metrics={}))
    assert not page.exists()  # fifty times what the last one took has not passed
    sink.handle(RunEnded(path=path, seconds=1.0, interrupted=True))
    ended = page_data(page.read_text())
    assert not ended["export"]["running"]
    assert ended["/api/run/a"]["state"] == "stopped"
    assert len(ended["/api/run/a"]["steps"]["step"]) == 5


def test_a_report_that_cannot_be_written_ends_no_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = stored_run(tmp_path, "a", won=4)
    (path / "config.yaml").unlink()
    sink = ReportSink(seconds=0.0)
    sink.handle(RunStarted(path=path, config=Config()))
    sink.handle(StepDone(step=3, metrics={}))
    assert "the report could not be written" in caplog.text


def test_a_resumed_run_plots_all_steps_and_the_end_names_what_comes_next(tmp_path: Path) -> None:
    import io

    from turnwise.log.console import ConsoleSink

    path = stored_run(tmp_path, "a", won=4)
    out = io.StringIO()
    sink = ConsoleSink(out)
    config = Config.model_validate({"train": {"steps": 4}})
    sink.handle(RunStarted(path=path, config=config, first_step=2))
    for step in (3, 4):
        sink.handle(StepDone(step=step, metrics={"rollout/success": 0.75, "rollout/reward": 0.5}))
    checkpoint = path / "checkpoints/step_000004"
    sink.handle(RunEnded(path=path, seconds=1.0, checkpoint=checkpoint))
    shown = out.getvalue()
    axis = shown.partition("rollout/success by step")[2]
    assert re.search(r"[+\u2514]1[-\u2500]+4", axis), axis
    for wanted in (
        f"report: {path}/report.html",
        f"checkpoint: {checkpoint}",
        "next: turnwise eval",
    ):
        assert wanted in shown
    sink.handle(RunEnded(path=path, seconds=1.0, checkpoint=checkpoint, interrupted=True))
    assert f"next: turnwise train --resume {path}" in out.getvalue()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("trained")
    return turnwise.train(
        "bandit",
        config=SMALL,
        overrides={"log.dir": str(folder), "eval.baselines": False},
        quiet=True,
    )


def test_push_writes_a_model_with_its_results(
    trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM

    command("push", trained.path, tmp_path / "model")
    card = (tmp_path / "model/README.md").read_text()
    assert "| after training |" in card
    assert "2 steps" in card
    AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert turnwise.load_config(tmp_path / "model/config.yaml").env.name == "bandit"
    # The config beside it does not make the folder a run: eval and serve take its weights.
    source = read_source([str(tmp_path / "model")])
    assert (source.run, source.model) == (None, str(tmp_path / "model"))
    command("push", trained.path, tmp_path / "model", code=2)
    assert "exists and is not overwritten" in capsys.readouterr().err
    untrained = tmp_path / "untrained"
    shutil.copytree(trained.path, untrained)
    for path in (untrained / "checkpoints").glob("step_*"):
        if path.name != "step_000000":
            shutil.rmtree(path)
    command("push", untrained, tmp_path / "other", code=2)
    assert "from before training" in capsys.readouterr().err


def test_the_cards_command_trains_the_same_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("coin.py").write_text(
        "from turnwise import BaseEnv\n\n\nclass Coin(BaseEnv):\n    instruction = 'Call.'\n"
        "    actions = ('heads', 'tails')\n\n    def reset(self, seed=None):\n"
        "        return f'Toss {seed}.'\n\n    def step(self, action):\n"
        "        return 'Over.', float(action == 'heads'), True, {}\n"
    )
    over = {"log.name": "first", "eval.baselines": False}
    turnwise.train("coin.py:Coin", config=SMALL, overrides=over, quiet=True)
    command("push", "runs/first", "models/coin")
    card = Path("models/coin/README.md").read_text()
    assert "(it has `coin.py`)" in card
    (line,) = re.findall(r"`turnwise (train .*?)`", card)
    command(*line.replace("FOLDER", "models/coin").replace("NEW", "second").split())
    first, second = (Path(f"runs/{name}/metrics.jsonl").read_text() for name in ("first", "second"))
    assert first == second


def test_push_tells_why_a_hub_refuses(
    trained: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import huggingface_hub

    def refuse(self: object, *_: object, **__: object) -> None:
        raise OSError("no network here")

    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", refuse)
    command("push", trained.path, "hub:me/model", code=2)
    assert "the hub refused me/model: OSError: no network here" in capsys.readouterr().err


def test_a_sweep_goes_on_where_it_was_and_tells_means(
    trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    config = {**SMALL, "env": {**SMALL["env"], "name": "bandit"}}
    text = turnwise.show_config(turnwise.load_config(config, ["eval.baselines=false"]))
    Path("mine.yaml").write_text(text)
    shutil.copytree(trained.path, "sweep/train.lr-1e-3-s0")  # as if it was done before
    words = ("sweep", "mine.yaml", "train.steps=1", "--vary", "train.lr=1e-3,1e-4", "--seeds", "1")
    command(*words)
    shown = capfd.readouterr().out
    assert "[1/2] sweep/train.lr-1e-3-s0: already done" in shown
    assert "train.lr=1e-4: success" in shown
    table = json.loads(Path("sweep/sweep.json").read_text())
    assert [row["runs"] for row in table] == [1, 1]
    assert RunReader("sweep/train.lr-1e-4-s0").config.train.lr == 1e-4
    for setting in ("train.lr-1e-3", "train.lr-1e-4"):
        shutil.copytree(f"sweep/{setting}-s0", f"sweep/{setting}-s1")
    command(*words[:-1], "2")
    shown = capfd.readouterr().out
    assert shown.count("already done") == 4
    first, second = json.loads(Path("sweep/sweep.json").read_text())
    assert "reward_difference" not in first
    # The copies have the same reward as their originals, so the difference has no spread.
    told = second["reward_difference"]
    estimate, low, high = (float(word.strip("[],")) for word in told.split())
    assert estimate == low == high
    assert f"difference {told} (2 of 2 runs)" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--vary", "train.lr"), "--vary is KEY=V1,V2"),
        (("--seeds", "many"), "--seeds is a number"),
        (("--vary", "train.lrr=1,2"), "train.lrr"),
    ],
)
def test_a_mistake_in_a_sweep_is_told_before_the_first_run(
    words: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    command("sweep", "bandit", *words, code=2)
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["game", "tools", "chat", "prompts", "project"])
def test_what_init_writes_passes_its_own_test(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command("init", kind, "thing", "--dir", tmp_path)
    done = subprocess.run(
        [*warm.python(), "-m", "pytest", "-q", "-p", "no:cacheprovider", "."],
        cwd=tmp_path,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert "thing.py:Thing" in (tmp_path / "README.md").read_text()
    command("init", kind, "thing", "--dir", tmp_path, code=2)
    assert "is not overwritten" in capsys.readouterr().err


def test_init_refuses_kinds_and_names_that_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    command("init", "gmae", code=2)
    assert "kinds are game, tools, chat, prompts, project" in capsys.readouterr().err
    command("init", "game", "../x", code=2)
    assert "becomes a Python file" in capsys.readouterr().err
    for name, says in (
        ("random", "such as my_random"),
        ("torch", "would take the place of the Python module 'torch'"),
        ("class", "is a word of Python's own"),
        ("none", "is a word of Python's own"),
    ):
        command("init", "game", name, code=2)
        assert says in capsys.readouterr().err


def test_completion_knows_commands_keys_and_recipes() -> None:
    words = words_by_command()
    assert set(words) == set(COMMANDS)
    assert {"train.lr=", "frozen_lake", "--resume"} <= set(words["train"])
    script = subprocess.run(
        [*warm.turnwise(), "completion", "bash"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    asked = 'COMP_WORDS=(turnwise train algo.na); COMP_CWORD=2; _turnwise; echo "${COMPREPLY[@]}"'
    found = subprocess.run(
        ["bash", "-c", f"{script}\n{asked}"], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "algo.name="


@pytest.mark.parametrize("name", sorted(set(COMMANDS) - {"envs", "config"}))
def test_help_names_the_argument_with_an_example(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command(name, "--help")
    shown = capsys.readouterr().out
    assert "Example:" in shown
    usage = next(line for line in shown.splitlines() if "Usage:" in line)
    assert usage.split(name, 1)[1].replace("[OPTIONS]", "").strip()
