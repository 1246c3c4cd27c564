"""`turnwise watch RUN`: the live view of a run, from its directory."""

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Generator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from turnwise.cli.args import fail

if TYPE_CHECKING:
    from turnwise.log.terminal.follow import Follower
    from turnwise.log.terminal.live import Dashboard
    from turnwise.log.terminal.screen import Screen
    from turnwise.log.terminal.view import RunView

LOOK_SECONDS = 0.5
"""Between two looks at the run directory."""
KEYS = "q quits, space pauses, left and right go through the turns"
ARROWS = {b"\x1b[D": -1, b"\x1b[C": 1, b"\x1bOD": -1, b"\x1bOC": 1}


def register(app: typer.Typer) -> None:
    app.command("watch", epilog="Example: turnwise watch runs/NAME")(watch)


def watch(
    run: Annotated[Path, typer.Argument(help="A run directory, such as runs/NAME.", metavar="RUN")],
    once: Annotated[bool, typer.Option("--once", help="Print the view once.")] = False,
    stay: Annotated[
        bool, typer.Option("--stay", help="Stay until q, also when the run is over.")
    ] = False,
) -> None:
    """Watch a run: curves, an episode that plays, time left. Into a pipe, a line per step."""
    from turnwise.log.records import RunDirectoryError
    from turnwise.log.store import RunReader
    from turnwise.log.terminal.follow import Follower
    from turnwise.log.terminal.screen import can_draw

    if not (run / "config.yaml").is_file() and (found := _newest_run(run)) is not None:
        fail(f"{run} is not a run directory, but holds some; the newest is {found}")
    try:
        follower = Follower(RunReader(run))
        follower.look()
    except RunDirectoryError as error:
        fail(str(error))
    if once:
        _print_frame(follower)
    elif can_draw(sys.stdout):
        _draw(follower, stay=stay)
    elif stay:
        fail("--stay needs a terminal; without one, a line is printed for each step")
    else:
        with contextlib.suppress(KeyboardInterrupt):
            _print_steps(follower)


def _newest_run(folder: Path) -> Path | None:
    runs = [path.parent for path in folder.glob("*/config.yaml")]
    return max(runs, key=lambda path: path.stat().st_mtime, default=None)


def _print_frame(follower: "Follower") -> None:
    """Prints the view as it is, in the colours of the terminal if it is one."""
    import shutil

    from turnwise.log.terminal.screen import Ink

    ink = Ink(sys.stdout)
    width, height = shutil.get_terminal_size((80, 24))
    lines = _dashboard(follower).lines(
        (width, max(height - 1, 1)), ink.glyphs, now=time.time(), final=True
    )
    with _until_closed():
        print("\n".join(ink.lines(lines)))


def _print_steps(follower: "Follower") -> None:
    """Prints a line per step until the run is over; on standard error, what was skipped."""
    from turnwise.log.terminal.text import one_line

    printed, seen = 0, 0
    skipped: set[str] = set()
    with _until_closed():
        while True:
            view = follower.view
            over = view.state != "running"
            # The times of a step are written after its metrics: they are there one look later.
            for step in range(printed + 1, (view.done if over else min(seen, view.done)) + 1):
                if line := _line(view, step):
                    print(line, flush=True)
                printed = step
            seen = view.done
            for problem in view.skipped:
                if problem not in skipped:
                    print(f"skipped {one_line(problem)}", file=sys.stderr, flush=True)
            skipped |= set(view.skipped)
            if over:
                return
            time.sleep(LOOK_SECONDS)
            follower.look()
            printed = min(printed, follower.view.done)  # a resume played steps again


def _line(view: "RunView", step: int) -> str | None:
    from turnwise.log.events import StepDone
    from turnwise.log.words import step_line

    metrics = {name: values[step] for name, values in view.curves.items() if step in values}
    if not any(name.startswith("rollout/") for name in metrics):
        return None
    return step_line(StepDone(step=step, metrics=metrics), total=view.total)


def _draw(follower: "Follower", *, stay: bool) -> None:
    """Draws until the run is over or the user quits, then prints the last frame to stay."""
    from turnwise.log.terminal.live import FRAME_SECONDS
    from turnwise.log.terminal.screen import Screen

    if follower.view.state == "running" or stay:
        screen = Screen(sys.stdout)
        dashboard = _dashboard(follower)
        dashboard.footer = KEYS if sys.stdin.isatty() else "Ctrl-C quits"
        with _taken(screen):
            looked = time.monotonic()
            while True:
                screen.draw(dashboard.lines(screen.size, screen.glyphs, now=time.time()))
                if not _keys(dashboard, seconds=FRAME_SECONDS):
                    break
                if time.monotonic() - looked >= LOOK_SECONDS:
                    follower.look()
                    _offer(follower, dashboard)
                    looked = time.monotonic()
                if follower.view.state != "running" and not stay:
                    break
    _print_frame(follower)


def _dashboard(follower: "Follower") -> "Dashboard":
    from turnwise.log.terminal.live import Dashboard

    dashboard = Dashboard(follower.view, footer=_next(follower.view))
    _offer(follower, dashboard)
    return dashboard


def _offer(follower: "Follower", dashboard: "Dashboard") -> None:
    dashboard.view = follower.view
    if follower.episode is not None:
        episode, step = follower.episode
        dashboard.playback.offer(episode, step=step)


def _next(view: "RunView") -> str:
    """The command to suggest for a run in this state."""
    if view.state in ("stopped", "interrupted"):
        return f"go on with: turnwise train --resume {view.path}"
    return "" if view.state == "running" else f"more: turnwise report {view.path}"


def _keys(dashboard: "Dashboard", *, seconds: float) -> bool:
    """Waits for keys and obeys them; False to leave."""
    if not sys.stdin.isatty():
        time.sleep(seconds)
        return True
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        if not select.select([sys.stdin], [], [], left)[0]:
            return True
        pressed = os.read(sys.stdin.fileno(), 1024)
        if not pressed or any(key in pressed.lower() for key in (b"q", b"\x03", b"\x04")):
            return False
        if pressed.count(b" ") % 2:
            dashboard.playback.paused = not dashboard.playback.paused
        # A key that is held down arrives several times at once.
        if any(arrow in pressed for arrow in ARROWS):
            turns = sum(pressed.count(arrow) * turn for arrow, turn in ARROWS.items())
            dashboard.playback.turn_by(turns)
            return True
    return True


@contextlib.contextmanager
def _taken(screen: "Screen") -> Generator[None]:
    """The screen and the keys, given back however the block ends."""
    import termios
    import tty

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    keys = sys.stdin.fileno() if sys.stdin.isatty() else None
    settings = None if keys is None else termios.tcgetattr(keys)
    try:
        if keys is not None:
            tty.setcbreak(keys, termios.TCSADRAIN)
        screen.open()
        with contextlib.suppress(KeyboardInterrupt):
            yield
    finally:
        screen.close()
        if keys is not None and settings is not None:
            termios.tcsetattr(keys, termios.TCSADRAIN, settings)
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _until_closed() -> Generator[None]:
    """Ends the command silently when its output is closed, as after `| head`."""
    try:
        yield
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the exit flushes it
