"""Two processes over gloo, with episodes of one to three turns: all take part in everything equally
often."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]


def run_two(tmp_path, **settings):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node=2",
        "--master_port=0",
    ]
    command += ["--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0"]
    command += [str(HERE / "trl_two_processes.py"), str(tmp_path), json.dumps(settings)]
    path = os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "PYTHONPATH": path}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    files = [tmp_path / f"rank{rank}.json" for rank in (0, 1)]
    assert all(file.is_file() for file in files), done.stderr[-4000:]
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.parametrize(
    "settings",
    [
        {"engine": "local"},
        {"engine": "trl"},
        {"engine": "local", "enable_async_generation": True},
        {"engine": "local", "credit": "turn_level"},
        # A group of four over two processes of two.
        {"engine": "local", "per_device_train_batch_size": 2, "credit": "gigpo"},
    ],
    ids=str,
)
def test_ragged_turns(tmp_path, settings):
    ranks = run_two(
        tmp_path,
        max_steps=3,
        **{"per_device_train_batch_size": 4, "num_generations": 4, **settings},
    )
    assert [rank["error"] for rank in ranks] == [None, None]
    assert ranks[0]["weights"] == ranks[1]["weights"]  # the same gradient on both
    assert len(ranks[0]["seen"]) == len(ranks[1]["seen"]) == 3
    turns = set()
    for batch in zip(ranks[0]["seen"], ranks[1]["seen"], strict=True):
        groups = [group for part in batch for group in part["groups"]]
        assert groups == [place // 4 for place in range(len(groups))]
        for part in batch:
            assert part["rows"] == part["tasks"]
            assert part["turns"] == [1 + n % 3 for n in part["rows"]]
            turns.update(part["turns"])
        ids = [tuple(ids) for part in batch for ids in part["ids"]]
        assert len(set(ids)) > len(ids) // 2  # the processes draw differently
    if settings.get("per_device_train_batch_size", 4) == 4:
        assert turns == {1, 2, 3}
    if settings["engine"] == "trl":
        assert ranks[0]["sizes"] == ranks[1]["sizes"]
        assert min(ranks[0]["sizes"]) >= 1
    if settings.get("enable_async_generation"):
        assert max(ranks[0]["staleness"]) > 0


def test_a_process_whose_episodes_all_fail_takes_part(tmp_path):
    ranks = run_two(
        tmp_path, max_steps=3, per_device_train_batch_size=4, num_generations=4, fail_rows=[2]
    )
    assert [rank["error"] for rank in ranks] == [None, None]
    failed = [all(part["failed"]) for rank in ranks for part in rank["seen"]]
    assert any(failed)
    assert not all(failed)
    for rank in ranks:
        for part in rank["seen"]:
            assert all(
                a == 0.0 for a, bad in zip(part["advantages"], part["failed"], strict=True) if bad
            )


def test_all_processes_stop_together(tmp_path):
    ranks = run_two(
        tmp_path, max_steps=1, per_device_train_batch_size=4, num_generations=4, fail_all=True
    )
    for rank in ranks:
        assert "none of the 8 episodes" in rank["error"]
        assert "nothing works" in rank["error"]
