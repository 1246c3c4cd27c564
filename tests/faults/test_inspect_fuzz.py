"""Run directories with anything in them: the inspector stays up, and says what it skipped."""

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from draws import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from inspect_parts import Client, lake_run
from test_fuzz_files import RUN_FILES, broken

from turnwise.inspect import folder as limits
from turnwise.inspect.server import InspectServer
from turnwise.log.events import Evaluated
from turnwise.log.outcome import summary_json
from turnwise.log.store import RunDirectory

FUZZ = settings(
    examples(12),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
URLS = (
    *("", "/metrics", "/episodes?split=step&step=1", "/episodes?step=all&text=up"),
    *("/episodes?split=eval&step=2&sort=-reward", "/groups?split=step&step=1"),
    *("/episode?split=step&step=1&row=0", "/episode?split=step&step=1&row=1"),
    "/gantt?split=step&step=1",
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = lake_run(tmp_path_factory.mktemp("whole"), steps=2, episodes=3)
    ended = Evaluated(step=2, label="after", episodes=3, success=(0.1, 0.2, 0.3), reward=(0, 1, 2))
    with RunDirectory.open(path) as run:
        run.write_summary(summary_json(ended, ended, baselines=[ended.to_json()]))
    return path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Client, Path]]:
    """A server, and where its runs are."""
    runs = tmp_path_factory.mktemp("runs")
    with InspectServer([runs], cache=tmp_path_factory.mktemp("cache")) as server:
        yield Client(server), runs


def ask_everything(client: Client, name: str) -> list[str]:
    """What the answers say they skipped. Every answer is JSON, and none is a failure of ours."""
    said = [one["reason"] for one in client.get("/api/runs")["skipped"]]
    for url in URLS:
        status, answer, _ = client.ask(f"/api/run/{name}{url}")
        assert status in (200, 404, 422), (url, status, answer)
        said += [answer["error"]] if "error" in answer and status != 200 else answer["skipped"]
    return said


@pytest.fixture
def run(place: tuple[Client, Path], whole: Path) -> Iterator[tuple[Client, Path]]:
    client, runs = place
    path = runs / "lake"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(whole, path)
    yield client, path
    shutil.rmtree(path, ignore_errors=True)


@pytest.mark.parametrize("name", RUN_FILES)
@FUZZ
@given(data=st.data())
def test_files_of_a_run(
    name: str, place: tuple[Client, Path], whole: Path, data: st.DataObject
) -> None:
    client, runs = place
    path = runs / "lake"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(whole, path)
    (path / name).write_bytes(data.draw(broken((whole / name).read_bytes())))
    ask_everything(client, "lake")
    assert client.get("/api/run/lake/metrics")["position"] is not None


def test_every_bad_line_is_named_and_the_others_are_shown(run: tuple[Client, Path]) -> None:
    client, path = run
    file = path / "episodes/step_000001.jsonl"
    good = file.read_bytes().splitlines(keepends=True)
    wrong = json.loads(good[1]) | {"status": "asleep"}
    bad = [
        b"\x00\xff\xfe rubbish\n",
        b"[1, 2]\n",
        b'{"id": "x"}\n',
        b'{"reward": NaN}\n',
        json.dumps(wrong).encode() + b"\n",
        b"[" * 100_000 + b"\n",
        b"\n",
    ]
    file.write_bytes(b"".join([*bad, *good, b'{"id": "torn'][:]))
    found = client.get("/api/run/lake/episodes?split=step&step=1")
    assert [one["row"] for one in found["episodes"]] == [7, 8, 9, 10]
    *said, torn = found["skipped"]
    numbers = [line.split(", line ")[1].split(" ")[0] for line in said]
    assert numbers == ["1", "2", "3", "4", "5", "6"]  # not the blank line
    assert torn == "episodes/step_000001.jsonl ends in the middle of line 12"
    episode = client.get("/api/run/lake/episode?split=step&step=1&row=8")
    assert episode["id"] == json.loads(good[1])["id"]
    assert episode["turns"][0]["tokens"][0]["advantage"] == 0.25


@pytest.mark.parametrize("kind", ["episodes", "credit", "timings"])
def test_a_torn_file_of_a_step_is_named(kind: str, run: tuple[Client, Path]) -> None:
    client, path = run
    file = path / kind / "step_000001.jsonl"
    os.truncate(file, file.stat().st_size - 4)
    said = [words for words in ask_everything(client, "lake") if "in the middle of line 4" in words]
    assert {words.split(" ends ")[0] for words in said} == {f"{kind}/step_000001.jsonl"}


