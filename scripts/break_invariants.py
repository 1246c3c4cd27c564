"""Breaks the invariants of docs/invariants.md on purpose and says which tests notice.

Each break is a small change to one file in a copy of the working tree. Its tests run there twice:
without the break, where they must pass, and with it, where one must fail. A break that no test
notices means that a test is missing. The exit status is 0 only where every break was noticed. The
breaks are listed in invariant_breaks.py.

    python scripts/break_invariants.py --list
    python scripts/break_invariants.py --jobs 2
    python scripts/break_invariants.py prompt-trained ledger-silent
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import date
from enum import StrEnum
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeVar

from invariant_breaks import BREAKS, Break

if TYPE_CHECKING:
    import pytest

T = TypeVar("T")
R = TypeVar("R")
ROOT = Path(__file__).resolve().parents[1]
TEST_SECONDS = 120
"""What one test may take. A break can make a test hang, and that counts as noticed."""
RUN_SECONDS = 600
"""What all tests of one break may take together."""


class Outcome(StrEnum):
    """What became of one break."""

    NOTICED = "noticed"
    UNNOTICED = "NOT noticed"
    STALE = "stale"
    RED = "the tests fail without the break"
    UNUSABLE = "the tests could not run"


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """A break after its tests ran."""

    broken: Break
    outcome: Outcome
    detail: str
    """The first test that failed, or why there is no such test."""
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PytestRun:
    """What pytest said."""

    status: int
    """pytest's exit status: 0 all passed, 1 a test failed, anything else is no answer."""
    first_failure: str
    output: str


class Copy:
    """A copy of the working tree in a folder of its own, to break files and run tests in."""

    def __init__(self, folder: Path, *, root: Path = ROOT) -> None:
        self.folder = folder.resolve()
        for name in tracked_files(root):
            target = self.folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, target)

    @contextmanager
    def broken(self, change: Break) -> Generator[None]:
        """The copy with the break in it; afterwards the file is as it was, to the byte."""
        path = self.folder / change.file
        before = path.read_bytes()
        path.write_bytes(before.replace(change.old.encode(), change.new.encode()))
        try:
            yield
        finally:
            path.write_bytes(before)

    def run(self, tests: Sequence[str]) -> PytestRun:
        """What pytest says of these tests, run against the copy and not the installed package."""
        options = ["-q", "-x", "-rfE", "--tb=short", "-p", "no:cacheprovider"]
        options += ["-p", Path(__file__).stem, "-o", f"timeout={TEST_SECONDS}"]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(self.folder), str(self.folder / "scripts")]),
            # A file is broken and restored within a second, and Python tells versions apart by
            # seconds and size: it must not keep bytecode.
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "COLUMNS": "400",
        }
        try:
            done = subprocess.run(
                [sys.executable, "-m", "pytest", *options, *tests],
                cwd=self.folder,
                env=environment,
                capture_output=True,
                text=True,
                timeout=RUN_SECONDS,
            )
        except subprocess.TimeoutExpired:
            return PytestRun(status=-1, first_failure="", output=f"no end within {RUN_SECONDS} s")
        output = done.stdout + done.stderr
        found = re.search(r"^(?:FAILED|ERROR) ([^\s\[]+)", output, re.MULTILINE)
        failure = "" if found is None else found[1]
        return PytestRun(status=done.returncode, first_failure=failure, output=output)


def pytest_configure(config: "pytest.Config") -> None:
    """Stops pytest where the tests would import another turnwise than the copy's.

    pytest calls this in the copy, because `Copy.run` names this file as a plugin. It also keeps
    hypothesis from shrinking the examples that fail: that one failed is all that is asked.
    """
    import pytest
    from hypothesis import Phase, settings

    import turnwise

    found = Path(turnwise.__file__ or "").resolve()
    if not found.is_relative_to(config.rootpath.resolve()):
        pytest.exit(f"{found} is imported, and not the copy in {config.rootpath}", returncode=90)
    phases = (Phase.explicit, Phase.generate)
    settings.register_profile("unshrunk", settings(), phases=phases)
    settings.load_profile("unshrunk")


