"""scripts/break_invariants.py: no break is stale, and it tells a real break from a harmless one."""

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import break_invariants
from break_invariants import BREAKS, ROOT, Break, Outcome, check_breaks, markdown

REAL = next(change for change in BREAKS if change.name == "streams-collide")  # runs in two seconds


@pytest.mark.parametrize("change", BREAKS, ids=lambda change: change.name)
def test_a_break_fits_the_code_and_its_tests_exist(change: Break) -> None:
    assert change.stale(ROOT) is None
    assert change.new != change.old
    for test in change.tests:
        file, _, name = test.partition("::")
        assert (ROOT / file).is_file(), test
        assert not name or f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), test


def test_every_invariant_is_broken_and_the_docs_list_every_break() -> None:
    page = (ROOT / "docs" / "invariants.md").read_text(encoding="utf-8")
    names = [change.name for change in BREAKS]
    assert len(set(names)) == len(names)
    assert {change.invariant for change in BREAKS} == set(range(1, 13))
    listed = re.findall(r"^\| `([a-z0-9-]+)` \| \d+ \|", page, re.MULTILINE)
    assert sorted(listed) == sorted(names), "run scripts/break_invariants.py --markdown"


def test_a_break_is_noticed_a_comment_is_not_and_lost_text_is_stale() -> None:
    text = "import hashlib\n"
    harmless = replace(REAL, name="harmless", old=text, new=f"{text}# harmless\n")
    stale = replace(REAL, name="stale", old="this is in no file")
    moved = replace(REAL, name="moved", file="turnwise/no_such_file.py")
    results = check_breaks([REAL, harmless, stale, moved])
    assert [result.outcome for result in results] == [
        Outcome.NOTICED,
        Outcome.UNNOTICED,
        Outcome.STALE,
        Outcome.STALE,
    ]
    assert results[0].detail == "turnwise/seeding.py::turnwise.seeding.derive_seed"
    assert "occurs 0 times in turnwise/seeding.py" in results[2].detail
    rows = markdown(results, seconds=1.0, jobs=1).splitlines()[4:]
    assert "| **NOT noticed** |" in rows[1]


def test_tests_that_are_not_there_notice_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = replace(REAL, name="absent", tests=("turnwise/seeding.py::no_such_test",))
    monkeypatch.setattr(break_invariants, "BREAKS", (absent,))
    assert break_invariants.main(["--list"]) == 0
    assert "absent" in capsys.readouterr().out
    assert break_invariants.main([]) == 1
    assert "absent: the tests could not run" in capsys.readouterr().err
