"""Runs blocks of the documentation, each in a process of its own that need not import torch
again."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import warm
from doc_pages import ROOT, Block


def run_bash(block: Block, folder: Path) -> tuple[int, str]:
    """(exit status, output) of a block of commands."""
    return _run(["bash", "-euo", "pipefail", "-c", block.code], folder)


def run_python(blocks: Sequence[Block], folder: Path) -> tuple[int, str]:
    """(exit status, output) of blocks of one page that follow each other in one program."""
    program = ""
    for block in blocks:  # with the page's own numbers of lines
        program += "\n" * (block.line - 1 - program.count("\n")) + block.code
    file = folder / f"{blocks[0].page.stem}.md.py"
    file.write_text(program, encoding="utf-8")
    return _run([*warm.python(), str(file)], folder)


def _run(command: list[str], folder: Path) -> tuple[int, str]:
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, done.stdout


def environment() -> dict[str, str]:
    """As after an installation: `turnwise` on PATH, nothing from the network."""
    path = [warm.programs(), str(Path(sys.executable).parent), os.environ["PATH"]]
    return {
        **os.environ,
        "PATH": os.pathsep.join(path),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "HF_HUB_OFFLINE": "1",
    }
