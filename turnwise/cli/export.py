"""`turnwise export RUN`: writes a run's episodes as JSONL, Parquet, a data set, or for
fine-tuning."""

from pathlib import Path
from typing import Annotated, cast, get_args

import typer

from turnwise.cli.args import fail, told_shortly

SUFFIX = {"jsonl": ".jsonl", "parquet": ".parquet", "hf": "_dataset", "sft": "_sft.jsonl"}


def register(app: typer.Typer) -> None:
    app.command("export", epilog="Example: turnwise export runs/NAME --format parquet --per turn")(
        export
    )


def export(
    run: Annotated[Path, typer.Argument(help="A run directory, such as runs/NAME.", metavar="RUN")],
    format: Annotated[
        str,
        typer.Option(help="jsonl, parquet, hf (datasets.load_from_disk) or sft (successes)."),
    ] = "jsonl",
    out: Annotated[
        Path | None, typer.Option(help="Where to write. Default: episodes.* in the run directory.")
    ] = None,
    per: Annotated[str, typer.Option(help="A row per episode or per turn (with token ids).")] = (
        "episode"
    ),
    split: Annotated[str, typer.Option(help="train, or val: the evaluations.")] = "train",
    step: Annotated[list[int] | None, typer.Option(help="Only these steps.")] = None,
    min_reward: Annotated[
        float | None, typer.Option(help="Only episodes with at least this reward.")
    ] = None,
) -> None:
    """Write a run's episodes as a table: reward, its parts, success, turns and tokens."""
    from turnwise.log.export import ExportError, Format, Per, export_run
    from turnwise.log.records import RunDirectoryError
    from turnwise.log.store import RunReader

    for name, value, known in (
        ("--format", format, get_args(Format)),
        ("--per", per, get_args(Per)),
        ("--split", split, ("train", "val")),
    ):
        if value not in known:
            fail(f"{name} is one of {', '.join(known)}, got {value!r}")
    if format == "sft" and per != "episode":
        fail("--format sft writes whole conversations; leave --per out")
    path = out or run / f"episodes{SUFFIX[format]}"
    with told_shortly((ExportError, RunDirectoryError, OSError)):
        count = export_run(
            RunReader(run),
            path,
            format=cast(Format, format),
            per=cast(Per, per),
            split="step" if split == "train" else "eval",
            steps=step,
            min_reward=min_reward,
        )
    print(f"{count} rows in {path}")
