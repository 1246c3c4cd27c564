"""`turnwise watch` and training in real terminals and pipes."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pty_parts import FRAME, OWN, RUN, Terminal, widest
from python_parts import SMALL
from run_fixtures import fill_step
from test_terminal import METRICS, a_run, hostile_episode

import turnwise
from turnwise.log.console import ConsoleSink
from turnwise.log.events import RunEnded, RunStarted, StepDone
from turnwise.log.store import RunDirectory
from turnwise.log.terminal.screen import CLOSE, OPEN
from turnwise.train import run as runs

COLOUR = re.compile(rb"\x1b\[(?:[0-9]+;)*(?:3[0-7]|9[0-7]|38;[0-9;]*)m")


@pytest.fixture
def live(tmp_path: Path) -> Iterator[RunDirectory]:
    """A run of four steps that this process still writes; its last episode is hostile."""
    with a_run(tmp_path, steps=3) as run:
        fill_step(run, 4, [hostile_episode()], METRICS)
        yield run


def watch(run: RunDirectory, *words: str, **settings: Any) -> Terminal:
    return Terminal([*RUN, "watch", str(run.path), *words], **settings)


def piped(run: RunDirectory, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [*RUN, "watch", str(run.path), *words]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **env})


def foreign(text: str) -> str:
    """What is left when everything that the dashboard itself writes is taken away."""
    for own in (OPEN, CLOSE, "\x1b[?2026h\x1b[H", "\x1b[J\x1b[?2026l"):
        text = text.replace(own, "")
    return re.sub(r"\r+\n", "\n", OWN.sub("", text))


def test_a_live_run_is_drawn_as_it_grows_at_any_size_until_it_ends(live: RunDirectory) -> None:
    with watch(live) as terminal:
        frame = terminal.until("step 4 of 10  running")
        assert (widest(frame), frame.count("\n")) == (80, 23)
        terminal.until("turn 2 of 11")
        fill_step(live, 5, [hostile_episode()], METRICS)
        terminal.until("step 5 of 10  running")
        for columns, rows in ((60, 20), (140, 45)):
            terminal.resize(columns, rows)
            frame = terminal.until("step 5 of 10", columns=columns)
            assert frame.count("\n") == rows - 1
            assert "episode g0" in frame
        live.write_summary({"steps": 5, "seconds": 9.0, "stopped": None})
        live.close()
        assert terminal.end() == 0
    assert all(letter == "\n" or letter.isprintable() for letter in foreign(terminal.text))
    for sign in ("\x07", "\x9b", "\x1b]", "\x1b[31m0", "another title", "\u202e"):
        assert sign not in terminal.text
    assert "[bold red]markup[/] :smile:" in terminal.text
    after = terminal.text.rpartition(CLOSE)[2]
    assert "step 5 of 10  done" in OWN.sub("", after), "the last frame stays on the screen"


@pytest.mark.parametrize("key", [b"q", b"\x03"], ids=["q", "ctrl-c"])
def test_leaving_gives_the_terminal_back(live: RunDirectory, key: bytes) -> None:
    with watch(live) as terminal:
        before = termios.tcgetattr(terminal.leader)
        terminal.until("q quits")
        assert termios.tcgetattr(terminal.leader)[3] != before[3], "keys come one by one"
        terminal.send(key)
        while CLOSE not in terminal.text:
            assert terminal.read(60.0)
        assert terminal.end(close=False) == 0
        assert termios.tcgetattr(terminal.leader) == before
    assert terminal.text.count(OPEN) == terminal.text.count(CLOSE) == 1


def test_a_killed_viewer_gives_the_terminal_back(live: RunDirectory) -> None:
    with watch(live) as terminal:
        terminal.until("step 4 of 10")
        terminal.process.terminate()
        assert terminal.end() == 143
    assert terminal.text.rstrip().endswith(CLOSE)


def test_a_finished_run_is_printed_and_stays_only_if_asked(live: RunDirectory) -> None:
    live.close()
    with watch(live) as terminal:
        assert terminal.end() == 0
    assert OPEN not in terminal.text
    assert "step 4 of 10  interrupted" in foreign(terminal.text)
    assert "turnwise train --resume" in foreign(terminal.text)
    with watch(live, "--stay") as terminal:
        terminal.until("interrupted")
        terminal.send(b" ")
        terminal.send(b"\x1b[D" * 3)
        for _ in range(40):
            terminal.send(b"\x1b[C")
        terminal.until("the end")
        terminal.send(b"q")
        assert terminal.end() == 0


def test_no_colour_no_unicode_and_dumb_terminals(live: RunDirectory) -> None:
    live.close()
    with watch(live, "--once") as terminal:
        assert terminal.end() == 0
    assert COLOUR.search(terminal.seen)
    with watch(live, "--once", env={"NO_COLOR": "1", "PYTHONIOENCODING": "ascii"}) as terminal:
        assert terminal.end() == 0
    assert not COLOUR.search(terminal.seen)
    assert terminal.seen.isascii()
    with watch(live, env={"TERM": "dumb"}) as terminal:
        assert terminal.end() == 0
    assert terminal.text.count("\r\n") == 4
    assert "\x1b" not in terminal.text


def test_into_a_pipe_goes_a_line_per_step_and_nothing_else(live: RunDirectory) -> None:
    live.close()
    done = piped(live, FORCE_COLOR="1")
    line = "step {}/10  success 25.0 %  reward 0.200  300 tokens/s"
    assert done.stdout.splitlines() == [line.format(step) for step in (1, 2, 3, 4)]
    assert (done.returncode, done.stderr) == (0, "")
    with (live.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": "\x1b[2J"}\n{"step": 5, "rollout/rew')
    done = piped(live)
    assert done.stdout.splitlines() == [line.format(step) for step in (1, 2, 3, 4)]
    assert re.fullmatch(r"skipped metrics.jsonl, line 5: .*\n", done.stderr)
    assert "\x1b" not in done.stderr
    once = piped(live, "--once", COLUMNS="100", LINES="30")
    assert "step 4 of 10  interrupted" in once.stdout
    assert "skipped metrics.jsonl, line 5" in once.stdout
    assert "\x1b" not in once.stdout


def test_a_pipe_follows_a_run_to_its_end(live: RunDirectory) -> None:
    process = subprocess.Popen(
        [*RUN, "watch", str(live.path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    seen = [process.stdout.readline() for _ in range(4)]
    assert process.poll() is None
    fill_step(live, 5, [hostile_episode()], METRICS)
    seen.append(process.stdout.readline())
    live.close()
    rest, errors = process.communicate()
    assert (rest, errors, process.returncode) == ("", "", 0)
    assert [line.split()[1] for line in seen] == [f"{step}/10" for step in range(1, 6)]


def test_a_closed_pipe_ends_it_without_a_word(live: RunDirectory) -> None:
    command = f"{' '.join(RUN)} watch {live.path} | head -n 2"
    process = subprocess.Popen(
        ["bash", "-c", command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    while process.poll() is None:  # a line after the reader has gone ends it
        step = 5 if not (live.path / "episodes/step_000005.jsonl").exists() else 6
        fill_step(live, step, [hostile_episode()], METRICS)
        time.sleep(0.5)
    assert process.communicate()[1] == ""


class Tty:
    """A terminal of this process."""

    def __init__(self, columns: int = 80, rows: int = 24) -> None:
        self._leader, follower = pty.openpty()
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.file = os.fdopen(follower, "w", encoding="utf-8")
        self._parts: list[bytes] = []
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def text(self) -> str:
        """Everything that was written, once the terminal is closed."""
        self.file.close()
        self._thread.join()
        os.close(self._leader)
        return b"".join(self._parts).decode()

    def _read(self) -> None:
        while True:
            try:
                self._parts.append(os.read(self._leader, 65536))
            except OSError:
                return


class Talker(turnwise.Callback):
    """Prints as users' code does, also without the end of a line."""

    def on_step(self, step: int, metrics: object) -> None:
        print(f"callback heard step {step}")
        if step == 2:
            print("... of the moment")
            print("unfinished", end="")


