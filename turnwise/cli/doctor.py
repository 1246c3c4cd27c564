"""`turnwise doctor RUN` diagnoses a run; `turnwise doctor --machine` says what this machine can
run."""

from pathlib import Path
from typing import Annotated

import typer

from turnwise.cli.args import fail


def register(app: typer.Typer) -> None:
    app.command("doctor", epilog="Example: turnwise doctor runs/NAME")(doctor)


def doctor(
    run: Annotated[Path | None, typer.Argument(help="A run directory.")] = None,
    machine: Annotated[
        bool, typer.Option("--machine", help="Say what this machine can run.")
    ] = False,
) -> None:
    """Diagnose a run (exit status 1 if there is a problem), or this machine."""
    if machine == (run is not None):
        fail("give a run directory, or --machine")
    if run is None:
        from turnwise.log.machine import describe, look_around

        print("\n".join(describe(look_around())))
        return
    from turnwise.log.doctor import CHECKS, diagnose, read_chart
    from turnwise.log.records import RunDirectoryError
    from turnwise.log.store import RunReader

    try:
        chart = read_chart(RunReader(run))
    except RunDirectoryError as error:
        fail(str(error))
    found = diagnose(chart)
    for diagnosis in found:
        print(diagnosis)
    count = sum(diagnosis.severity != "note" for diagnosis in found)
    print(f"{run}: {chart.steps} steps, {len(CHECKS)} checks, {count or 'nothing'} to look at")
    if any(diagnosis.severity == "problem" for diagnosis in found):
        raise typer.Exit(1)
