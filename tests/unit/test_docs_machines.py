"""Blocks of docs/agents.md for two machines: here two processes with a folder each."""

import re
import socket
import subprocess
from pathlib import Path

import pytest
from doc_pages import ROOT, blocks_of
from doc_runner import environment
from doc_small import program_folder
from doc_stage import stage

from turnwise.log.store import RunReader

HERE = str(Path(__file__).relative_to(ROOT))


def start(code: str, folder: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", code],
        cwd=folder,
        env=environment((program_folder(),)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
def test_a_run_and_its_worker(tmp_path: Path) -> None:
    page = blocks_of(ROOT / "docs/agents.md")
    blocks = [block for block in page if block.mark and block.mark["runner"] == HERE]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    folders = [tmp_path / "trainer", tmp_path / "worker"]
    codes: list[str] = []
    for block, folder in zip(blocks, folders, strict=True):
        folder.mkdir()
        stage(folder, block.code)
        codes.append(re.sub("TRAINER", "127.0.0.1", block.code.replace("8800", port)))
    trainer, worker = [start(code, folder) for code, folder in zip(codes, folders, strict=True)]
    try:
        said = trainer.communicate(timeout=600)[0]
        assert trainer.returncode == 0, said
        told = worker.communicate(timeout=60)[0]  # it ends with the run
        assert worker.returncode == 0, told
        assert f"working for http://127.0.0.1:{port}, 16 at once" in told
    finally:
        for process in (trainer, worker):
            process.kill()
            process.wait()
    runs = [path for path in (folders[0] / "runs").iterdir() if "solve" in path.name]
    (row,) = [row for row in RunReader(runs[0]).metrics() if "rollout/reward" in row]
    assert row["rollout/failures"] == 0
