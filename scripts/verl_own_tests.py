"""Runs verl's own CPU tests offline, without turnwise and with turnwise's plugin loaded.

    python scripts/verl_own_tests.py CHECKOUT [pytest arguments...]

CHECKOUT has a folder `tests` of verl-project/verl, such as an unpacked source distribution; the
tests are copied into a temporary folder, and the installed verl is tested. Run are the files that
verl's CI runs on a machine without a GPU (*_on_cpu.py) and the tests of verl's platforms. With
turnwise, every process loads the plugin as a run's workers do (VERL_USE_EXTERNAL_MODULES), and the
process of the tests imports the trainer too.

Prints how many tests pass each way and every test whose outcome differs; the exit status is 1 where
one does. Tests that need a network, a GPU or a package that is not installed fail or are skipped
either way. Needs pytest-asyncio and pytest-timeout.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

from own_tests import print_report, read_outcomes, write_line, write_outcome

HERE = Path(__file__).resolve().parent
RESULTS, IMPORTS = "VERL_TESTS_RESULTS", "VERL_TESTS_IMPORTS"
PLUGIN = "turnwise.integrations.verl.engines.plugin"
TRAINER = "turnwise.integrations.verl.trainer.agent_trainer"
INI = """[pytest]
python_files = *_on_cpu.py test_platform_abstraction.py
asyncio_mode = auto
timeout = 300
asyncio_default_fixture_loop_scope = function
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--show", action="store_true", help="list what fails without turnwise too")
    options, rest = parser.parse_known_args()
    tests = options.checkout / "tests"
    if not list(tests.rglob("*_on_cpu.py")):
        parser.error(f"{tests} has no *_on_cpu.py; is it a checkout of verl?")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(tests, folder / "tests")
        (folder / "pytest.ini").write_text(INI)
        without = run_tests(folder, "without", rest, {})
        ours = {"VERL_USE_EXTERNAL_MODULES": PLUGIN, IMPORTS: TRAINER}
        with_ours = run_tests(folder, "with", rest, ours)
    return print_report(("verl alone", without), ("turnwise", with_ours), show=options.show)


def run_tests(
    folder: Path, name: str, arguments: list[str], variables: dict[str, str]
) -> dict[str, str]:
    """{test: outcome} in an environment with these variables."""
    results = folder / f"{name}.jsonl"
    path = [str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "HF_HUB_OFFLINE": "1",
        "TORCH_COMPILE_DISABLE": "1",
        "RAY_worker_niceness": "0",  # beside other work, Ray's default of 15 runs into time limits
        "RAY_raylet_start_wait_time_s": "300",
        RESULTS: str(results),
        **variables,
    }
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "--tb=no"]
    command += ["-p", "verl_own_tests", "-p", "no:cacheprovider", "tests", *arguments]
    done = subprocess.run(command, cwd=folder, env=env)
    if not results.is_file() or done.returncode not in (0, 1):
        sys.exit(f"pytest ended with {done.returncode}; see its messages above")
    return read_outcomes(results)


# As a plugin of pytest, in the process that runs the tests.


def pytest_configure() -> None:
    """Imports turnwise's trainer, where it is asked for, before the tests import verl."""
    if os.environ.get(IMPORTS):
        import_module(os.environ[IMPORTS])


def pytest_collectreport(report: Any) -> None:
    """One line for each file that cannot be imported."""
    if report.failed:
        write_line(os.environ[RESULTS], report.nodeid, "not collected")


def pytest_runtest_logreport(report: Any) -> None:
    write_outcome(os.environ[RESULTS], report)


if __name__ == "__main__":
    sys.exit(main())
