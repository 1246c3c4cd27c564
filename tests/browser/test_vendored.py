"""The libraries of the page are the files that VENDORED.md says, with their licences."""

import hashlib
import re
from pathlib import Path

import turnwise

PAGE = Path(turnwise.__file__).parent / "inspect" / "page"
VENDOR = PAGE / "vendor"
IMAGES = Path(__file__).parents[2] / "docs" / "images"
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (VENDOR / "VENDORED.md").read_text("utf-8").splitlines()
    if line.startswith("|") and not line.startswith(("| file", "|---"))
]


def test_every_library_is_listed_with_its_hash_and_licence() -> None:
    listed = {row[0]: row for row in ROWS}
    there = {path.name for path in VENDOR.iterdir() if path.suffix in (".js", ".css")}
    assert set(listed) == there
    for name, row in listed.items():
        assert hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() == row[5], name
        licences = re.findall(r"LICENSE-\w+", row[4])
        assert licences
        for licence in licences:
            assert "permission" in (VENDOR / licence).read_text("utf-8").lower()


def test_pictures_of_the_page_are_small() -> None:
    pictures = [*IMAGES.glob("*.png")]
    assert len(pictures) >= 8
    assert {path.name for path in pictures if path.stat().st_size > 150_000} == set()


def test_the_page_loads_nothing_from_elsewhere_and_writes_no_markup() -> None:
    for path in [*PAGE.glob("*.js"), *PAGE.glob("*.css"), *PAGE.glob("*.html")]:
        text = re.sub(r"<!--.*?-->", "", path.read_text("utf-8"), flags=re.DOTALL)
        assert not re.findall(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", text)
        assert not re.findall(r'(?:src|href|from|import\()\s*=?\s*"(?:https?:)?//', text), path
