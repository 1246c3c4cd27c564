"""What mkdocs cannot do by itself (a hook, named in mkdocs.yml).

- Files outside docs/ that pages link to (examples, CONTRIBUTING.md, CHANGELOG.md) become part of
  the site, so that a link that works in the repository works there too.
- A pipe inside code in a table is written `\\|`, as GitHub wants it; Python-Markdown would show the
  backslash.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Pages of the repository -> their place in the site."""
LINK = re.compile(r"(\]\()([^)#\s:]+)(#[^)\s]*)?(\))")
CODE_WITH_PIPE = re.compile(r"`[^`\n]*\\\|[^`\n]*`")


def on_files(files: Files, config: MkDocsConfig, **_: Any) -> Files:
    """The files of docs/ and those of the repository that pages link to."""
    for name, place in PAGES.items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / name)))
    linked = {
        target
        for page in files.documentation_pages()
        for target in outside(page.content_string, at=origin(page.src_uri))
        if (ROOT / target).is_file() and target not in PAGES
    }
    for target in sorted(linked):
        files.append(File.generated(config, target, abs_src_path=str(ROOT / target)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """The page with links that hold in the site, and pipes as Python-Markdown reads them."""
    here = page.file.src_uri
    if here == "index.md":  # it lists the pages itself
        page.meta["hide"] = ["navigation", "toc"]
    text = LINK.sub(lambda match: relinked(match, source=origin(here), here=here), markdown)
    lines = [
        CODE_WITH_PIPE.sub(lambda match: match[0].replace("\\|", "|"), line)
        if line.startswith("|")
        else line
        for line in text.split("\n")
    ]
    return "\n".join(lines)


def origin(src_uri: str) -> str:
    """Where a page of the site lies in the repository."""
    for name, place in PAGES.items():
        if src_uri == place:
            return name
    return f"docs/{src_uri}"


def outside(text: str, *, at: str) -> set[str]:
    """The files outside docs/ that a page of the repository links to."""
    targets = {resolved(match[2], at) for match in LINK.finditer(text)}
    return {target for target in targets if not target.startswith(("docs/", ".."))}


def resolved(target: str, source: str) -> str:
    """A link's target, from the repository's root."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), target))


def relinked(match: re.Match[str], *, source: str, here: str) -> str:
    """A link as it must be in the site. Targets that are not there stay, so that mkdocs reports
    them."""
    target = resolved(match[2], source)
    place = PAGES.get(target, target.removeprefix("docs/"))
    relative = posixpath.relpath(place, posixpath.dirname(here) or ".")
    return f"{match[1]}{relative}{match[3] or ''}{match[4]}"