def test_a_torn_line_is_damage_once_nobody_writes(run: tuple[Client, Path]) -> None:
    client, path = run
    with RunDirectory.open(path):  # locked
        with (path / "metrics.jsonl").open("a") as file:
            file.write('{"step": 3, "roll')
        assert client.get("/api/run/lake")["skipped"] == []
    said = client.get("/api/run/lake")["skipped"]
    assert said == ["metrics.jsonl ends in the middle of a line, which is left out"]


def test_a_line_that_is_too_long_is_passed_over(
    run: tuple[Client, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, path = run
    monkeypatch.setattr(limits, "MAX_LINE", 100_000)
    file = path / "episodes/step_000001.jsonl"
    good = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(good[0] + b'{"id": "' + b"x" * 3_000_000 + b'"}\n' + good[1])
    found = client.get("/api/run/lake/episodes?split=step&step=1")
    assert [one["row"] for one in found["episodes"]] == [0, 2]
    assert "line 2 is longer than 100000 bytes" in found["skipped"][0]


@pytest.mark.parametrize("name", [*RUN_FILES, "episodes", "credit", "timings", "lock"])
def test_missing_files(name: str, run: tuple[Client, Path]) -> None:
    client, path = run
    gone = path / name
    shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    ask_everything(client, "lake")


@pytest.mark.parametrize("name", RUN_FILES)
def test_folders_pipes_and_links_in_the_place_of_files(
    name: str, run: tuple[Client, Path], tmp_path: Path
) -> None:
    client, path = run
    secret = tmp_path / "secret"
    secret.write_bytes((path / name).read_bytes().replace(b"up", b"sesame") + b"\nsesame: open\n")
    for put in (Path.mkdir, lambda file: os.mkfifo(file), lambda file: file.symlink_to(secret)):
        target = path / name
        target.rmdir() if target.is_dir() else target.unlink()
        put(target)
        for url in URLS:
            status, answer, _ = client.ask(f"/api/run/lake{url}")
            assert status in (200, 404, 422)
            assert "sesame" not in json.dumps(answer)


def test_a_link_in_the_place_of_a_folder(run: tuple[Client, Path], tmp_path: Path) -> None:
    client, path = run
    for kind in ("episodes", "credit", "timings"):
        shutil.move(path / kind, tmp_path / kind)
        (path / kind).symlink_to(tmp_path / kind)
    assert client.get("/api/run/lake")["steps"] == {"step": [], "eval": []}
    assert client.get("/api/run/lake/episodes?split=step&step=1")["total"] == 0
    client.get("/api/run/lake/episode?split=step&step=1&row=0", status=404)


def test_runs_behind_links_are_not_listed(tmp_path: Path) -> None:
    lake_run(tmp_path / "elsewhere", steps=1)
    inside = lake_run(tmp_path / "runs", "inside", steps=1)
    (tmp_path / "runs/linked").symlink_to(tmp_path / "elsewhere/lake")
    with InspectServer([tmp_path / "runs"], cache=tmp_path / "cache") as server:
        found = Client(server).get("/api/runs")
        assert [one["name"] for one in found["runs"]] == [inside.name]
        assert found["skipped"] == [
            {"name": "linked", "reason": "is a link; name the folder itself"}
        ]
        for name in ("linked", "..%2Felsewhere%2Flake", "%2e%2e", "inside%2F..%2F..%2Felsewhere"):
            assert Client(server).ask(f"/api/run/{name}")[0] == 404


def test_steps_that_are_no_numbers_ask_for_no_other_file(run: tuple[Client, Path]) -> None:
    client, _ = run
    for step in ("..%2F..%2Fconfig", "1%00", "-1", "1e3", "9" * 30, "%D9%A1"):
        client.get(f"/api/run/lake/episode?split=step&step={step}&row=0", status=400)
        client.get(f"/api/run/lake/groups?split=..%2F&step={step}", status=400)


@FUZZ
@given(path=st.text(max_size=40), query=st.text(max_size=40))
def test_any_request_has_an_answer(place: tuple[Client, Path], path: str, query: str) -> None:
    from urllib.parse import quote

    client, _ = place
    for start in ("/", "/static/", "/api/run/lake/", "/api/"):
        status, answer, _ = client.ask(f"{start}{quote(path)}?{quote(query)}")
        assert status in (200, 400, 404, 405), (path, query, status, answer)
