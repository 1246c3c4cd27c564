"""report.html: one file, no network, nothing of a model's text alive in it."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from run_fixtures import fill_step, make_episode, make_run, make_turn

from turnwise.log.events import Evaluated
from turnwise.log.report import summary_json, write_report
from turnwise.log.store import RunDirectory

HOSTILE = '</pre><script>alert("x")</script><img src=x onerror=alert(1)>" onmouseover="alert(2)'


def filled_run(path: Path, *, pieces: bool = True) -> Path:
    with make_run(path) as run:
        for step in range(3):
            episodes = [
                make_episode(
                    f"s{step}/{HOSTILE}{index}",
                    index=index,
                    turns=(make_turn(HOSTILE, reward=float(index), restart=True),),
                )
                for index in range(5)
            ]
            fill_step(
                run,
                step,
                episodes,
                {"rollout/reward": 1.0 + step, "rollout/<b>": step, "train/loss": float("nan")},
            )
        run.write_event("fallback", HOSTILE, step=0)
        before = Evaluated(
            step=0, label="before", episodes=64, success=(0.1, 0.2, 0.3), reward=(0.0, 0.1, 0.2)
        )
        run.write_summary(summary_json(before, None))
        if pieces:
            run.write_pieces(lambda token: chr(token) if token > 2 else "<end>")
    return run.path


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.urls: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}
        self.urls += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.text += data


def read(path: Path) -> Tags:
    parser = Tags()
    parser.feed(path.read_text())
    return parser


@pytest.mark.parametrize("pieces", [True, False])
def test_hostile_text_stays_text(tmp_path: Path, pieces: bool) -> None:
    page = read(write_report(filled_run(tmp_path, pieces=pieces)))
    assert "script" not in page.tags
    assert "img" not in page.tags
    assert not {name for name in page.attributes if name.startswith("on")}
    assert not page.urls
    assert HOSTILE in page.text


def test_it_shows_curves_outcome_and_advantages(tmp_path: Path) -> None:
    path = write_report(filled_run(tmp_path))
    html = path.read_text()
    assert path.name == "report.html"
    assert "20.0 % [10.0 %, 30.0 %]" in html
    assert html.count("<polyline") == 2  # the loss was never finite, so it has no curve
    spans = re.findall(r'<span style="background: rgba\((\d+), [^"]+" title="([^"]+)">', html)
    assert {"46", "218"} <= {red for red, _ in spans}
    assert all((float(value) > 0) == (red == "46") for red, value in spans)
    assert "&lt;end&gt;" in html
    assert "every one of them a token that was sampled" in html


def test_a_broken_ledger_is_shouted(tmp_path: Path) -> None:
    from turnwise.log.store import ledger_entry

    path = filled_run(tmp_path)
    with RunDirectory.open(path) as run:
        run.write_ledger(ledger_entry(3, [((1,), (2,))]))
    assert "1 samples BROKEN" in write_report(path).read_text()


def test_notes_of_a_kind_are_counted_and_idle_steps_are_passed_over(tmp_path: Path) -> None:
    with make_run(tmp_path) as run:
        fill_step(run, 1, [make_episode("first")], {})
        run.write_episodes(2, [make_episode("idle")])
        run.write_credit(2, [])
        for number in range(3):
            run.write_event("idle_step", f"number {number}")
    html = write_report(tmp_path / "run").read_text()
    assert "idle_step (3 times, last): number 2" in html
    assert "Step 1" in html
    assert "Step 2" not in html


def test_an_empty_run_has_a_report(tmp_path: Path) -> None:
    make_run(tmp_path).close()
    assert "<h1>run</h1>" in write_report(tmp_path / "run").read_text()
