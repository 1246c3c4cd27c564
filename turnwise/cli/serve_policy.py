"""`turnwise serve-policy PROGRAM`: trains a policy for programs that run on other machines."""

import os
from typing import Annotated

import typer

from turnwise.cli.args import TAKES_OVERRIDES, fail
from turnwise.cli.work import read_program


def register(app: typer.Typer) -> None:
    app.command(
        "serve-policy",
        context_settings=TAKES_OVERRIDES,
        options_metavar="PROGRAM [RECIPE] [KEY=VALUE]... [OPTIONS]",
        epilog="Example: turnwise serve-policy agent:solve.py:solve --listen 0.0.0.0:8800",
    )(serve_policy)


def serve_policy(
    ctx: typer.Context,
    program: Annotated[
        str, typer.Argument(help="agent:FILE.py:FUNCTION, or 'command:COMMAND LINE'.")
    ],
    listen: Annotated[
        str, typer.Option(help="HOST:PORT that the workers connect to.")
    ] = "127.0.0.1:8800",
) -> None:
    """Train a policy and serve it to programs elsewhere: `turnwise work` runs them.

    It is `turnwise train` with env.name=PROGRAM, env.options.workers=elsewhere and
    env.options.listen=HOST:PORT. TURNWISE_TOKEN is the token that run and workers share.
    """
    from turnwise.cli.main import main
    from turnwise.endpoint.worker import TOKEN

    read_program(program)
    if not os.environ.get(TOKEN):
        fail(f"set {TOKEN} to a token that the workers know, too")
    settings = (f"env.name={program}", f"env.options.listen={listen}")
    main(["train", *ctx.args, *settings, "env.options.workers=elsewhere"])
