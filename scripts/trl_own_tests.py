"""Runs TRL's own tests of GRPOTrainer offline, with TRL's trainer and with VerifiersGRPOTrainer.

    python scripts/trl_own_tests.py CHECKOUT [--trl checkout] [--config] [pytest arguments...]

CHECKOUT is a checkout of huggingface/trl; its tests are copied into a temporary folder, with tiny
models under the names that they ask for (scripts/trl_tiny_hub.py). Prints how many tests pass with
each trainer and every test whose outcome differs; the exit status is 1 where one does.

Tests of tools need jmespath; those of vision models, liger, vLLM and CUDA fail or are skipped with
either trainer.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from own_tests import print_report, read_outcomes, write_outcome

HERE = Path(__file__).resolve().parent
RESULTS, TRAINER, CONFIG = "TRL_TESTS_RESULTS", "TRL_TESTS_TRAINER", "TRL_TESTS_CONFIG"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument(
        "--trl",
        choices=("installed", "checkout"),
        default="installed",
        help="which TRL is tested: the installed one, or the checkout's own",
    )
    parser.add_argument(
        "--config", action="store_true", help="put VerifiersGRPOConfig for GRPOConfig as well"
    )
    parser.add_argument("--show", action="store_true", help="list failures with TRL's trainer too")
    options, rest = parser.parse_known_args()
    tests = options.checkout / "tests"
    if not (tests / "test_grpo_trainer.py").is_file():
        parser.error(f"{tests} has no test_grpo_trainer.py; is it a checkout of TRL?")
    path = [str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    if options.trl == "checkout":
        path.insert(0, str(options.checkout.resolve()))
    sys.path[:0] = path[:-1]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(tests, folder / "tests")
        from trl_tiny_hub import with_small_ids, write_hub

        file = folder / "tests" / "test_grpo_trainer.py"
        file.write_text(with_small_ids(file.read_text()))

        for model, why in write_hub(folder / "home").items():
            print(f"not made: {model}: {why}")
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path),
            "HF_HOME": str(folder / "home"),
            "HF_HUB_OFFLINE": "1",
            "TRL_EXPERIMENTAL_SILENCE": "1",
            CONFIG: "ours" if options.config else "trl",
        }
        theirs = run_tests(folder, {**env, TRAINER: "trl"}, rest)
        ours = run_tests(folder, {**env, TRAINER: "ours"}, rest)
    return print_report(
        ("TRL's GRPOTrainer", theirs), ("VerifiersGRPOTrainer", ours), show=options.show
    )


def run_tests(folder: Path, env: dict[str, str], arguments: list[str]) -> dict[str, str]:
    """{test: outcome} with the trainer that the variables name."""
    results = folder / f"{env[TRAINER]}.jsonl"
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "trl_own_tests"]
    command += ["-p", "no:cacheprovider", "--tb=short", "tests/test_grpo_trainer.py", *arguments]
    subprocess.run(command, cwd=folder, env={**env, RESULTS: str(results)})
    if not results.is_file():
        sys.exit("no test ran; see pytest's messages above")
    return read_outcomes(results)


# As a plugin of pytest, in the process that runs the tests.


def pytest_configure() -> None:
    """Puts the made-up data sets and the trainer in their places, before the tests import them."""
    import datasets
    import trl
    from trl import import_utils
    from trl.trainer.base_config import _BaseConfig
    from trl_tiny_hub import load_dataset

    datasets.load_dataset = load_dataset
    resolve = _BaseConfig.__post_init__

    def in_float32(config: Any) -> None:
        if config.bf16 is None:  # TRL's default is bfloat16, which not every CPU can multiply
            config.bf16 = False
        resolve(config)

    _BaseConfig.__post_init__ = in_float32
    # Tests of another release may ask whether a library is there that this one no longer knows.
    import_utils.__getattr__ = _not_available
    if os.environ[TRAINER] == "ours":
        from turnwise.integrations.trl import VerifiersGRPOConfig, VerifiersGRPOTrainer

        trl.GRPOTrainer = VerifiersGRPOTrainer
        if os.environ[CONFIG] == "ours":
            trl.GRPOConfig = VerifiersGRPOConfig


def _not_available(name: str) -> Any:
    if not (name.startswith("is_") and name.endswith("_available")):
        raise AttributeError(name)
    return lambda: False


def pytest_runtest_logreport(report: Any) -> None:
    write_outcome(os.environ[RESULTS], report)


if __name__ == "__main__":
    sys.exit(main())
