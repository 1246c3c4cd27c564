"""The dashboard: what it shows at any size, what never reaches a terminal, and what is read of a
run directory."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pty_parts import widest
from run_fixtures import fill_step, make_episode, make_run, make_turn

from turnwise.config.schema import Config
from turnwise.log.doctor import Diagnosis
from turnwise.log.events import Evaluated
from turnwise.log.store import RunDirectory, RunDirectoryError, RunReader, has_writer
from turnwise.log.terminal.follow import Follower, Tail, last_line
from turnwise.log.terminal.frame import Frame, draw
from turnwise.log.terminal.glyphs import ASCII, UNICODE, Glyphs
from turnwise.log.terminal.playback import Playback, scenes
from turnwise.log.terminal.plot import Plot, draw_plot
from turnwise.log.terminal.text import clean, wrapped
from turnwise.log.terminal.view import RunView
from turnwise.types import Episode, Message

HOSTILE = (
    "\x1b[2J\x1b[Hcleared",
    "\x1b]0;another title\x07",
    "\x1b]8;;http://example.com\x1b\\link\x1b]8;;\x1b\\",
    "\x1b]52;c;c2VjcmV0\x07",
    "\x9b31mred\x9d0;title\x9c",
    "\x1bP1$qm\x1b\\",
    "over\rwritten\x08\x08\x07\x00\x7f",
    "\u202etxet desrever\u202c zero\u200bwidth",
    "\x1b",
    "[bold red]markup[/] :smile:",
    "Z\u0301\u0301\u0301\u0301\u0301algo",
)
LONG = Config.model_validate({"train": {"steps": 200}})
METRICS = {
    "rollout/episodes": 8.0,
    "rollout/success": 0.25,
    "rollout/reward": 0.2,
    "time/rollout": 1.0,
    "time/score": 0.5,
    "time/update": 2.0,
    "time/batch": 0.5,
    "time/generated_tokens_per_second": 300.0,
}


def hostile_episode() -> Episode:
    prompt = (Message(role="user", content="P _ G\n" + HOSTILE[0]),)
    turns = tuple(
        make_turn(f"turn {text}", action=text, messages=(Message(role="tool", content=text),))
        for text in HOSTILE
    )
    return make_episode("g\x1b[31m0", prompt=prompt, turns=turns)


def some_view(steps: int = 30) -> RunView:
    view = RunView(path=Path("runs/lake\x1b[31m"), config=LONG, since=0.0)
    view.add_evaluation(
        Evaluated(step=0, label="before", episodes=8, success=(0, 0.1, 1), reward=(0, 0.1, 1))
    )
    for player, share in (("random player", 0.1), ("best blind player", 0.2), ("path", 1.0)):
        share_of = (share, share, share)
        view.add_evaluation(
            Evaluated(
                step=0, label="baseline", episodes=8, success=share_of, reward=share_of,
                player=player,
            )
        )  # fmt: skip
    for step in range(1, steps + 1):
        view.add_row(step, METRICS | {"rollout/success": step / 60, "rollout/reward": -step / 9})
    view.said.append("hello \x1b[31mworld\x07")
    return view


@pytest.mark.parametrize("text", HOSTILE)
def test_no_hostile_text_is_left(text: str) -> None:
    shown = clean(text)
    assert all(letter == "\n" or letter.isprintable() for letter in shown), repr(shown)
    assert "title" not in shown
    assert "example.com" not in shown


@given(st.text())
def test_no_text_at_all_is_left_that_a_terminal_obeys(text: str) -> None:
    shown = clean(text)
    assert all(letter == "\n" or letter.isprintable() for letter in shown), repr(shown)
    assert clean(shown) == shown


@given(st.text(), st.integers(1, 30), st.integers(1, 10))
def test_wrapped_text_fits(text: str, width: int, height: int) -> None:
    lines = wrapped(clean(text), width=width, height=height)
    assert len(lines) <= height
    if width >= 6:
        assert widest("\n".join(lines)) <= width


@pytest.mark.parametrize("glyphs", [UNICODE, ASCII], ids=["unicode", "ascii"])
@pytest.mark.parametrize("size", [(60, 20), (80, 24), (140, 45), (250, 80), (30, 8)])
def test_every_size_is_filled_exactly(size: tuple[int, int], glyphs: Glyphs) -> None:
    view = some_view()
    view.skipped.append("metrics.jsonl, line 3: \x1b[2J")
    findings = [
        Diagnosis(name=f"n{i}", severity="problem", evidence="e\x1b[2J" * 40, advice="")
        for i in range(9)
    ]
    for scene in scenes(hostile_episode(), step=3):
        frame = Frame(view=view, scene=scene, findings=findings, now=90.0, footer="q quits")
        lines = draw(frame, width=size[0], height=size[1], glyphs=glyphs)
        assert [line.cell_len for line in lines] == [size[0]] * size[1]
        text = "\n".join(line.plain for line in lines)
        assert all(letter == "\n" or letter.isprintable() for letter in text)
        assert glyphs is UNICODE or text.replace("\u0301", "").isascii()
        if size[0] >= 60:
            for wanted in ("step 30 of 200", "expert", "blind", "random", "success 50.0 %", "n0"):
                assert wanted in text
            for wanted in ("time", "rollout 25 %", "1 min 30 s", "11 min 20 s left", "q quits"):
                assert wanted in text
            assert "[bold red]markup[/]" in text or "markup" not in scene.says


def test_a_run_without_a_step_or_success_is_drawn() -> None:
    view = RunView(path=Path("runs/a"), config=Config())
    for width in (60, 100):
        frame = Frame(view=view, scene=None, findings=[], now=0.0)
        assert any("no step is done" in line.plain for line in draw(
            frame, width=width, height=20, glyphs=ASCII
        ))  # fmt: skip
    view.add_row(1, {"rollout/reward": 1.0})
    text = "\n".join(
        line.plain
        for line in draw(
            Frame(view=view, scene=None, findings=[], now=0.0), width=60, height=20, glyphs=ASCII
        )
    )
    assert "reward 1.000" in text
    assert "success" not in text


@pytest.mark.parametrize("count", [1, 2, 7, 5000])
@pytest.mark.parametrize("glyphs", [UNICODE, ASCII], ids=["unicode", "ascii"])
def test_curves_of_any_length_keep_their_ends(count: int, glyphs: Glyphs) -> None:
    points = [(float(step), (step % 7) / 7) for step in range(1, count + 1)]
    lines = draw_plot(Plot(points=points, lines={"random": 0.1}), width=50, height=8, glyphs=glyphs)
    assert len(lines) == 8
    assert max(line.cell_len for line in lines) <= 50
    assert f"{count}" in lines[-1].plain
    assert "random" in "".join(line.plain for line in lines)


def test_a_rising_curve_rises_and_far_lines_do_not_flatten_it() -> None:
    points = [(float(step), step / 100) for step in range(21)]
    plot = Plot(points=points, lines={"expert": 1.0, "blind": 0.15}, percent=True)
    lines = [line.plain for line in draw_plot(plot, width=60, height=9, glyphs=ASCII)]
    assert lines[0].startswith("  20 %")
    assert "expert ^" in lines[0]
    columns = [line[8:51].find("*") for line in lines[:-1] if "*" in line[8:51]]
    assert len(columns) == 8
    assert columns == sorted(columns, reverse=True)


def test_playback_plays_every_turn_then_the_newest_episode() -> None:
    first = make_episode("a", turns=(make_turn("one"), make_turn("two")), success=True)
    player = Playback(seconds=1.0)
    player.offer(first, step=None)
    shown: list[str] = []
    for now in range(12):
        scene = player.scene(float(now))
        assert scene is not None
        shown.append(f"{scene.title} {min(scene.turn, scene.turns + 1)}")
        if now == 1:
            player.offer(make_episode("b"), step=None)
    assert shown[:4] == ["a 1", "a 2", "a 3", "a 3"]
    assert shown[4:6] == ["b 1", "b 2"]
    player.turn_by(-5)
    held = player.scene(100.0)
    assert held is not None
    assert (held.turn, player.paused) == (1, True)
    assert player.scene(200.0) == held


def a_run(path: Path, *, steps: int = 4) -> RunDirectory:
    run = make_run(path, config=Config.model_validate({"train": {"steps": 10}}))
    for step in range(1, steps + 1):
        episodes = [make_episode(f"s{step}-{i}", success=i == 0, index=i) for i in range(3)]
        fill_step(run, step, episodes, METRICS)
    return run


def test_a_follower_sees_what_is_written_meanwhile_and_how_the_run_ends(tmp_path: Path) -> None:
    with a_run(tmp_path) as run:
        follower = Follower(RunReader(run.path))
        follower.look()
        assert (follower.view.state, follower.view.done) == ("running", 4)
        assert follower.episode is not None
        assert (follower.episode[0].id, follower.episode[1]) == ("s4-2", 4)
        fill_step(run, 5, [make_episode("new")], METRICS)
        run.write_event("resumed", "goes on")
        follower.look()
        assert (follower.view.done, follower.episode[0].id) == (5, "new")
        assert [event["kind"] for event in follower.view.events] == ["resumed"]
        assert follower.view.left() == pytest.approx(5 * 4.0)
        seen = follower.view.revision
        follower.look()
        assert follower.view.revision == seen, "nothing new, nothing to draw"
    follower.look()
    assert follower.view.state == "interrupted"
    with RunDirectory.open(run.path) as again:  # a resume plays steps again
        again.truncate_to(2)
        again.write_metrics(3, METRICS | {"rollout/reward": 9.0})
        follower.look()
        assert (follower.view.state, follower.view.done) == ("running", 3)
        assert follower.view.last("rollout/reward") == 9.0
        again.write_summary({"steps": 3, "seconds": 7.5, "stopped": None})
    follower.look()
    assert (follower.view.state, follower.view.elapsed(0.0)) == ("done", 7.5)
    assert follower.view.skipped == []


def test_a_torn_run_says_what_was_skipped(tmp_path: Path) -> None:
    with a_run(tmp_path) as run:
        pass
    metrics = run.path / "metrics.jsonl"
    lines = metrics.read_text().splitlines()
    lines[1] = "no json \x1b[2J"
    lines[2] = json.dumps({"step": 3, "rollout/reward": "high"})
    metrics.write_text("\n".join([*lines, '{"step": 5, "rollout/re']))  # torn, as by a kill
    (run.path / "ledger.jsonl").write_text('{"step": 1}\n')
    (run.path / "episodes/step_000004.jsonl").write_text('{"id": "torn')
    (run.path / "episodes/step_000003.jsonl").write_text("")
    (run.path / "summary.json").write_text("{")
    follower = Follower(RunReader(run.path))
    follower.look()
    view = follower.view
    assert view.done == 4
    assert sorted(view.curves["rollout/reward"]) == [1, 4]
    assert follower.episode is not None
    assert follower.episode[1] == 2
    told = "\n".join(view.skipped)
    for wanted in (
        "metrics.jsonl, line 2",
        "metrics.jsonl, line 3: rollout/reward is a number, got 'high'",
        "ledger.jsonl, line 1",
        "episodes/step_000004.jsonl",
        "episodes/step_000003.jsonl: it is empty",
        "summary.json",
    ):
        assert wanted in told
    assert "line 5" not in told, "a torn last line is the next look's"
    before = len(view.skipped)
    follower.look()
    assert len(follower.view.skipped) == before


def test_a_file_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    tail = Tail(path)
    assert tail.new_lines() == []
    path.write_bytes(b"one\ntw")
    assert tail.new_lines() == [(1, b"one")]
    with path.open("ab") as file:
        file.write(b"o\n\nthree\n")
    assert tail.new_lines() == [(2, b"two"), (4, b"three")]
    assert tail.new_lines() == []
    path.write_bytes(b"one\nTWO\nthree, and more of it\n")  # another file in its place
    assert tail.new_lines() is None
    assert [line for _, line in tail.new_lines() or ()][1] == b"TWO"


@pytest.mark.parametrize("size", [10, 70_000, 400_000])
def test_the_last_line_is_read_from_the_end(tmp_path: Path, size: int) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"x" * 300_000 + b"\n" + b"y" * size + b"\n")
    assert last_line(path) == b"y" * size
    path.write_bytes(b"z" * size)
    assert last_line(path) == b"z" * size


def test_a_reader_keeps_no_writer_out(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    assert has_writer(run.path) is True
    with pytest.raises(RunDirectoryError, match="in use by process"):
        RunDirectory.open(run.path)
    run.close()
    assert has_writer(run.path) is False
    (run.path / "lock").unlink()
    assert has_writer(run.path) is False
    # Somebody who looks holds the lock for a moment: a writer waits for it.
    code = (
        "import fcntl, sys, time; file = open(sys.argv[1], 'a'); fcntl.flock(file, fcntl.LOCK_SH);"
        "print('held', flush=True); time.sleep(0.05)"
    )
    looker = subprocess.Popen(
        [sys.executable, "-c", code, str(run.path / "lock")], stdout=subprocess.PIPE
    )
    assert looker.stdout is not None
    looker.stdout.readline()
    for _ in range(50):  # the machine may be slow to end the other
        try:
            RunDirectory.open(run.path).close()
            break
        except RunDirectoryError:
            time.sleep(0.1)
    else:
        pytest.fail("the lock was never free")
    looker.wait()


@pytest.mark.parametrize(("low", "high"), [(1.2e-3, 0.9), (-1.2e-3, 2e-3), (-250.0, 3e7), (0.0, 1)])
def test_the_scale_keeps_to_its_cells(low: float, high: float) -> None:
    plot = Plot(points=[(1, low), (2, high)])
    lines = [line.plain for line in draw_plot(plot, width=40, height=8, glyphs=ASCII)]
    assert {line.index(ASCII.side) for line in lines[:-1]} == {7}
