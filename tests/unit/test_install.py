"""The wheel works outside the repository, what is installed is pinned, the Dockerfile's commands
name what is there."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}


def output(*words: str | Path, cwd: Path) -> str:
    done = subprocess.run(
        [str(word) for word in words], cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy: a build leaves folders behind."""
    folder = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "turnwise", folder / "turnwise", ignore=ignored)
    # Without isolation: the tools of this environment, and no network.
    words = ("-m", "build", "--wheel", "--no-isolation", "--outdir", "dist")
    output(sys.executable, *words, cwd=folder)
    (found,) = (folder / "dist").glob("*.whl")
    return found


def test_the_wheel_has_everything_but_tests(wheel: Path) -> None:
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    files = [path for path in (ROOT / "turnwise").rglob("*") if path.is_file()]
    here = {str(path.relative_to(ROOT)) for path in files if "__pycache__" not in path.parts}
    assert packed == here
    tests = re.compile(r"(^|/)(tests|conftest\.py|test_[^/]*\.py)(/|$)")
    assert not [name for name in packed if tests.search(name)]


def test_the_wheel_works_in_a_clean_environment(wheel: Path, tmp_path: Path) -> None:
    """A new environment that sees this one's packages, but not its turnwise: of a path that a .pth
    file adds, the .pth files are not read."""
    venv.create(tmp_path / "venv", with_pip=False)
    programs = tmp_path / "venv" / "bin"
    variables = {"base": str(tmp_path / "venv"), "platbase": str(tmp_path / "venv")}
    site = Path(sysconfig.get_path("purelib", "venv", variables))
    (site / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = ("-m", "pip", "--python", programs / "python", "install", "-q", "--no-deps", wheel)
    output(sys.executable, *install, cwd=tmp_path)
    where = "import turnwise; print(turnwise.__file__)"
    assert str(site) in output(programs / "python", "-c", where, cwd=tmp_path)
    assert "frozen_lake" in output(programs / "turnwise", "envs", cwd=tmp_path)
    words = "train bandit train.steps=1 eval.episodes=4 model.embedded.warmstart_episodes=16"
    assert "done after" in output(programs / "turnwise", *words.split(), cwd=tmp_path)
    assert list(tmp_path.glob("runs/*/report.html"))


def renew_script() -> ModuleType:
    path = ROOT / "scripts" / "renew_constraints.py"
    spec = spec_from_file_location("renew_constraints", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pins(name: str) -> dict[str, str]:
    text = (ROOT / "requirements" / name).read_text(encoding="utf-8")
    return dict(re.findall(r"^([\w.-]+)==(\S+)$", text, re.MULTILINE))


def test_every_package_that_is_installed_is_pinned() -> None:
    script = renew_script()
    needed = script.closure(script.extras())
    assert {"torch", "pip", "setuptools", "pytest", "ruff", "pyright", "verl", "trl"} <= set(needed)
    missing = sorted(set(needed) - set(pins("constraints.txt")))
    assert not missing, "run scripts/renew_constraints.py"
    assert pins("choices.txt").items() <= pins("constraints.txt").items()


def test_the_makefile_installs_nothing_without_pins() -> None:
    lines = (ROOT / "Makefile").read_text(encoding="utf-8").splitlines()
    installs = [line for line in lines if "pip install" in line]
    assert len(installs) >= 5
    assert all("-c $(CONSTRAINTS)" in line or "$(PINS)" in line for line in installs), installs


def test_the_dockerfile_names_what_is_there() -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    commands = re.findall(r"^RUN (.*)$", text, re.MULTILINE)
    assert len(commands) >= 4
    for command in commands:
        subprocess.run(["sh", "-n", "-c", command], check=True)
        words = re.sub(r"\$\(sed .*?\)", "", command)
        for path in re.findall(r"\brequirements/\S+", words):
            assert (ROOT / path).is_file()
    shown = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    for copied in re.findall(r"^COPY (.*)$", text, re.MULTILINE):
        for name in copied.split()[:-1]:
            assert (ROOT / name).exists()
            assert f"!{name}" in shown, "what is copied is not ignored"
    script = renew_script()
    (extras,) = re.findall(r"^ARG EXTRAS=(.*)$", text, re.MULTILINE)
    assert set(extras.split(",")) <= set(script.extras()), "an extra that has no pins"
    taken = subprocess.run(
        ["sed", "-n", "s/^torch==//p", "requirements/constraints.txt"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert taken.stdout.strip() == pins("constraints.txt")["torch"]
