"""The oldest TRL that is supported, 1.0.0, in a folder of its own: the hooks are the same as in the newest."""

from pathlib import Path

import pytest
from old_release import HERE, install, run_with

OLDEST = "1.0.0"


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_the_oldest_release(request, tmp_path):
    folder = install(request, f"trl-{OLDEST}", f"trl=={OLDEST}")
    said = run_with(folder, HERE / "trl_old_release.py", str(tmp_path))
    assert f"trl {OLDEST}" in said
    assert said.count("\nok ") == 5


def test_pyproject_names_it():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert f'"trl>={OLDEST.removesuffix(".0")},!=1.15.0' in text
