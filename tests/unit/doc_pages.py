"""The pages of the documentation, their blocks of code, and the mark above each block.

| mark | the block |
|---|---|
| `<!-- test -->` | is run by test_docs.py, in a folder of its own |
| `<!-- test slow -->` | is run by `make test-slow` |
| `<!-- test continues -->` | is run after the block above it: same folder, same Python names |
| `<!-- test small -->` | is run with what it names (DIR, runs/NAME, mine.yaml) made by |
| | doc_stage.py, runs of a step, servers that are stopped (doc_small.py), and installations |
| | that are thrown away (doc_install.py); so are `test continues small` and `test slow small`; |
| | with a config, a run is trained; where a program or the index is missing, the test skips |
| `<!-- first hour -->` | is run by tests/first_hour (the tutorial alone) |
| `<!-- run by tests/FILE.py -->` | is run by that test |
| `<!-- not run: REASON -->` | is only checked: commands and settings exist, Python compiles |
"""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
LANGUAGES = ("bash", "python", "yaml", "toml", "json", "text")
MARK = re.compile(
    r"<!-- (?:(?P<test>test(?: slow| continues)?)(?P<small> small)?"
    r"|(?P<hour>first hour(?:: Ctrl-C)?)"
    r"|run by (?P<runner>tests/[\w/]+\.py)|not run: (?P<reason>\S.*)) -->"
)
FENCE = re.compile(r"^( *)```(\w*)$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A block of code of a page."""

    page: Path
    line: int
    """Of its first line of code, from 1."""
    language: str
    code: str
    mark: re.Match[str] | None

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line - 1}"

    @property
    def test(self) -> str:
        """test, test slow or test continues; empty for a block that test_docs.py does not run."""
        return (self.mark["test"] or "") if self.mark else ""

    @property
    def small(self) -> bool:
        return bool(self.mark and self.mark["small"])


def blocks_of(page: Path) -> list[Block]:
    """The fenced blocks of a page, in their order.

    Raises:
        ValueError: a block has no end.
    """
    found: list[Block] = []
    lines = page.read_text(encoding="utf-8").splitlines()
    number = 0
    while number < len(lines):
        fence = FENCE.match(lines[number])
        if fence is None:
            number += 1
            continue
        above = lines[number - 1].strip() if number else ""
        start, indent = number + 1, len(fence[1])
        try:
            number = lines.index(f"{fence[1]}```", start)
        except ValueError:
            raise ValueError(f"{page}:{start}: the block has no end") from None
        code = "".join(f"{line[indent:]}\n" for line in lines[start:number])
        mark = MARK.fullmatch(above)
        found.append(Block(page=page, line=start + 1, language=fence[2], code=code, mark=mark))
        number += 1
    return found


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def sequences() -> list[list[Block]]:
    """Blocks that are run, each with those that continue it.

    Raises:
        ValueError: a block continues nothing.
    """
    found: list[list[Block]] = []
    for block in BLOCKS:
        if block.test == "test continues":
            if not found or found[-1][0].page != block.page:
                raise ValueError(f"{block.name} continues no block of its page that is run")
            found[-1].append(block)
        elif block.test:
            found.append([block])
    return found
