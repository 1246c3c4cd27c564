"""The Triton kernels without a GPU, where Triton is installed: its interpreter runs them on the
CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]


def test_the_kernels_equal_plain_torch() -> None:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("kernels_interpreted.py"))],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "TRITON_INTERPRET": "1",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
