"""turnwise serve: a trained policy behind an OpenAI-compatible API."""

import os
from functools import partial
from typing import Annotated

import typer

from turnwise.cli.args import TAKES_OVERRIDES, fail, told_shortly
from turnwise.cli.serving import serve_until_stopped
from turnwise.cli.sources import read_source


def register(app: typer.Typer) -> None:
    app.command(
        "serve",
        context_settings=TAKES_OVERRIDES,
        options_metavar="[RUN|CHECKPOINT|MODEL|RECIPE|CONFIG.yaml] [KEY=VALUE]... [OPTIONS]",
        epilog="Example: turnwise serve runs/my-run --port 8000",
    )(serve)


def serve(
    ctx: typer.Context,
    port: Annotated[int, typer.Option(help="0: any that is free.", min=0, max=65535)] = 8000,
    host: Annotated[str, typer.Option(help="Beyond this machine a token is needed.")] = "127.0.0.1",
    trust: Annotated[bool, typer.Option("--trust", help="Load code that the run names.")] = False,
) -> None:
    """Serve the policy of a run, a checkpoint or a model at http://HOST:PORT/v1, for any program
    that speaks OpenAI's API: chat completions and responses, streamed or whole, with tools.

    Settings may follow, such as --rollout.max_response_tokens 256. The environment variable
    TURNWISE_TOKEN is the API key that clients need.
    """
    from turnwise.envs.base import EnvError
    from turnwise.procs.progress import Progress

    source = read_source(ctx.args, trust=trust)
    with Progress("loading libraries"):
        from turnwise.endpoint.policy import PolicyServer
        from turnwise.models.alternatives import likeliest
        from turnwise.rollout.proxy import sampling_for
        from turnwise.train.checkpoint import CheckpointError
        from turnwise.train.load_policy import load_policy
    with told_shortly((ValueError, EnvError, OSError), (CheckpointError,)):
        config = source.config
        policy = load_policy(config, run=source.run, model=source.model, name=source.name)
    tells = None if policy.model is None else partial(likeliest, policy.model)
    try:
        server = PolicyServer(
            policy.generator,
            policy.tokenizer,
            sampling_for(config.rollout, "val"),
            model=source.name,
            host=host,
            port=port,
            token=os.environ.get("TURNWISE_TOKEN"),
            likeliest=tells,
        )
    except ValueError as error:
        fail(str(error))
    except OSError as error:
        fail(f"cannot listen on {host}:{port}: {error}; choose another --port")
    serve_until_stopped(
        server, lambda: print(f"serving {source.name} at {server.url}/v1", flush=True)
    )
