"""The documentation site: it builds without warnings, its links and anchors lead somewhere, it
fetches nothing from a network, and the reference has every public name."""

import os
import subprocess
import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import turnwise
from turnwise import trainers

ROOT = Path(__file__).parents[2]
FETCHED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "object": "data"}
"""Attributes that a browser follows by itself. Of links, see `Page`."""
WITHOUT_ENTRY = {
    "__version__",  # a string
    "CustomRayPPOTrainer",  # made where verl is installed; create_trainer is documented
    "Environment",  # another name of MultiTurnEnv
    "MultiTurnMixin",  # a base class of VerifiersGRPOTrainer
}
"""Public names without an entry of their own."""
DOCUMENTED = {"Env", "RunResult", "EvalResult", "Session", "VerifiersGRPOConfig", "BadActionError"}
"""Names that the guides mention and `turnwise` does not export."""


@dataclass
class Page(HTMLParser):
    """What a page of the site links to, fetches, and can be linked to."""

    links: set[str] = field(default_factory=set[str])
    fetched: set[str] = field(default_factory=set[str])
    ids: set[str] = field(default_factory=set[str])
    sections: set[str] = field(default_factory=set[str])
    """The ids of second-level headings."""

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if "id" in given:
            self.ids.add(given["id"])
        if tag == "h2":
            self.sections.add(given.get("id", ""))
        if tag == "a" and "href" in given:
            self.links.add(given["href"])
        if tag == "link" and given.get("rel") not in ("canonical", "next", "prev"):
            self.fetched.add(given["href"])
        if tag in FETCHED and FETCHED[tag] in given:
            self.fetched.add(given[FETCHED[tag]])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built with warnings as errors."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    found: dict[Path, Page] = {}
    for path in sorted(site.rglob("*.html")):
        found[path] = Page()
        found[path].feed(path.read_text(encoding="utf-8"))
    return found


def is_elsewhere(link: str) -> bool:
    return bool(urlsplit(link).scheme or urlsplit(link).netloc)


def test_every_page_is_there(pages: dict[Path, Page], site: Path) -> None:
    written = {
        path.relative_to(ROOT / "docs").with_suffix("") for path in ROOT.glob("docs/**/*.md")
    }
    built = {path.relative_to(site).with_suffix("") for path in pages}
    assert written <= built
    assert (site / "search/search_index.json").is_file()


def test_links_and_anchors_lead_somewhere(pages: dict[Path, Page], site: Path) -> None:
    for path, page in pages.items():
        for link in page.links | page.fetched:
            if is_elsewhere(link) or path.name == "404.html":  # whose links are absolute
                continue
            parts = urlsplit(link)
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            assert target.is_file(), f"{path.relative_to(site)} links to {link}"
            if parts.fragment and target in pages:
                ids = pages[target].ids | {"__top"}
                assert unquote(parts.fragment) in ids, f"{path.relative_to(site)} links to {link}"


def test_nothing_is_fetched_from_a_network(pages: dict[Path, Page], site: Path) -> None:
    for path, page in pages.items():
        elsewhere = {link for link in page.fetched if is_elsewhere(link)}
        assert not elsewhere, f"{path.relative_to(site)} fetches {elsewhere}"
    for sheet in site.rglob("*.css"):
        text = sheet.read_text(encoding="utf-8")
        assert "url(http" not in text, sheet
        assert "@import" not in text, sheet


def test_the_reference_has_every_public_name(pages: dict[Path, Page], site: Path) -> None:
    entries = {
        name.rpartition(".")[2]
        for path, page in pages.items()
        if path.is_relative_to(site / "api")
        for name in page.sections
        if name.startswith("turnwise.")
    }
    public = set(turnwise.__all__) | set(dir(trainers)) | DOCUMENTED
    assert public - WITHOUT_ENTRY <= entries, sorted(public - WITHOUT_ENTRY - entries)


def test_code_in_tables_is_shown_as_it_is_written(site: Path) -> None:
    """`\\|` in a table is GitHub's way to write a pipe."""
    text = (site / "environments.html").read_text(encoding="utf-8")
    assert "<code>||</code>" in text
    assert "\\|" not in text


def test_examples_in_docstrings_are_code(site: Path) -> None:
    text = (site / "api/environments.html").read_text(encoding="utf-8")
    assert 'class="gp">&gt;&gt;&gt; ' in text  # a prompt, highlighted
    assert "<blockquote>" not in text
