"""Trackers write what they are told, and one that is missing is named before the run."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from turnwise.config.schema import Config, LogConfig
from turnwise.log.events import Evaluated, RunStarted, Sinks, StepDone
from turnwise.log.trackers import PACKAGES, TrackerError, make_trackers


def track(name: str, path: Path) -> None:
    path.mkdir()
    sinks = Sinks(make_trackers(LogConfig(trackers=(name,))))  # pyright: ignore[reportArgumentType]
    sinks.handle(RunStarted(path=path, config=Config()))
    for step in range(2):
        sinks.handle(
            StepDone(step=step, metrics={"rollout/reward": 0.5 + step, "train/loss": float("nan")})
        )
    evaluated = Evaluated(
        step=1, label="after", episodes=4, success=(0.3, 0.5, 0.7), reward=(0.1, 0.2, 0.3)
    )
    sinks.handle(evaluated)
    sinks.close()


def test_tensorboard_files_hold_the_numbers(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    track("tensorboard", tmp_path / "run")
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [(point.step, point.value) for point in events.Scalars("rollout/reward")] == [
        (0, 0.5),
        (1, 1.5),
    ]
    assert events.Scalars("eval/success")[0].value == 0.5
    assert "train/loss" not in events.Tags()["scalars"]


@pytest.mark.slow
def test_mlflow_store_holds_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    track("mlflow", tmp_path / "run")
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("turnwise")
    run = client.search_runs([experiment.experiment_id])[0]
    history = client.get_metric_history(run.info.run_id, "rollout/reward")
    assert [(point.step, point.value) for point in history] == [(0, 0.5), (1, 1.5)]
    assert (tmp_path / "mlflow.db").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_trackers_with_a_process_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    pytest.importorskip(name)
    for variable in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    code = (
        f"import test_log_trackers as t, pathlib; t.track({name!r}, "
        f"pathlib.Path({str(tmp_path / 'run')!r}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    if name == "wandb":
        assert list((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    else:
        assert list((tmp_path / "trackio").glob("turnwise*"))


@pytest.mark.parametrize("name", sorted(PACKAGES))
def test_a_missing_package_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, package = PACKAGES[name]
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(TrackerError, match=f"pip install {package}"):
        make_trackers(LogConfig(trackers=(name,)))  # pyright: ignore[reportArgumentType]


def test_no_tracker_is_imported_unless_it_is_named() -> None:
    code = (
        "import turnwise.log.trackers, sys; print([m for m in ('wandb', 'mlflow', 'torch') if m in "
        "sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert importlib.util.find_spec("turnwise.log.trackers") is not None
