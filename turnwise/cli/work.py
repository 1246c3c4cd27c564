"""turnwise work: runs an agent's program for a training run elsewhere."""

import os
import signal
import sys
from typing import Annotated

import typer

from turnwise.cli.args import fail


def register(app: typer.Typer) -> None:
    app.command("work", epilog="Example: turnwise work http://trainer:8800 agent:solve.py:solve")(
        work
    )


def work(
    url: Annotated[str, typer.Argument(help="The endpoint of the training run.")],
    program: Annotated[
        str, typer.Argument(help="agent:FILE.py:FUNCTION, or 'command:COMMAND LINE'.")
    ],
    slots: Annotated[int, typer.Option(help="Programs that run at once.", min=1)] = 16,
) -> None:
    """Run an agent's program for a run that trains with env.options.workers=elsewhere.

    Tasks come from the run's endpoint, and rewards go back to it. Ends with the run. The
    environment variable TURNWISE_TOKEN is the token that both share.
    """
    from turnwise.endpoint.worker import COMMAND, ELSEWHERE, TOKEN, Worker
    from turnwise.envs.gate import raised_at
    from turnwise.user_code import UnknownNameError, load_object

    kind, rest = read_program(program)
    token = os.environ.get(TOKEN)
    if not token:
        fail(f"set {TOKEN} to the token of the run")
    if kind == "agent":
        try:
            load_object(rest)
        except UnknownNameError as error:
            fail(str(error))
        except Exception as error:  # the user's code, while it is imported
            fail(f"{rest} cannot be loaded: {raised_at(error)}")
    name = rest if kind == "agent" else COMMAND + rest
    worker = Worker(url, ELSEWHERE, token, name, slots=slots)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    print(f"working for {url}, {slots} at once", flush=True)
    try:
        worker.run()
    except KeyboardInterrupt:
        worker.stop()
    if worker.refused:
        print(f"error: {worker.ended}", file=sys.stderr)
        raise SystemExit(1)
    print(worker.ended or "stopped")


def read_program(program: str) -> tuple[str, str]:
    """(agent or command, what follows); ends the command if it is neither."""
    kind, _, rest = program.partition(":")
    if kind not in ("agent", "command") or not rest:
        fail(f"PROGRAM is agent:FILE.py:FUNCTION or command:COMMAND LINE, got {program!r}")
    return kind, rest
