"""Environments of verifiers 0.3.1, which 0.4 no longer has, in a folder of their own beside the
environment."""

import pytest
from old_release import HERE, install, run_with

PACKAGES = (
    "verifiers==0.3.1",
    "mcp==1.27.0",  # 0.3.1 needs mcp 1, 0.4 needs mcp 2
    *(
        "openai-agents",
        "aiolimiter",
        "math-verify",
        "latex2sympy2-extended",
        "antlr4-python3-runtime==4.13.2",
    ),
    *(
        "griffe",
        "griffelib",
        "httpx-sse",
        "sse-starlette",
        "pydantic-settings",
        "python-dotenv",
        "typing-inspection",
    ),
    *("msgpack", "setproctitle", "uvloop"),
)


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_version_0_3_1(request, tmp_path):
    folder = install(request, "verifiers-0.3.1", *PACKAGES)
    said = run_with(folder, HERE / "verifiers_legacy_run.py", str(tmp_path))
    assert said.count("ok ") == 13, said


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_texts_to_continue(request, tmp_path):
    folder = install(request, "verifiers-0.3.1", *PACKAGES)
    said = run_with(folder, HERE / "verifiers_texts_run.py", str(tmp_path))
    assert said.count("ok ") == 7, said
