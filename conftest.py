"""What pytest must not import. It collects doctests from every module, and some are none of its
business."""

import atexit
import os
import shutil
import signal
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from hypothesis import settings

# What turnwise remembers between runs goes to a folder of the tests, not to the user's.
for _name in ("XDG_STATE_HOME", "XDG_CACHE_HOME"):
    os.environ[_name] = tempfile.mkdtemp(prefix="turnwise-tests-")
    atexit.register(shutil.rmtree, os.environ[_name], ignore_errors=True)

# A shell ignores Ctrl-C for what it starts in the background. Tests of Ctrl-C need the default.
signal.signal(signal.SIGINT, signal.default_int_handler)

TESTS = Path(__file__).parent / "tests"
sys.path.insert(0, str(TESTS))  # what tests of several folders share
PACKAGE = Path(__file__).parent / "turnwise"
KERNELS = PACKAGE / "generate/blocks/kernels.py"
VERL = PACKAGE / "integrations/verl"
IN_VERL = {
    *(
        "overrides",
        "trainer/agent_trainer",
        "trainer/pace",
        "trainer/updates",
        "rollout/agent_loop",
        "rollout/lockstep",
    ),
    *("rollout/queue", "engines/hf_server", "engines/platform", "engines/plugin"),
}
"""What registers itself with verl when it is imported, or needs it."""


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Helpers and scripts beside the tests, which may run on import, and kernels where there is no
    Triton."""
    if collection_path.suffix != ".py" or collection_path.name == "conftest.py":
        return None
    helper = collection_path.is_relative_to(TESTS) and not collection_path.name.startswith("test_")
    registers = collection_path in {VERL / f"{name}.py" for name in IN_VERL}
    no_triton = collection_path == KERNELS and find_spec("triton") is None
    return True if helper or registers or no_triton else None


# The same examples every time, so that a change is what makes a test fail; `make test-search` draws
# new ones.
settings.register_profile("default", derandomize=True, database=None, deadline=None)
settings.register_profile(
    "search",
    max_examples=int(os.environ.get("EXAMPLES", "2000")),
    database=None,
    deadline=None,
    print_blob=True,
)
settings.load_profile("default")
