"""`turnwise inspect`: a local page that follows a run and opens old ones."""

import os
import re
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from turnwise.cli.args import fail, told_shortly
from turnwise.cli.serving import serve_until_stopped
from turnwise.config import Config

if TYPE_CHECKING:
    from turnwise.evaluate.evaluation import PolicyPlayer


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
    env: Annotated[
        list[str] | None,
        typer.Option(help="An environment of your own to play, as FILE.py:Class; may be repeated."),
    ] = None,
    export: Annotated[
        Path | None, typer.Option(help="Write the run's page into this file, and stop.")
    ] = None,
    compare: Annotated[
        list[Path] | None, typer.Option(help="With --export: compare with this run.")
    ] = None,
    episode: Annotated[
        str | None,
        typer.Option(help="With --export: this episode alone.", metavar="SPLIT/STEP/ROW"),
    ] = None,
) -> None:
    """Show runs in the browser: curves, episodes token by token, comparisons, and games to play.

    It follows runs that go on. The environment variable TURNWISE_TOKEN is the token that the page
    needs; beyond this machine one is made if it is not set.
    """
    if export is not None:
        _export(export, runs or [], compare or [], episode)
        return
    if compare or episode:
        fail("--compare and --episode belong to --export FILE.html")
    _serve(runs or [Path("runs")], host=host, port=port, browse=not no_open, envs=env or [])


def _export(file: Path, runs: list[Path], others: list[Path], episode: str | None) -> None:
    from turnwise.inspect.export import Chosen, export_comparison, export_run, open_run
    from turnwise.inspect.folder import InspectError

    if len(runs) != 1:
        fail("--export takes one run, as in `turnwise inspect --export run.html runs/NAME`")
    if others and episode:
        fail("an export is a comparison or an episode, not both")
    with told_shortly((InspectError, OSError)):
        if others:
            for run in (*runs, *others):
                open_run(run)
            page = export_comparison([*runs, *others])
        else:
            page = export_run(open_run(runs[0]), Chosen(one=_episode(episode)))
        file.write_text(page, encoding="utf-8")
    print(file)


def _episode(text: str | None) -> tuple[str, int, int] | None:
    if text is None:
        return None
    match = re.fullmatch(r"(step|eval)/([0-9]{1,18})/([0-9]{1,18})", text, re.ASCII)
    if match is None:
        fail(f"an episode is SPLIT/STEP/ROW, such as step/12/0 or eval/50/3, got {text!r}")
    return match[1], int(match[2]), int(match[3])


def _serve(roots: list[Path], *, host: str, port: int, browse: bool, envs: list[str]) -> None:
    from turnwise.inspect.server import InspectServer
    from turnwise.serve.http import is_loopback

    for root in roots:
        if not root.is_dir():
            fail(f"there is no folder {root}; give a run directory or a folder of runs")
    token = os.environ.get("TURNWISE_TOKEN") or None
    if token is None and not is_loopback(host):
        token = secrets.token_urlsafe(24)
    try:
        server = InspectServer(
            roots, host=host, port=port, token=token, envs=envs, load_policy=_policy
        )
    except OSError as error:
        fail(f"cannot listen on {host}:{port}: {error}; choose another --port")
    url = f"{server.url}/" + (f"?token={token}" if token else "")

    def started() -> None:
        print(f"inspecting {', '.join(map(str, roots))} at {url}", flush=True)
        if browse:
            _open(url)

    serve_until_stopped(server, started)


def _policy(config: Config, run: Path, name: str) -> "PolicyPlayer":
    """The policy of a run's last checkpoint."""
    from turnwise.train.load_policy import load_policy

    return load_policy(config, run=run, name=name)


def _open(url: str) -> None:
    """Opens the page where there is a desktop; a browser in the terminal would take it over."""
    import webbrowser

    desktop = sys.platform in ("darwin", "win32")
    if desktop or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
        webbrowser.open(url)
