"""Installs another release into a folder of its own, beside the environment, and runs a script with
it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def install(request: pytest.FixtureRequest, name: str, *packages: str) -> Path:
    """The folder with these packages, without their dependencies; kept in pytest's cache. Skips
    without an index."""
    folder = Path(request.config.cache.mkdir(f"turnwise-{name}"))
    mark = folder / "installed"
    if not mark.is_file():
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--no-deps",
            "--target",
            str(folder),
            *packages,
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200)
        if done.returncode:
            pytest.skip(f"cannot install {name}: {done.stderr.strip().splitlines()[-1]}")
        mark.touch()
    return folder


def newest(package: str) -> str:
    """The newest version that the index has. Skips without an index."""
    command = [sys.executable, "-m", "pip", "index", "versions", package]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    found = re.search(r"\((\S+)\)", done.stdout)
    if done.returncode or found is None:
        pytest.skip(f"no index knows {package}: {done.stderr.strip()[-200:]}")
    return found[1]


def run_with(folder: Path, script: Path | str, *arguments: str) -> str:
    """The script's output, with the folder's packages before those of the environment."""
    path = os.pathsep.join([str(folder), str(HERE.parents[1]), str(HERE)])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(script), *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout
