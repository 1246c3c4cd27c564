"""What the documentation says is run, or at least checked: every block of code, commands in the
text, links, the table of keys."""

import ast
import itertools
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from doc_commands import check_command, split_block
from doc_pages import BLOCKS, LANGUAGES, PAGES, ROOT, Block, blocks_of, sequences
from doc_runner import run_bash, run_python, run_yaml
from doc_small import SKIPPED

from turnwise.config import ConfigError, run_config

LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(#[^)\s]*)?\)")
INLINE = re.compile(r"(?<!`)`(turnwise [^`]+)`(?!`)")
INDENTED = re.compile(r"^    (?:\d: )?((?:turnwise|python|make) (?:.*\\\n)*.*)$", re.MULTILINE)
HISTORY = {ROOT / "CHANGELOG.md", ROOT / "docs/dev/log.md", ROOT / "docs/dev/walk.md"}
"""Pages that say what was: their commands may be gone."""


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.timeout(3000)  # whole runs, also on a machine that is busy
@pytest.mark.parametrize(
    "blocks",
    [
        pytest.param(
            blocks,
            id=blocks[0].name,
            marks=[pytest.mark.slow] if blocks[0].test == "test slow" else [],
        )
        for blocks in sequences()
    ],
)
def test_blocks_run(blocks: list[Block], tmp_path: Path) -> None:
    for language, following in itertools.groupby(blocks, key=lambda block: block.language):
        if language == "python":
            program = list(following)
            status, output = run_python(program, tmp_path)
            assert status == 0, f"{program[0].name}\n{output}"
            continue
        for block in following:
            run = run_yaml if language == "yaml" else run_bash
            status, output = run(block, tmp_path)
            if status == SKIPPED:
                pytest.skip(output.splitlines()[-1])
            assert status == 0, f"{block.name}\n{block.code}\n{output}"


def test_every_block_says_whether_it_is_run() -> None:
    for block in BLOCKS:
        assert block.language in LANGUAGES, f"{block.name}: a block is one of {LANGUAGES}"
        if block.language in ("bash", "python"):
            assert block.mark, f"{block.name} has no mark; tests/unit/doc_pages.py lists them"
            if block.mark["hour"]:
                assert block.page.name == "tutorial.md", f"{block.name} is not run there"
            if block.mark["runner"]:
                runner = ROOT / block.mark["runner"]
                assert runner.is_file(), block.name
                assert block.page.name in runner.read_text(encoding="utf-8"), block.name


@pytest.mark.parametrize("page", [page for page in PAGES if page not in HISTORY], ids=name_of)
def test_commands_exist(page: Path, tmp_path: Path) -> None:
    text = page.read_text(encoding="utf-8")
    scripts = [block.code for block in blocks_of(page) if block.language == "bash"]
    scripts += [" ".join(found.split()) for found in INLINE.findall(text)]
    scripts += INDENTED.findall(text)
    for script in scripts:
        commands, files = split_block(script)
        for name, content in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(content, encoding="utf-8")
        for words in commands:
            if any("..." in word or word.startswith("[") for word in words):
                continue  # a pattern, not a command
            try:
                check_command(words, tmp_path)
            except ValueError as error:
                pytest.fail(f"{name_of(page)}: {' '.join(words)}\n{error}")


@pytest.mark.parametrize(
    "block",
    [block for block in BLOCKS if block.language not in ("bash", "text")],
    ids=lambda block: block.name,
)
def test_data_and_programs_can_be_read(block: Block, tmp_path: Path) -> None:
    if block.language == "yaml":
        file = tmp_path / "block.yaml"
        file.write_text(block.code, encoding="utf-8")
        try:
            run_config(file)
        except ConfigError as error:
            pytest.fail(f"{block.name}\n{error}")
    elif block.language == "toml":
        tomllib.loads(block.code)
    elif block.language == "json":
        json.loads(block.code)
    elif block.language == "python":
        tree = ast.parse(block.code, filename=block.name)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("turnwise"):
                for alias in node.names:
                    assert is_defined(node.module or "", alias.name), f"{block.name}: {alias.name}"


def is_defined(module: str, name: str) -> bool:
    """Whether a module of ours has the name, by its text: importing TRL and verl takes long."""
    place = ROOT / module.replace(".", "/")
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    if not file.is_file():
        return False
    inner = (place / f"{name}.py").is_file() or (place / name).is_dir()
    return inner or re.search(rf"\b{name}\b", file.read_text(encoding="utf-8")) is not None


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for target, _ in LINK.findall(page.read_text(encoding="utf-8")):
        if "://" not in target and not target.startswith("mailto:"):
            assert (page.parent / target).exists(), (
                f"{name_of(page)} links to {target}, which does not exist"
            )


def test_the_files_that_contributing_routes_to_exist() -> None:
    for name in re.findall(
        r"`((?:turnwise|docs|tests|scripts)/[\w/.]*)`", (ROOT / "CONTRIBUTING.md").read_text()
    ):
        assert (ROOT / name).exists(), name


def test_pages_that_the_code_names_exist() -> None:
    for file in ROOT.glob("turnwise/**/*.py"):
        for name in re.findall(r"docs/[\w/-]+\.md", file.read_text(encoding="utf-8")):
            assert (ROOT / name).is_file(), f"{file.relative_to(ROOT)} names {name}"


def test_every_extra_is_in_the_table() -> None:
    text = (ROOT / "docs/install.md").read_text(encoding="utf-8")
    listed = {
        name
        for line in text.splitlines()
        if line.startswith("| `")
        for name in re.findall(r"`([\w-]+)`", line.split("|")[1])
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert listed == set(project["optional-dependencies"])


def test_the_table_of_keys_is_current() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/config_table.py", "--check"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{done.stderr}; run: python scripts/config_table.py"
