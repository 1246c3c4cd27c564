"""The example notebook, cell by cell, inside a running event loop as a kernel has one."""

import ast
import asyncio
import json
import sys
import types
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"


class Handle:
    """What IPython's display(..., display_id=True) returns: it keeps what is shown last."""

    def __init__(self, shown: list[str]) -> None:
        self.shown = shown

    def update(self, html: str) -> None:
        self.shown.append(html)


def test_every_cell_runs_in_a_running_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    display = types.ModuleType("IPython.display")
    display.HTML = str  # pyright: ignore[reportAttributeAccessIssue]
    display.display = lambda html, display_id: Handle(shown)  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.chdir(tmp_path)
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]

    async def kernel() -> dict[str, object]:
        """Runs the cells one after the other, as IPython does, names kept between them."""
        names: dict[str, object] = {"__name__": "__main__"}
        for number, source in enumerate(sources):
            tree = ast.parse(source, filename=f"cell {number}")
            exec(compile(tree, f"cell {number}", "exec"), names)
            await asyncio.sleep(0)
        return names

    names = asyncio.run(kernel())
    assert "<svg" in shown[-1]
    assert "rollout/success" in shown[-1]
    assert names["own"].path != names["run"].path  # pyright: ignore[reportAttributeAccessIssue]
    assert all(not cell["outputs"] for cell in cells if cell["cell_type"] == "code")
