"""`turnwise report RUN`: rewrites the report, with the episodes of the given steps."""

from pathlib import Path
from typing import Annotated

import typer

from turnwise.cli.args import told_shortly


def register(app: typer.Typer) -> None:
    app.command("report", epilog="Example: turnwise report runs/NAME --step 12 --episodes 20")(
        report
    )


def report(
    run: Annotated[Path, typer.Argument(help="A run directory, such as runs/NAME.", metavar="RUN")],
    step: Annotated[
        list[int] | None, typer.Option(help="Show the episodes of this step; may be repeated.")
    ] = None,
    episodes: Annotated[int, typer.Option(help="Episodes per step.", min=1)] = 6,
) -> None:
    """Rewrite report.html, also of a run that is still running or was interrupted."""
    from turnwise.inspect.report import write_report
    from turnwise.log.records import RunDirectoryError
    from turnwise.log.store import RunReader

    with told_shortly((RunDirectoryError, OSError)):
        reader = RunReader(run)
        unknown = [one for one in step or () if one not in reader.steps()]
        if unknown:
            known = reader.steps()
            raise RunDirectoryError(
                f"{run} has no stored episodes of step {unknown[0]}; it has "
                + (f"{known[0]} to {known[-1]}" if known else "none (log.episodes_every)")
            )
        print(write_report(reader, episodes=episodes, steps=step))
