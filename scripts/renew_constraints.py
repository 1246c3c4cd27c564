"""Writes requirements/constraints.txt: the version of every package that `make train` and `make
test` install.

    python scripts/renew_constraints.py          the newest that go together, from a fresh install
    python scripts/renew_constraints.py --here   those of the environment that runs this script

requirements/choices.txt has the versions that are chosen by hand. Run the tests before you commit
what this writes.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / "requirements" / "constraints.txt"
CHOICES = ROOT / "requirements" / "choices.txt"
CPU_WHEELS = "https://download.pytorch.org/whl/cpu"
TOOLS = ("pip", "setuptools")
"""What installs the others, and what builds the package."""
HEADER = """\
# Every package that `make train` and `make test` install. Written by scripts/renew_constraints.py.
# No hashes: torch's file depends on the index (CPU or CUDA) and many others on the machine, and pip
# checks hashes of all files or of none. torch itself pins the CUDA libraries that it brings.
"""


def extras() -> list[str]:
    """The extras that `make test` installs."""
    found = re.search(r"^EXTRAS \?= (.*)$", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert found is not None
    return found[1].split(",")


def closure(wanted: list[str]) -> dict[str, str]:
    """Name -> version of everything that turnwise with these extras needs, as it is installed in
    this environment. The CPU build of torch is torch.
    """
    seen: set[tuple[str, str]] = set()
    versions: dict[str, str] = {}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    asked_for = [*TOOLS, *project["dependencies"]]
    asked_for += [text for name in wanted for text in project["optional-dependencies"][name]]
    queue = [Requirement(text) for text in asked_for]
    while queue:
        asked = queue.pop()
        name = canonicalize_name(asked.name)
        new = {extra for extra in ("", *asked.extras) if (name, extra) not in seen}
        seen |= {(name, extra) for extra in new}
        if not new:
            continue
        found = metadata.distribution(asked.name)
        versions[name] = found.version.partition("+")[0]
        for text in found.requires or ():
            need = Requirement(text)
            if need.marker is None or any(need.marker.evaluate({"extra": e}) for e in new):
                queue.append(need)
    return dict(sorted(versions.items()))


def install_fresh(folder: Path) -> Path:
    """The interpreter of a new environment with the newest versions that the choices allow."""
    python = folder / "bin" / "python"
    choices = dict(re.findall(r"^([\w-]+)==(.*)$", CHOICES.read_text("utf-8"), re.MULTILINE))
    pip = [str(python), "-m", "pip", "install", "-q"]
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    subprocess.run([*pip, "-U", *TOOLS, "packaging"], check=True)
    torch = ["--extra-index-url", CPU_WHEELS, f"torch=={choices['torch']}+cpu"]
    subprocess.run([*pip, "-c", str(CHOICES), *torch], check=True)
    target = f"{ROOT}[{','.join(extras())}]"
    subprocess.run([*pip, "-c", str(CHOICES), "-e", target], check=True)
    return python


def main(words: list[str]) -> None:
    if words == ["--json"]:
        print(json.dumps(closure(extras())))
    elif words == ["--here"]:
        write(closure(extras()))
    elif not words:
        with tempfile.TemporaryDirectory(prefix="turnwise-constraints-") as folder:
            python = install_fresh(Path(folder))
            bare = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
            said = subprocess.check_output([str(python), __file__, "--json"], env=bare)
            write(json.loads(said))
    else:
        raise SystemExit(__doc__)


def write(versions: dict[str, str]) -> None:
    lines = [f"{name}=={version}\n" for name, version in versions.items()]
    CONSTRAINTS.write_text(HEADER + "".join(lines), encoding="utf-8")
    print(f"{CONSTRAINTS.relative_to(ROOT)}: {len(versions)} packages")


if __name__ == "__main__":
    main(sys.argv[1:])
