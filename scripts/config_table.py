"""Rewrites the table of keys in docs/configuration.md from the schema. With --check: says whether
it is current."""

import argparse
from pathlib import Path

from turnwise.cli.config import default_text
from turnwise.config.tree import iter_fields, section_of

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"
BEGIN, END = "<!-- keys: begin -->\n", "<!-- keys: end -->\n"


def table() -> str:
    """The schema's keys as Markdown, one table per top-level section."""
    lines: list[str] = []
    open_section = None
    for path, field in iter_fields():
        section = path.partition(".")[0] if "." in path or section_of(field) else ""
        if section != open_section:
            title = f"`{section}`" if section else "Top level"
            lines += ["", f"### {title}", "", "| Key | Default | Meaning |", "|---|---|---|"]
            open_section = section
        if section_of(field) is None:
            meaning = (
                " ".join((field.description or "").split()).replace("|", "\\|").replace("<", "&lt;")
            )
            default = default_text(path).replace("|", "\\|")
            lines.append(f"| `{path}` | `{default}` | {meaning} |")
    return "\n".join(lines).lstrip("\n") + "\n"


def rewritten(page: str) -> str:
    """The page with a current table."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{table()}\n{END}{tail}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    current = PAGE.read_text(encoding="utf-8")
    if parser.parse_args().check:
        raise SystemExit(
            0 if rewritten(current) == current else "docs/configuration.md is not current"
        )
    PAGE.write_text(rewritten(current), encoding="utf-8")
