"""`turnwise inspect`: a local page that follows a run and opens old ones."""

import os
import secrets
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from turnwise.cli.args import fail


def register(app: typer.Typer) -> None:
    app.command("inspect", epilog="Example: turnwise inspect runs/my-run")(inspect)


def inspect(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(help="Run directories, or folders of runs. Default: runs.", metavar="RUNS"),
    ] = None,
    host: Annotated[str, typer.Option(help="Beyond this machine a token is needed.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any that is free.", min=0, max=65535)] = 8300,
    no_open: Annotated[bool, typer.Option("--no-open", help="Do not open a browser.")] = False,
) -> None:
    """Show runs in the browser: curves, episodes token by token, comparisons, and games to play.

    It follows runs that go on. The environment variable TURNWISE_TOKEN is the token that the page
    needs; beyond this machine one is made if it is not set.
    """
    from turnwise.inspect.server import InspectServer
    from turnwise.serve.http import is_loopback

    roots = runs or [Path("runs")]
    for root in roots:
        if not root.is_dir():
            fail(f"there is no folder {root}; give a run directory or a folder of runs")
    token = os.environ.get("TURNWISE_TOKEN") or None
    if token is None and not is_loopback(host):
        token = secrets.token_urlsafe(24)
    try:
        server = InspectServer(roots, host=host, port=port, token=token)
    except OSError as error:
        fail(f"cannot listen on {host}:{port}: {error}; choose another --port")
    url = f"{server.url}/" + (f"?token={token}" if token else "")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with server:
            print(f"inspecting {', '.join(map(str, roots))} at {url}", flush=True)
            if not no_open:
                _open(url)
            server.wait()
    except KeyboardInterrupt:
        print("stopping")


def _open(url: str) -> None:
    """Opens the page where there is a desktop; a browser in the terminal would take it over."""
    import webbrowser

    desktop = sys.platform in ("darwin", "win32")
    if desktop or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
        webbrowser.open(url)
