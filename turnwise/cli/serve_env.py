"""`turnwise serve-env NAME`: serves an environment to rollouts on other machines."""

import os
from typing import Annotated

import typer

from turnwise.cli.args import TAKES_OVERRIDES, fail, overrides_from
from turnwise.cli.serving import serve_until_stopped


def register(app: typer.Typer) -> None:
    app.command(
        "serve-env",
        context_settings=TAKES_OVERRIDES,
        epilog="Example: turnwise serve-env frozen_lake --port 8765",
    )(serve_env)


def serve_env(
    ctx: typer.Context,
    name: Annotated[
        str, typer.Argument(help="A name of `turnwise envs`, module:Class or file.py:Class.")
    ],
    port: Annotated[int, typer.Option(help="0: any free port.", min=0, max=65535)] = 8765,
    host: Annotated[
        str, typer.Option(help="An address reachable from other machines needs a token.")
    ] = "127.0.0.1",
    max_sessions: Annotated[
        int, typer.Option(help="Episodes at once; further clients wait.", min=1)
    ] = 64,
    idle_timeout: Annotated[
        float, typer.Option(help="Seconds without a call or heartbeat that end a session.")
    ] = 60.0,
) -> None:
    """Serve an environment over HTTP. Clients name it by its url, as in --env.name
    http://HOST:8765.

    Settings may follow, such as --env.options.size 3 or --rollout.isolation process. The
    environment variable TURNWISE_TOKEN is the token that server and clients share.
    """
    from turnwise.config import load_config
    from turnwise.serve.server import EnvServer

    if idle_timeout <= 0:
        fail(f"--idle-timeout must be above 0, got {idle_timeout:g}")
    config = load_config({"env": {"name": name}}, overrides_from(ctx.args))
    try:
        server = EnvServer(
            config.env,
            config.rollout,
            host=host,
            port=port,
            token=os.environ.get("TURNWISE_TOKEN"),
            max_sessions=max_sessions,
            idle_timeout=idle_timeout,
        )
    except (ImportError, ValueError) as error:
        fail(str(error))
    except OSError as error:
        fail(f"cannot listen on {host}:{port}: {error}; choose another --port")
    held = server.sessions.max_sessions
    why = "" if held == max_sessions else ": the limit of its workers"
    said = f"serving {name} at {server.url} (at most {held} sessions{why})"
    serve_until_stopped(server, lambda: print(said, flush=True))
