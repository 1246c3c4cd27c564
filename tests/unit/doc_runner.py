"""Runs Python blocks of the documentation, each in a process of its own that need not import torch
again: a server imports it once and forks.

The server reads a JSON object per line (folder, blocks of page, line and code) and answers with the
exit status and what was printed.
"""

import json
import linecache
import os
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from doc_pages import ROOT, Block


class BlockServer:
    """Runs Python blocks. Started when the first one comes."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run(self, blocks: Sequence[Block], folder: Path) -> tuple[int, str]:
        """(exit status, output) of blocks that follow each other in one program."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment(),
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        asked = {
            "folder": str(folder),
            "blocks": [[str(block.page), block.line, block.code] for block in blocks],
        }
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"the server of blocks ended with {self._process.wait()}"
        status, output = json.loads(answer)
        return status, output

    def close(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait()


def environment() -> dict[str, str]:
    """As after an installation: `turnwise` on PATH, nothing from the network."""
    programs = Path(sys.executable).parent
    return {
        **os.environ,
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "HF_HUB_OFFLINE": "1",
    }


def serve() -> None:
    # What nearly every block needs. Nothing of it may start a thread, which a fork would lose.
    import turnwise.api
    import turnwise.testing.tiny  # noqa: F401

    for line in sys.stdin:
        asked = json.loads(line)
        output = Path(asked["folder"]) / "block.out"
        child = os.fork()
        if child == 0:
            _be_the_program(asked, output)
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        answer = [code, output.read_text(encoding="utf-8", errors="replace")]
        print(json.dumps(answer), flush=True)


def _be_the_program(asked: dict[str, Any], output: Path) -> None:
    """Runs the blocks as the main module, and ends the process."""
    status = 1
    try:
        os.chdir(asked["folder"])
        into = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        empty = os.open(os.devnull, os.O_RDONLY)
        for target, source in ((0, empty), (1, into), (2, into)):
            os.dup2(source, target)
        main = sys.modules["__main__"] = ModuleType("__main__")
        sys.path[0] = asked["folder"]
        sys.argv = ["-c"]
        for page, line, code in asked["blocks"]:
            # With the page's own lines, so that tracebacks and inspect.getsource find them.
            linecache.checkcache(page)
            exec(compile("\n" * (line - 1) + code, page, "exec"), vars(main))
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    serve()
