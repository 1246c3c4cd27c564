"""Runs blocks of the documentation, each in a process of its own that need not import torch
again."""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import warm
from doc_pages import ROOT, Block
from doc_small import program_folder
from doc_stage import stage

GITHUB = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "url.github/.insteadOf"}
GITHUB["GIT_CONFIG_VALUE_0"] = "https://github.com/"
"""Repositories of GitHub are in the folder `github`."""


def run_bash(block: Block, folder: Path) -> tuple[int, str]:
    """(exit status, output) of a block of commands."""
    first = ()
    if block.small:
        stage(folder, block.code)
        first = (program_folder(),)
    return _run(["bash", "-euo", "pipefail", "-c", block.code], folder, first)


def run_yaml(block: Block, folder: Path) -> tuple[int, str]:
    """(exit status, output) of a training with a block's part of a config; frozen_lake is the
    rest."""
    (folder / "block.yaml").write_text(f"extends: frozen_lake\n{block.code}", encoding="utf-8")
    return run_bash(replace(block, code="turnwise train block.yaml"), folder)


def run_python(blocks: Sequence[Block], folder: Path) -> tuple[int, str]:
    """(exit status, output) of blocks of one page that follow each other in one program."""
    program = ""
    if any(block.small for block in blocks):
        for block in blocks:
            stage(folder, block.code)
        program = "import doc_small; doc_small.shrink()"
    for block in blocks:  # with the page's own numbers of lines
        program += "\n" * (block.line - 1 - program.count("\n")) + block.code
    file = folder / f"{blocks[0].page.stem}.md.py"
    file.write_text(program, encoding="utf-8")
    return _run([*warm.python(), str(file)], folder)


def _run(command: list[str], folder: Path, first: Sequence[str] = ()) -> tuple[int, str]:
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment(first),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, done.stdout


def environment(first: Sequence[str] = ()) -> dict[str, str]:
    """As after an installation: `turnwise` on PATH, nothing from the network."""
    path = [*first, warm.programs(), str(Path(sys.executable).parent), os.environ["PATH"]]
    modules = [str(ROOT), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        **({"PYTHON": str(Path(first[0]) / "python"), **GITHUB} if first else {}),
        "PATH": os.pathsep.join(path),
        "PYTHONPATH": os.pathsep.join(modules),
        "HF_HUB_OFFLINE": "1",
    }
