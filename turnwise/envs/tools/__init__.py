"""Tools for ToolEnv: Python in a sandbox, a calculator, a search over documents, and time limits
that kill. Contains no environment."""

from turnwise.envs.tools.calculator import calculator
from turnwise.envs.tools.limits import with_time_limit
from turnwise.envs.tools.python_tool import (
    PythonLimits,
    PythonResult,
    SandboxError,
    make_python_tool,
    run_python,
)
from turnwise.envs.tools.search import Document, load_documents, make_search_tool

__all__ = [
    "Document",
    "PythonLimits",
    "PythonResult",
    "SandboxError",
    "calculator",
    "load_documents",
    "make_python_tool",
    "make_search_tool",
    "run_python",
    "with_time_limit",
]
