"""A search tool over the user's own documents, by BM25."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from turnwise.envs.tools.bm25 import BM25Index

SUFFIXES = (".txt", ".md", ".rst")


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """A text with a title."""

    title: str
    text: str


def load_documents(
    path: str | Path, *, title_column: str = "title", text_column: str = "text"
) -> tuple[Document, ...]:
    """The documents of a JSON lines file (a title and a text each), or of a directory of .txt, .md
    and .rst files.

    Links that lead out of the directory are not followed.
    """
    root = Path(path).expanduser()
    if root.is_dir():
        inside = root.resolve()
        files = sorted(
            file for file in root.rglob("*") if file.suffix in SUFFIXES and file.is_file()
        )
        found = [
            Document(
                title=file.relative_to(root).as_posix(),
                text=file.read_text(encoding="utf-8", errors="replace"),
            )
            for file in files
            if file.resolve().is_relative_to(inside)
        ]
    elif root.is_file():
        found = [
            _document(line, number, root, title_column, text_column)
            for number, line in enumerate(root.read_text(encoding="utf-8").splitlines(), start=1)
            if line.strip()
        ]
    else:
        raise FileNotFoundError(
            f"no documents at {root}; give a JSON lines file or a directory of "
            f"{', '.join(SUFFIXES)}"
        )
    if not found:
        raise ValueError(f"a search needs documents, found none at {root}")
    return tuple(found)


def _document(line: str, number: int, path: Path, title_column: str, text_column: str) -> Document:
    try:
        row: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {number} is not JSON: {error}") from error
    fields = cast(dict[str, Any], row) if isinstance(row, dict) else {}
    if not isinstance(fields.get(text_column), str):
        raise ValueError(
            f"{path}, line {number}: a document has a text in column {text_column!r}; set "
            "text_column"
        )
    return Document(
        title=str(fields.get(title_column, f"document {number}")), text=fields[text_column]
    )


def make_search_tool(
    documents: Sequence[Document] | str | Path, *, limit: int = 5, snippet_chars: int = 500
) -> Callable[[str], str]:
    """A tool called `search` for ToolEnv: the best documents for a query, each with its beginning.

    Example:
        >>> pages = [Document(title="Otters", text="Otters swim and eat fish."),
        ...     Document(title="Owls", text="Fly.")]
        >>> make_search_tool(pages)("Which animals eat fish?")
        '[1] Otters\\nOtters swim and eat fish.'
    """
    found = load_documents(documents) if isinstance(documents, str | Path) else tuple(documents)
    if limit < 1 or snippet_chars < 1:
        raise ValueError(f"limit and snippet_chars are at least 1, got {limit} and {snippet_chars}")
    index = BM25Index([f"{document.title}\n{document.text}" for document in found])

    def search(query: str) -> str:
        """Searches the documents and returns the beginnings of those that fit best.

        Args:
            query: what to look for
        """
        hits = [found[number] for number, _ in index.search(query, limit=limit)]
        if not hits:
            return "Nothing found."
        return "\n\n".join(
            f"[{place}] {hit.title}\n{hit.text[:snippet_chars].strip()}"
            for place, hit in enumerate(hits, start=1)
        )

    return search
