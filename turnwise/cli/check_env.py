"""`turnwise check-env NAME`: does an environment keep its contract?"""

from typing import Annotated

import typer

from turnwise.cli.args import TAKES_OVERRIDES, fail, overrides_from


def register(app: typer.Typer) -> None:
    app.command("check-env", context_settings=TAKES_OVERRIDES)(check_env)


def check_env(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help="A name of `turnwise envs`, module:Class or file.py:Class.")],
    seeds: Annotated[int, typer.Option(help="How many seeds to try.", min=1)] = 10,
) -> None:
    """Check an environment: determinism, finite rewards, legal ends. Exits with 1 where it breaks a rule.

    Settings of the environment may follow, such as --env.options.size 3.
    """
    from turnwise.config import load_config
    from turnwise.envs.check import check_env as check
    from turnwise.envs.registry import UnknownEnvError, find_env

    try:
        find_env(name)
    except UnknownEnvError as error:
        fail(str(error))
    config = load_config({"env": {"name": name}}, overrides_from(ctx.args)).env
    report = check(name, seeds=seeds, config=config)
    print(report)
    if not report.ok:
        raise typer.Exit(1)
