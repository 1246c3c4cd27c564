"""Shared by trl_own_tests.py and verl_own_tests.py, which run the own tests of another project with
and without turnwise: a line for each test, and the report of what differs."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

Outcomes = dict[str, str]


def write_outcome(path: str, report: Any) -> None:
    """Appends one line for each test: its call, or where it failed or was skipped before. For
    pytest_runtest_logreport."""
    if report.when == "call" or report.outcome != "passed":
        write_line(path, report.nodeid, report.outcome)


def write_line(path: str, test: str, outcome: str) -> None:
    with open(path, "a") as file:
        file.write(json.dumps([test, outcome]) + "\n")


def read_outcomes(path: Path) -> Outcomes:
    return dict(json.loads(line) for line in path.read_text().splitlines())


def print_report(
    before: tuple[str, Outcomes], after: tuple[str, Outcomes], *, show: bool = False
) -> int:
    """Prints the counts of both runs and every test whose outcome differs; `show`: also what fails
    in the first. Returns the exit status."""
    for name, found in (before, after):
        counts = Counter(found.values())
        print(f"{name}: {', '.join(f'{count} {what}' for what, count in counts.most_common())}")
    (first, theirs), (second, ours) = before, after
    if show:
        for test, outcome in theirs.items():
            if outcome == "failed":
                print(f"fails with {first}: {test}")
    different = [test for test in theirs | ours if theirs.get(test) != ours.get(test)]
    for test in different:
        print(f"differs: {test}: {theirs.get(test)} with {first}, {ours.get(test)} with {second}")
    print(f"{len(different)} of {len(theirs | ours)} tests differ")
    return int(bool(different))
