"""report.html and the other exports: one file, no network, nothing of a model's text alive in
it."""

import base64
import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from run_fixtures import fill_step, make_episode, make_run, make_turn, page_data

from turnwise.inspect.export import Chosen, export_comparison, export_run, open_run
from turnwise.inspect.folder import InspectError
from turnwise.inspect.report import write_report
from turnwise.log.events import Evaluated
from turnwise.log.outcome import summary_json
from turnwise.log.store import RunDirectory, ledger_entry

HOSTILE = '</script><script>alert("x")</script><!--<img src=x onerror=alert(1)>" onload="alert(2)'


def filled_run(path: Path, *, pieces: bool = True, name: str = "run") -> Path:
    with make_run(path, name=name) as run:
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
    """Every element as a browser would find it, scripts and styles with their text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, list[str]] = {"script": [], "style": []}
        self._inside: str | None = None
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        inline = tag in self.text and dict(attrs).get("type") != "application/json"
        self._inside = tag if inline else None
        if inline:
            self.text[tag].append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = None

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.text[self._inside][-1] += data


@pytest.mark.parametrize("pieces", [True, False])
def test_hostile_text_stays_text(tmp_path: Path, pieces: bool) -> None:
    page = write_report(filled_run(tmp_path, pieces=pieces)).read_text()
    tags = Tags(page)
    make_run(tmp_path, name="calm").close()
    calm = Tags(write_report(tmp_path / "calm").read_text())
    assert [tag for tag, _ in tags.found] == [tag for tag, _ in calm.found]
    assert not any(name.startswith("on") for _, attrs in tags.found for name in attrs)
    data = page_data(page)
    (shown,) = [
        answer for url, answer in data.items() if url.endswith("episode?split=step&step=2&row=4")
    ]
    assert shown["turns"][0]["text"] == HOSTILE
    assert bool(shown["turns"][0]["tokens"]) == pieces


def test_it_asks_for_nothing_and_runs_only_its_own_scripts(tmp_path: Path) -> None:
    tags = Tags(write_report(filled_run(tmp_path)).read_text())
    asked = [value for _, attrs in tags.found for name, value in attrs.items() if name in LINKS]
    assert asked == ["data:,"]  # the icon
    (policy,) = [
        attrs["content"] or ""
        for _, attrs in tags.found
        if attrs.get("http-equiv") == "Content-Security-Policy"
    ]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    for kind in ("script", "style"):
        digests = [hashlib.sha256(text.encode()).digest() for text in tags.text[kind]]
        wanted = [f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests]
        assert len(wanted) >= 2
        assert rules[f"{kind}-src"].split() == wanted


LINKS = ("src", "href", "action", "data", "srcset")


def test_no_module_is_left_in_the_script(tmp_path: Path) -> None:
    tags = Tags(write_report(filled_run(tmp_path)).read_text())
    assert not [
        attrs for tag, attrs in tags.found if tag == "script" and "module" in attrs.values()
    ]
    assert not re.search(r"^(import|export)\b", "\n".join(tags.text["script"]), re.MULTILINE)


def test_it_has_curves_outcome_and_advantages(tmp_path: Path) -> None:
    path = write_report(filled_run(tmp_path))
    assert path.name == "report.html"
    data = page_data(path.read_text())
    about = data["/api/run/run"]
    assert about["outcome"][0]["success"] == [0.1, 0.2, 0.3]
    rows = data["/api/run/run/metrics"]["rows"]
    assert [row["rollout/reward"] for row in rows] == [1.0, 2.0, 3.0]
    assert [row["train/loss"] for row in rows] == [None] * 3  # it was never finite
    episode = data["/api/run/run/episode?split=step&step=0&row=0"]
    tokens = episode["turns"][0]["tokens"]
    assert [token["advantage"] for token in tokens[:3]] == [0.25, -0.5, 0.75]
    assert tokens[-1]["text"] == "<end>"
    assert about["ledger"]["broken"] == 0
    assert about["ledger"]["trained"] == about["ledger"]["sampled"] > 0


def test_a_broken_ledger_is_told(tmp_path: Path) -> None:
    path = filled_run(tmp_path)
    with RunDirectory.open(path) as run:
        run.write_ledger(ledger_entry(3, [((1,), (2,))]))
    about = page_data(write_report(path).read_text())["/api/run/run"]
    assert about["ledger"]["broken"] == 1
    assert about["findings"][0]["name"] == "token_fidelity"


def test_notes_of_a_kind_are_counted_and_idle_steps_are_passed_over(tmp_path: Path) -> None:
    with make_run(tmp_path) as run:
        fill_step(run, 1, [make_episode("first")], {})
        run.write_episodes(2, [make_episode("idle")])
        run.write_credit(2, [])
        for number in range(3):
            run.write_event("idle_step", f"number {number}")
    about = page_data(write_report(tmp_path / "run").read_text())["/api/run/run"]
    (event,) = about["events"]
    assert (event["message"], event["count"]) == ("number 2", 3)
    assert about["steps"] == {"step": [1], "eval": []}


def test_an_episode_that_heard_nothing_is_lost_where_others_won(tmp_path: Path) -> None:
    with make_run(tmp_path) as run:
        run.write_episodes(1, [make_episode("won", success=True), make_episode("mute", index=1)])
    data = page_data(write_report(run.path).read_text())
    rows = data["/api/run/run/episodes?split=step&step=1"]["episodes"]
    assert [row["success"] for row in rows] == [True, False]
    assert data["/api/run/run/episode?split=step&step=1&row=1"]["success"] is False


def test_a_damaged_run_says_so_in_its_report(tmp_path: Path) -> None:
    path = filled_run(tmp_path, name="small")
    (path / "summary.json").write_text("{")
    with (path / "episodes/step_000001.jsonl").open("a") as file:
        file.write('{"id": "torn')
    data = page_data(export_run(open_run(path), Chosen(steps=(1,))))
    assert "`turnwise report RUN --step N`" in data["export"]["note"]
    (listed,) = data["/api/runs"]["skipped"]
    assert listed["name"] == "small"
    assert "summary.json cannot be read" in listed["reason"]
    for name in ("episodes", "groups"):
        skipped = data[f"/api/run/small/{name}?split=step&step=1"]["skipped"]
        assert skipped == ["episodes/step_000001.jsonl ends in the middle of line 6"]
    compared = page_data(export_comparison([path, filled_run(tmp_path, name="whole")]))
    assert listed in compared["/api/runs"]["skipped"]


def test_an_empty_run_has_a_report(tmp_path: Path) -> None:
    make_run(tmp_path).close()
    page = write_report(tmp_path / "run").read_text()
    assert "<title>run</title>" in page
    assert page_data(page)["/api/run/run"]["outcome"] == []


def test_a_report_is_not_written_through_a_link(tmp_path: Path) -> None:
    path = filled_run(tmp_path)
    for name in ("report.tmp", "report.html"):
        (path / name).symlink_to(tmp_path / "precious")
    (tmp_path / "precious").write_text("mine")
    write_report(path)
    assert (tmp_path / "precious").read_text() == "mine"
    assert not (path / "report.html").is_symlink()


def test_one_episode_and_a_comparison_are_exported(tmp_path: Path) -> None:
    first, second = filled_run(tmp_path, name="a,b"), filled_run(tmp_path, name="c ü")
    data = page_data(export_run(open_run(first), Chosen(one=("step", 1, 3))))
    assert data["export"]["start"] == "#/run/a%2Cb/step/1/3"
    episodes = [url for url in data if "/episode?" in url]
    assert episodes == ["/api/run/a%2Cb/episode?split=step&step=1&row=3"]
    with pytest.raises(InspectError, match="has no episode 99"):
        export_run(open_run(first), Chosen(one=("step", 1, 99)))
    data = page_data(export_comparison([first, second]))
    assert data["export"]["start"] == "#/compare/a%2Cb,c%20%C3%BC"
    assert "/api/compare?runs=a%2Cb,c%20%C3%BC" in data
    assert [run["name"] for run in data["/api/runs"]["runs"]] == ["a,b", "c ü"]
    assert data["/api/run/c%20%C3%BC/metrics"]["rows"]
