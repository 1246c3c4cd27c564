"""`turnwise migrate FILE`: our config from another project's."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from turnwise.cli.args import TAKES_OVERRIDES, fail, split_source


def register(app: typer.Typer) -> None:
    app.command(
        "migrate",
        context_settings=TAKES_OVERRIDES,
        options_metavar="FILE [KEY=VALUE]... [OPTIONS]",
        epilog="Example: turnwise migrate config/_2_sokoban.yaml model_path=org/model -o mine.yaml",
    )(migrate_command)


def migrate_command(
    ctx: typer.Context,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write to this file. Default: print.")
    ] = None,
    leave_out: Annotated[
        bool,
        typer.Option("--leave-out", help="Write refused keys as comments instead of stopping."),
    ] = False,
) -> None:
    """Write our config from a file of RAGEN, align-anything or verl, or from a shell script with
    its overrides. Comments say which keys mean something else here, and which nothing."""
    from turnwise.config.migrate import migrate

    source, overrides = split_source(ctx.args)
    if source is None:
        fail("name the file: turnwise migrate FILE.yaml or SCRIPT.sh")
    if out is not None and out.exists():
        fail(f"{out} exists; give another name, or remove it first")
    text = migrate(source, overrides, leave_out=leave_out)
    if out is None:
        print(text, end="")
        return
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        fail(f"{out} cannot be written: {error.strerror}")
    print(f"wrote {out}; `turnwise train {out}` runs it", file=sys.stderr)