def tracked_files(root: Path) -> list[str]:
    """Every file on the disk that git tracks or would track, without `.git` itself."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    names = sorted({name for name in listed.split("\0") if name})
    return [name for name in names if (root / name).is_file()]


def check_break(change: Break, copy: Copy, *, unbroken: PytestRun) -> Result:
    """What becomes of the break in this copy.

    Args:
        unbroken: what the break's tests say without it.
    """
    if (reason := change.stale(copy.folder)) is not None:
        return Result(broken=change, outcome=Outcome.STALE, detail=reason)
    if unbroken.status == 1:
        return Result(broken=change, outcome=Outcome.RED, detail=unbroken.first_failure)
    if unbroken.status != 0:
        detail = last_line(unbroken.output)
        return Result(broken=change, outcome=Outcome.UNUSABLE, detail=detail)
    started = time.perf_counter()
    with copy.broken(change):
        found = copy.run(change.tests)
    seconds = time.perf_counter() - started
    if found.status == 0:
        outcome, detail = Outcome.UNNOTICED, f"all tests pass: {' '.join(change.tests)}"
    elif found.status == 1 and found.first_failure:
        outcome, detail = Outcome.NOTICED, found.first_failure
    else:
        outcome, detail = Outcome.UNUSABLE, last_line(found.output)
    return Result(broken=change, outcome=outcome, detail=detail, seconds=seconds)


def check_breaks(
    breaks: Sequence[Break],
    *,
    jobs: int = 1,
    root: Path = ROOT,
    say: Callable[[str], None] = lambda _: None,
) -> list[Result]:
    """The results of all breaks, in their order. Every set of tests runs unbroken once before."""
    with ExitStack() as stack:
        copies: SimpleQueue[Copy] = SimpleQueue()
        for _ in range(jobs):
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="turnwise-broken-"))
            copies.put(Copy(Path(folder), root=root))

        def with_copy(function: Callable[[Copy, T], R], items: Iterable[T]) -> list[R]:
            def run(item: T) -> R:
                copy = copies.get()
                try:
                    return function(copy, item)
                finally:
                    copies.put(copy)

            with ThreadPoolExecutor(jobs) as pool:
                return list(pool.map(run, items))

        def check(copy: Copy, change: Break) -> Result:
            result = check_break(change, copy, unbroken=unbroken[change.tests])
            took = f"({result.seconds:.0f} s)"
            say(f"{result.outcome.value:12} {change.name}: {result.detail} {took}")
            return result

        sets = list(dict.fromkeys(change.tests for change in breaks))
        say(f"{len(sets)} sets of tests without a break")
        runs = with_copy(lambda copy, tests: copy.run(tests), sets)
        unbroken = dict(zip(sets, runs, strict=True))
        say(f"{len(breaks)} breaks")
        return with_copy(check, breaks)


def last_line(output: str) -> str:
    """The last line that says something."""
    return next((line.strip() for line in reversed(output.splitlines()) if line.strip()), "")


def markdown(results: Sequence[Result], *, seconds: float, jobs: int) -> str:
    """The results as a section of docs/invariants.md holds them, under the date of the run."""
    noticed = sum(result.outcome is Outcome.NOTICED for result in results)
    cores = len(os.sched_getaffinity(0))
    lines = [
        f"{date.today().isoformat()}: {noticed} of {len(results)} breaks were noticed, in "
        f"{seconds:.0f} s on {cores} CPU cores with `--jobs {jobs}`.",
        "",
        "| Break | Invariant | What is broken | Noticed by |",
        "|---|---|---|---|",
    ]
    for result in sorted(results, key=lambda result: result.broken.invariant):
        seen = result.outcome is Outcome.NOTICED
        where = f"`{result.detail}`" if seen else f"**{result.outcome.value}**"
        change = result.broken
        cells = (f"`{change.name}`", str(change.invariant), change.what, where)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0 where every break was noticed, else 1."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="breaks to run; all without one")
    parser.add_argument("--list", action="store_true", help="names the breaks and runs nothing")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="breaks at once (1)")
    parser.add_argument("--markdown", action="store_true", help="prints the table for the docs")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.names) - {change.name for change in BREAKS})
    if unknown:
        parser.error(f"no break is named {', '.join(unknown)}; --list shows their names")
    if options.jobs < 1:
        parser.error(f"--jobs is at least 1, got {options.jobs}")
    breaks = [change for change in BREAKS if not options.names or change.name in options.names]
    if options.list:
        for change in breaks:
            print(f"{change.invariant:2}  {change.name:24} {change.what}")
        return 0

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    started = time.perf_counter()
    results = check_breaks(breaks, jobs=options.jobs, say=say)
    seconds = time.perf_counter() - started
    if options.markdown:
        print(markdown(results, seconds=seconds, jobs=options.jobs))
    missed = [result for result in results if result.outcome is not Outcome.NOTICED]
    for result in missed:
        say(f"{result.broken.name}: {result.outcome.value}. {result.detail}")
    say(f"{len(results) - len(missed)} of {len(results)} breaks noticed in {seconds:.0f} s")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