def test_training_is_drawn_live_and_what_it_prints_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    tty = Tty()
    tree = {**SMALL, "env": {**SMALL["env"], "name": "bandit"}}
    config = turnwise.load_config(tree, [f"log.dir={tmp_path}", "eval.baselines=false"])
    result = runs.train(config, sinks=[ConsoleSink(tty.file)], callbacks=[Talker()])
    text = tty.text()
    frames = [OWN.sub("", frame) for frame in FRAME.findall(text)]
    assert frames, text
    assert all(widest(re.sub(r"\r+\n", "\n", frame)) == 80 for frame in frames)
    assert result.path.name in frames[0]
    assert text.count(OPEN) == text.count(CLOSE) == 1
    after = OWN.sub("", text.partition(CLOSE)[2])
    assert "evaluation before training" in after
    assert "the run is in" in after
    said = capsys.readouterr().out
    assert "callback heard step 1\ncallback heard step 2\nunfinished\n" in said
    assert "of the moment" not in said


def test_many_quick_steps_are_few_drawings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    tty = Tty()
    sink = ConsoleSink(tty.file)
    config = turnwise.load_config({"train": {"steps": 3000}})
    started = time.monotonic()
    sink.handle(RunStarted(path=tmp_path, config=config))
    for step in range(1, 3001):
        sink.handle(StepDone(step=step, metrics=METRICS))
    sink.handle(RunEnded(path=tmp_path, seconds=1.0))
    most = 4 * (time.monotonic() - started) + 2
    assert 1 <= len(FRAME.findall(tty.text())) <= most


def test_a_terminal_that_goes_away_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    leader, follower = pty.openpty()
    file = os.fdopen(follower, "w", encoding="utf-8")
    sink = ConsoleSink(file)
    sink.handle(RunStarted(path=tmp_path, config=turnwise.load_config({"train": {"steps": 9}})))
    os.close(leader)
    for step in range(1, 4):
        sink.handle(StepDone(step=step, metrics=METRICS))
        time.sleep(0.3)
    sink.close()


def test_a_forked_process_prints_for_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    tty = Tty()
    sink = ConsoleSink(tty.file)
    sink.handle(RunStarted(path=tmp_path, config=turnwise.load_config({})))
    child = os.fork()
    if not child:
        print("from the child", flush=True)
        os._exit(0)
    os.waitpid(child, 0)
    assert "from the child" in capfd.readouterr().out
    sink.close()
    assert OPEN in tty.text()
