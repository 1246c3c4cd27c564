"""What the documentation says is run: marked blocks, links, commands and file names, the table of
keys."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from turnwise.cli.main import COMMANDS

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
MARKED = re.compile(r"<!-- test( slow)? -->\n```(bash|python)\n(.*?)```", re.DOTALL)
BASH = re.compile(r"```bash\n(.*?)```", re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(#[^)\s]*)?\)")


def marked_blocks() -> list[object]:
    """One parameter per marked block, named by page and line."""
    found: list[object] = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in MARKED.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            marks = [pytest.mark.slow] if match[1] else []
            found.append(
                pytest.param(match[2], match[3], id=f"{page.relative_to(ROOT)}:{line}", marks=marks)
            )
    return found


@pytest.mark.parametrize(("language", "block"), marked_blocks())
def test_marked_blocks_run(language: str, block: str, tmp_path: Path) -> None:
    programs = Path(sys.executable).parent
    environment = {
        **os.environ,
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "HF_HUB_OFFLINE": "1",
    }
    command = (
        ["bash", "-euo", "pipefail", "-c", block]
        if language == "bash"
        else [sys.executable, "-c", block]
    )
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target, _ in LINK.findall(page.read_text(encoding="utf-8")):
        if "://" not in target and not target.startswith("mailto:"):
            assert (page.parent / target).exists(), (
                f"{page.relative_to(ROOT)} links to {target}, which does not exist"
            )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_in_blocks_exist(page: Path) -> None:
    targets = set(
        re.findall(
            r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
        )
    )
    for block in BASH.findall(page.read_text(encoding="utf-8")):
        for line in block.splitlines():
            words = line.split()
            if words[:1] == ["turnwise"] and len(words) > 1 and not words[1].startswith("-"):
                assert words[1] in COMMANDS, f"{page.name}: {line}"
            if words[:1] == ["make"]:
                assert words[1] in targets, f"{page.name}: {line}"
            for word in words:
                if re.fullmatch(r"(scripts|examples|benchmarks)/[\w/]+\.\w+", word):
                    assert (ROOT / word).is_file(), f"{page.name}: {line}"


def test_the_files_that_contributing_routes_to_exist() -> None:
    for name in re.findall(
        r"`((?:turnwise|docs|tests|scripts)/[\w/.]*)`", (ROOT / "CONTRIBUTING.md").read_text()
    ):
        assert (ROOT / name).exists(), name


def test_the_table_of_keys_is_current() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/config_table.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{done.stderr}; run: python scripts/config_table.py"
