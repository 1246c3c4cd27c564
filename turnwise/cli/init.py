"""`turnwise init KIND [NAME]`: writes a working environment with a test and configs."""

import re
import sys
from importlib.metadata import packages_distributions
from keyword import iskeyword
from pathlib import Path
from typing import Annotated

import typer

from turnwise.cli.args import fail

KINDS = ("game", "tools", "chat", "prompts", "project")


def register(app: typer.Typer) -> None:
    app.command("init")(init)


def init(
    kind: Annotated[
        str,
        typer.Argument(
            help="game (reset and step), tools, chat, prompts (a data set), or project (a game "
            "with parts of your own). Example: turnwise init tools shop",
            metavar="KIND",
        ),
    ],
    name: Annotated[
        str | None, typer.Argument(help="Its name, such as shop. Default: the kind.")
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option("--dir", help="Where to write. Default: here; a project: a folder NAME."),
    ] = None,
) -> None:
    """Write a working environment with a test, configs and a README line."""
    from turnwise.cli.templates import files, project_files

    if kind not in KINDS:
        fail(f"{kind!r} is not a kind of environment; kinds are {', '.join(KINDS)}")
    file = (name or ("lamp" if kind == "project" else f"my_{kind}")).replace("-", "_")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", file):
        fail(f"{name!r} must be a name in lower case, such as shop: it becomes a Python file")
    class_name = "".join(part.capitalize() for part in file.split("_"))
    if iskeyword(file) or iskeyword(class_name):
        fail(f"{file!r} is a word of Python's own, so no file can be imported by it; choose a name")
    if file in sys.stdlib_module_names or file in packages_distributions():
        fail(
            f"{file}.py would take the place of the Python module {file!r}, which other code "
            f"imports; choose another name, such as my_{file}"
        )
    if kind == "project":
        folder = folder or Path(file)
        found = project_files(file=file, name=class_name)
    else:
        folder = folder or Path()
        found = files(kind, file=file, name=class_name)
    taken = [path for path in found if (folder / path).exists() and path != "README.md"]
    if taken:
        fail(f"{folder / taken[0]} exists and is not overwritten; choose another NAME or --dir")
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in found.items():
        mode = "a" if path == "README.md" else "x"  # append to an existing README
        with (folder / path).open(mode, encoding="utf-8") as out:
            out.write(text)
        print(f"wrote {folder / path}")
    inside = "" if folder == Path() else f"cd {folder} && "
    print(
        f"\nnext: {inside}turnwise check-env {file}.py:{class_name}\n"
        f"      {inside}turnwise train {file}_small.yaml"
    )
