"""The first hour of a newcomer: every command of docs/tutorial.md in a process of its own, one
after the other in one folder outside the repository. (README.md: tests/unit/test_docs.py.)"""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import warm

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"<!-- first hour(: Ctrl-C)? -->\n```(bash|python)\n(.*?)```", re.DOTALL)


def environment() -> dict[str, str]:
    """As after an installation: `turnwise` and `python` on PATH, nothing from the network."""
    path = [warm.programs(), str(Path(sys.executable).parent), os.environ["PATH"]]
    return {
        **os.environ,
        "PATH": os.pathsep.join(path),
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }


def command(language: str, block: str) -> list[str]:
    bash = ["bash", "-euo", "pipefail", "-c", block]
    return bash if language == "bash" else [sys.executable, "-c", block]


def run(language: str, block: str, folder: Path) -> str:
    """What a block prints."""
    done = subprocess.run(
        command(language, block), cwd=folder, env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def run_and_interrupt(language: str, block: str, folder: Path) -> str:
    """What a block prints that gets a Ctrl-C after its first step, as from a terminal: the whole
    group of processes."""
    process = subprocess.Popen(
        command(language, block),
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    said: list[str] = []
    for line in process.stdout:
        said.append(line)
        if line.startswith("step ") and not any(text.startswith("step ") for text in said[:-1]):
            os.killpg(process.pid, signal.SIGINT)
    assert process.wait() == 130, "".join(said)
    return "".join(said)


PAGE = (ROOT / "docs/tutorial.md").read_text(encoding="utf-8")
BLOCKS: list[tuple[str, str, str]] = BLOCK.findall(PAGE)
SAYS = (
    ("shop.py:Shop: ok", "You won"),
    ("expert is better than random",),
    ("resume with: turnwise train --resume runs/first",),
    ("goes on after step", "report: runs/first/report.html"),
    ("first is better than before", "64 of 64"),
    ("algo.name: first 'grpo', second 'ideas.py:above_group'", "the longest reply so far has"),
    ("report: runs/Lamp-grpo-s0/report.html", "report: runs/Guest-grpo-s0/report.html"),
    ("episodes_sft.jsonl", "models/shop"),
    ('<tool_call>{"name": "stock", "arguments": {"item": "figs"}}</tool_call>',),
    ("success",),
    ("figs", "name='stock'"),
)
"""What each block prints, in the order of the page."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hour")


def test_every_block_of_the_tutorial_is_run() -> None:
    assert len(BLOCKS) == len(SAYS) == PAGE.count("```") // 2


@pytest.mark.parametrize("number", range(len(SAYS)))
def test_the_tutorial_step_by_step(number: int, folder: Path) -> None:
    done = folder / "done"
    if number != (int(done.read_text()) if done.is_file() else 0):
        pytest.skip("an earlier step failed, or was not run")
    interrupted, language, block = BLOCKS[number]
    said = (run_and_interrupt if interrupted else run)(language, block, folder)
    for expected in SAYS[number]:
        assert expected in said, said
    done.write_text(str(number + 1))


def test_the_run_learned_and_left_what_the_page_says(folder: Path) -> None:
    if not (folder / "models/shop").is_dir():
        pytest.skip("an earlier step failed, or was not run")
    summary = json.loads((folder / "runs/first/summary.json").read_text())
    before, after = (summary[label]["success"][1] for label in ("before", "after"))
    assert summary["steps"] == 16
    assert after > before + 0.1
    second = json.loads((folder / "runs/second/summary.json").read_text())
    assert second["after"]["success"][1] > after - 0.05, "the page's own idea does no damage"
    assert "<svg" in (folder / "compare.html").read_text()
    rows = (folder / "runs/first/episodes_sft.jsonl").read_text().splitlines()
    assert json.loads(rows[0])["messages"][-1]["role"] == "assistant"
    assert (folder / "models/shop/README.md").is_file()
