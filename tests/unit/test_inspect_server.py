"""The inspector's answers about runs, as the page gets them."""

import dataclasses
import fcntl
import json
import math
import os
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from inspect_parts import Client, lake_run, wait_for
from run_fixtures import fill_step, make_episode, make_run, make_turn

from turnwise.inspect.answers import Answers
from turnwise.inspect.folder import RunFolder
from turnwise.inspect.index import EpisodeIndex, Filter, cache_folder
from turnwise.inspect.server import InspectServer
from turnwise.log.store import CreditRow, RunDirectory
from turnwise.types import Json, Message, Observation, Status


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Client, Path]]:
    folder = tmp_path_factory.mktemp("runs")
    lake_run(folder)
    cache = tmp_path_factory.mktemp("cache")
    with InspectServer([folder], cache=cache) as server:
        yield Client(server), folder


def test_the_list_of_runs(lake: tuple[Client, Path]) -> None:
    client, _ = lake
    (run,) = client.get("/api/runs")["runs"]
    assert (run["name"], run["state"], run["step"], run["steps"]) == ("lake", "stopped", 3, 3)
    assert (run["seed"], run["env"], run["model"]) == (5, "frozen_lake", "embedded")
    assert run["reward_last"] == pytest.approx(0.3)
    wait_for(lambda: client.get("/api/runs")["runs"][0]["problems"] is not None)


def test_a_run(lake: tuple[Client, Path]) -> None:
    client, folder = lake
    about = client.get("/api/run/lake")
    assert about["steps"] == {"step": [1, 2, 3], "eval": [3]}
    assert about["credit_steps"] == [1, 2, 3]
    assert about["config"] == (folder / "lake/config.yaml").read_text()
    assert about["events"] == [{"kind": "note", "message": "something", "step": 1, "count": 1}]
    assert about["ledger"]["steps"] == 3
    assert about["skipped"] == []
    assert client.get("/api/run/other", status=404)["error"].startswith("there is no run 'other'")


def test_the_episodes_of_a_step_are_filtered_sorted_and_paged(lake: tuple[Client, Path]) -> None:
    client, _ = lake
    step = "/api/run/lake/episodes?split=step&step=2"
    found = client.get(step)
    assert found["total"] == 5
    assert found["statuses"] == {"completed": 4, "env_error": 1}
    assert found["envs"] == {"lake": 5}
    first = found["episodes"][0]
    assert (first["row"], first["id"], first["first"], first["turns"]) == (0, "s2-0", "up", 2)
    assert first["success"] is True
    assert first["tokens"] == 3 + 8
    assert [one["row"] for one in client.get(f"{step}&sort=-reward")["episodes"]][:2] == [3, 2]
    assert [one["row"] for one in client.get(f"{step}&offset=3&limit=1")["episodes"]] == [3]
    assert client.get(f"{step}&status=env_error")["episodes"][0]["error"] == "it broke"
    assert client.get(f"{step}&success=yes")["total"] == 1
    # Where others report success, an episode that reports nothing is lost, unless it broke.
    assert [one["row"] for one in client.get(f"{step}&success=no")["episodes"]] == [1, 2, 3]
    assert client.get(f"{step}&status=env_error")["episodes"][0]["success"] is None
    found = [client.get(f"/api/run/lake/episode?split=step&step=2&row={row}") for row in (0, 1, 4)]
    assert [one["success"] for one in found] == [True, False, None]
    assert client.get(f"{step}&min_reward=2&max_reward=2.5")["total"] == 1
    for wrong in ("sort=colour", "step=x", "min_reward=nan", "split=test", "status=fine"):
        client.get(f"/api/run/lake/episodes?step=2&{wrong}", status=400)


def test_text_is_found_in_all_steps_whatever_its_case(lake: tuple[Client, Path]) -> None:
    client, _ = lake
    base = "/api/run/lake/episodes?split=step&step=all"
    client.get("/api/run/lake")
    wait_for(lambda: client.get(base)["indexed"] == {"files": 4, "of": 4})
    assert client.get(base)["total"] == 15
    assert {one["step"] for one in client.get(f"{base}&text=wOrD2")["episodes"]} == {2}
    assert client.get(f"{base}&text=broke")["total"] == 3
    assert client.get(f"{base}&text=%5F%20%5F%20g")["total"] == 12  # a row of the board
    assert client.get(f"{base}&text=rules")["total"] == 0  # of the system message
    assert client.get(f"{base}&text=%25")["total"] == 0  # no wildcard


def test_groups_and_times(lake: tuple[Client, Path]) -> None:
    client, _ = lake
    groups = client.get("/api/run/lake/groups?split=step&step=1")["groups"]
    assert [group["episodes"] for group in groups] == [[0, 1], [2, 3], [4]]
    assert (groups[1]["reward_mean"], groups[1]["reward_std"]) == (2.5, 0.5)
    gantt = client.get("/api/run/lake/gantt?split=step&step=1")
    assert [bar["kind"] for bar in gantt["episodes"][0]["bars"]] == ["generate", "env"] * 2
    assert "all episodes begin at 0" in gantt["note"]


def test_bars_have_starts_where_they_are_stored(tmp_path: Path) -> None:
    turn = make_turn(generate_seconds=2.0, env_seconds=0.5, generate_start=12.5, env_start=14.5)
    begun = {"turns": (turn,), "reset_start": 11.0, "reset_seconds": 1.0}
    odd = {"reset_start": -1.0, "generate_start": [1e300], "env_start": [True], "env": ["long"]}
    with make_run(tmp_path, name="lake") as run:
        names = ("first", "odd", "old", "short")
        first, *others = (make_episode(name, **begun) for name in names)
        run.write_episodes(1, [dataclasses.replace(first, reset_start=10.0), *others])
    file = run.path / "timings" / "step_000001.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows[1] |= odd
    rows[2] = {name: rows[2][name] for name in ("id", "generate", "env")}
    rows[3]["env_start"] = []
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with InspectServer([tmp_path], cache=tmp_path / "cache") as server:
        gantt = Client(server).get("/api/run/lake/gantt?split=step&step=1")
    places = [
        [(bar["turn"], bar["kind"], bar["start"], bar["seconds"]) for bar in one["bars"]]
        for one in gantt["episodes"]
    ]
    assert places == [
        [(None, "env", 0.0, 1.0), (0, "generate", 2.5, 2.0), (0, "env", 4.5, 0.5)],
        [(None, "env", None, 1.0), (0, "generate", None, 2.0), (0, "env", None, None)],
        [(0, "generate", None, 2.0), (0, "env", None, 0.5)],
    ]
    assert gantt["note"].startswith("When the bars of 2 of 3 episodes started is not stored")
    assert "line 4 cannot be read" in gantt["skipped"][0]


def test_tokens_are_trained_where_an_update_saw_them(tmp_path: Path) -> None:
    played = [
        make_episode("kept"),
        make_episode("dropped", index=1),
        make_episode("broken", index=2, status=Status.ENV_ERROR, error="it broke"),
    ]
    with make_run(tmp_path, name="lake") as run:
        fill_step(run, 1, played[:1], {})
        run.write_episodes(1, played)
        run.write_episodes(2, played)  # without credit
        run.write_episodes(2, played, split="eval")
        run.write_pieces(lambda token: chr(token))
    with InspectServer([tmp_path], cache=tmp_path / "cache") as server:
        client = Client(server)
        found = {}
        for place in ("split=step&step=1", "split=step&step=2", "split=eval&step=2"):
            episodes = [client.get(f"/api/run/lake/episode?{place}&row={row}") for row in range(3)]
            found[place] = [one["turns"][0]["tokens"][0]["mask"] for one in episodes]
    assert list(found.values()) == [[True, False, False], [True, True, False], [False] * 3]


def test_an_episode_has_tokens_credit_boards_and_siblings(lake: tuple[Client, Path]) -> None:
    client, _ = lake
    episode = client.get("/api/run/lake/episode?split=step&step=2&row=1")
    assert (episode["id"], episode["reward"], episode["env"]) == ("s2-1", 1.0, "lake")
    assert episode["board"] == "S _\n_ G"
    first, second = episode["turns"]
    assert first["board"] == "P _ O\n_ _ G"
    assert second["board"] is None
    assert [token["text"] for token in first["tokens"]] == ["u", "p", "<end>"]
    advantages = [token["advantage"] for token in (*first["tokens"], *second["tokens"])]
    assert advantages == [(-1.0) ** place * (place + 1) / 4 for place in range(11)]
    assert episode["scales"]["advantage"] == 11 / 4
    assert "value" not in episode["scales"]  # there was no critic
    assert [one["row"] for one in episode["siblings"]] == [0, 1]
    assert episode["contexts"] == [{"sample": 0, "from_turn": 0, "parent": None, "why": None}]
    client.get("/api/run/lake/episode?split=step&step=2&row=9", status=404)
    client.get("/api/run/lake/episode?split=step&step=9&row=0", status=404)


def test_entropies_are_shown_where_they_are_stored(tmp_path: Path) -> None:
    turn_ids, advantages = (0, 0, 0), (0.5, 0.5, 0.5)
    stored = {
        "whole": (0.25, 1.5, 0.0),
        "holes": (math.nan, -3.0, 2.0),
        "none": (),
        "words": ("<b>", 1.0, 2.0),
        "short": (1.0,),
    }
    rows = [
        CreditRow(episode_id=name, sample=0, turn_ids=turn_ids, advantages=advantages).to_json()
        | {"entropies": [None if value != value else value for value in values]}
        for name, values in stored.items()
    ]
    with make_run(tmp_path, name="lake") as run:
        run.write_episodes(1, [make_episode(name) for name in stored])
        run.write_pieces(chr)
    file = run.path / "credit" / "step_000001.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with InspectServer([tmp_path], cache=tmp_path / "cache") as server:
        url = "/api/run/lake/episode?split=step&step=1&row="
        found = [Client(server).get(f"{url}{row}") for row in range(len(stored))]
    entropies = [[token["entropy"] for token in one["turns"][0]["tokens"]] for one in found]
    nothing = [None, None, None]
    assert entropies == [[0.25, 1.5, 0.0], [None, -3.0, 2.0], nothing, nothing, nothing]
    assert found[0]["scales"]["entropy"] == [0.0, 1.5]
    assert "entropy" not in found[2]["scales"]
    assert "entropies.0: input should be a valid number" in found[3]["skipped"][0]
    assert "3 turn_ids, 1 entropies" in found[4]["skipped"][0]


def test_metrics_are_followed_and_a_resume_is_noticed(tmp_path: Path) -> None:
    path = lake_run(tmp_path)
    with InspectServer([path], cache=tmp_path / "cache") as server:
        client = Client(server)
        first = client.get("/api/run/lake/metrics")
        assert [row["step"] for row in first["rows"]] == [1, 2, 3]
        assert first["timings"][0]["time/step"] == 1.5

        def after(known: Any) -> Any:
            places = f"after={known['position']}&timings_after={known['timings_position']}"
            return client.get(f"/api/run/lake/metrics?{places}")

        assert after(first)["rows"] == []
        with RunDirectory.open(path) as run:
            assert client.get("/api/runs")["runs"][0]["state"] == "running"
            run.write_metrics(4, {"rollout/reward": float("nan")})
            with (path / "metrics.jsonl").open("a") as torn:
                torn.write('{"step": 5, "rollout/rew')
            second = after(first)
            assert second["rows"] == [{"step": 4, "rollout/reward": None}]
            assert not second["reset"]
        with RunDirectory.open(path) as run:  # it removes the torn line and goes back
            run.truncate_to(1)
            for step in range(2, 8):  # longer than before, and not the same
                run.write_metrics(step, {"rollout/reward": step / 8})
            third = after(second)
        assert third["reset"]
        rewards = [row["rollout/reward"] for row in third["rows"]]
        assert rewards == [0.1, *(step / 8 for step in range(2, 8))]
        assert client.get("/api/runs")["runs"][0]["step"] == 7


def test_a_step_that_is_written_again_is_read_again(tmp_path: Path) -> None:
    path = lake_run(tmp_path)
    with InspectServer([path], cache=tmp_path / "cache") as server:
        client = Client(server)
        url = "/api/run/lake/episodes?split=step&step=2"
        assert client.get(url)["total"] == 5
        with RunDirectory.open(path) as run:
            run.write_episodes(2, [make_episode("other")])
        assert [one["id"] for one in client.get(url)["episodes"]] == ["other"]
        (path / "episodes/step_000002.jsonl").unlink()
        assert client.get(url)["total"] == 0


def test_a_run_that_is_deleted_and_one_that_comes(tmp_path: Path) -> None:
    path = lake_run(tmp_path / "runs")
    with InspectServer([tmp_path / "runs"], cache=tmp_path / "cache") as server:
        client = Client(server)
        client.get("/api/run/lake")
        client.get("/api/run/lake/episodes?step=1")
        lake_run(tmp_path / "runs", "second")
        shutil.rmtree(path)
        # The server knows its name for another second.
        assert client.ask("/api/run/lake/episodes?step=all")[0] in (200, 404)
        client.get("/api/run/lake/episode?step=1&row=0", status=404)
        wait_for(lambda: [run["name"] for run in client.get("/api/runs")["runs"]] == ["second"])
        client.get("/api/run/lake", status=404)


def test_equal_names_stay_apart_and_odd_ones_are_found(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        lake_run(tmp_path / folder, "same", steps=1)
    odd = "x,y #?%2F\n'<b>"
    lake_run(tmp_path / "a", odd, steps=1)
    from turnwise.inspect.export import encoded

    with InspectServer([tmp_path], cache=tmp_path / "cache") as server:
        client = Client(server)
        names = [run["name"] for run in client.get("/api/runs")["runs"]]
        assert names == ["same", odd.replace("\n", "?"), "b same"]
        for name in names:
            assert client.get(f"/api/run/{encoded(name)}")["name"] == name
        both = ",".join(map(encoded, names[:2]))
        found = client.get(f"/api/compare?runs={both}")
        assert found["paired"]["tasks"] == 1
        client.get("/api/compare?runs=same", status=400)


def drawn(row: str) -> tuple[Message, ...]:
    return (Message(role="user", content=f"Now:\n{row}\n_ G"),)


def test_contexts_say_why_they_began(tmp_path: Path) -> None:
    new = Observation(messages=())
    turns = (
        make_turn("a", restart=True, rewritten=new),
        make_turn("b", restart=True, messages=drawn("P _")),
        make_turn("c", restart=True, messages=drawn("_ P")),
        make_turn("d", parent=1, role="judge", trained=False),
        make_turn("e", parent=1, state="P G\n_ _"),
    )
    with make_run(tmp_path) as run:
        run.write_episodes(1, [make_episode(turns=turns)])
        run.write_pieces(chr)
    with InspectServer([run.path], cache=tmp_path / "cache") as server:
        client = Client(server)
        episode = client.get("/api/run/run/episode?split=step&step=1&row=0")
        (row,) = client.get("/api/run/run/episodes?step=1")["episodes"]
    assert [context["why"] and context["why"][:12] for context in episode["contexts"]] == [
        None,
        "the environm",
        "the window m",
        "branches fro",
    ]
    assert [context["parent"] for context in episode["contexts"]] == [None, None, None, 1]
    assert [turn["context"] for turn in episode["turns"]] == [0, 1, 2, 1, 3]
    assert (episode["turns"][3]["role"], episode["turns"][3]["trained"]) == ("judge", False)
    assert row["contexts"] == 4
    # Before a turn there is the board of the turn that it continues.
    assert [turn["before"] and turn["before"][:3] for turn in episode["turns"]] == [
        *(None, None, "P _", "P _", "P _")
    ]


def test_keys_of_states_draw_boards_that_messages_do_not(tmp_path: Path) -> None:
    turns = (make_turn("a", restart=True, state="P _\n_ G"), make_turn("b", state="_ P\n_ G"))
    with make_run(tmp_path) as run:
        run.write_episodes(1, [make_episode(turns=turns)])
    with InspectServer([run.path], cache=tmp_path / "cache") as server:
        episode = Client(server).get("/api/run/run/episode?split=step&step=1&row=0")
    assert episode["board"] == "P _\n_ G"
    boards = [(turn["before"], turn["board"]) for turn in episode["turns"]]
    assert boards == [("P _\n_ G", "_ P\n_ G"), ("_ P\n_ G", None)]


def test_an_index_is_kept_and_a_broken_one_is_built_again(tmp_path: Path) -> None:
    path, cache = lake_run(tmp_path), tmp_path / "cache"
    url = "/api/run/lake/episodes?split=step&step=1"
    before = sorted(file.name for file in path.rglob("*"))
    for _ in range(2):
        with InspectServer([path], cache=cache) as server:
            assert Client(server).get(url)["indexed"]["files"] >= 1
            assert Client(server).get(url)["total"] == 5
        (index,) = cache.glob("*.sqlite")
        index.write_bytes(b"not a database" * 100)
        for beside in cache.glob("*.sqlite-*"):
            beside.unlink()
    assert sorted(file.name for file in path.rglob("*")) == before  # nothing in the run directory


def test_many_ask_at_once(tmp_path: Path) -> None:
    path = lake_run(tmp_path, steps=6)
    with InspectServer([path], cache=tmp_path / "cache") as server:
        client = Client(server)

        def ask(step: int) -> int:
            return client.get(f"/api/run/lake/episodes?split=step&step={step % 6 + 1}")["total"]

        with ThreadPoolExecutor(8) as pool:
            assert set(pool.map(ask, range(24))) == {5}


def at_query(patch: pytest.MonkeyPatch, words: str, act: Callable[[], object]) -> None:
    """Acts before the next connection's query that has these words."""
    connect = sqlite3.connect

    def watched(*args: Any, **named: Any) -> sqlite3.Connection:
        patch.setattr(sqlite3, "connect", connect)
        database = connect(*args, **named)
        database.set_trace_callback(lambda query: words in query and act())
        return database

    patch.setattr(sqlite3, "connect", watched)


@pytest.mark.parametrize("torn", [False, True])
def test_an_index_that_two_make_at_once_is_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torn: bool
) -> None:
    run = RunFolder(lake_run(tmp_path))
    one, other = (EpisodeIndex(run, cache=tmp_path / "cache") for _ in range(2))
    assert one.path == other.path
    flock, unlink = fcntl.flock, Path.unlink
    arrived = threading.Event()
    work: list[Future[None]] = []

    def meet() -> None:
        """One is about to make or delete a file. It goes on once the other is done, or waits."""
        monkeypatch.setattr(fcntl, "flock", lambda *args: (arrived.set(), flock(*args)))
        work.append(pool.submit(other.fresh, "step", 1))
        work[0].add_done_callback(lambda _: arrived.set())
        arrived.wait()

    def meet_and_unlink(path: Path, **named: Any) -> None:
        monkeypatch.setattr(Path, "unlink", unlink)
        meet()
        unlink(path, **named)

    with ThreadPoolExecutor(1) as pool:
        if torn:
            one.path.write_bytes(b"not a database" * 100)
            monkeypatch.setattr(Path, "unlink", meet_and_unlink)
        else:
            at_query(monkeypatch, "journal_mode", meet)
        one.stale()
        work[0].result()
    assert len(one.rows("step", 1)) == len(other.rows("step", 1)) == 5


def test_a_search_sees_one_state_of_the_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder(lake_run(tmp_path))
    index = EpisodeIndex(run, cache=tmp_path / "cache")
    files = index.stale()
    for file in files:
        index.add(file)
    again: list[None] = []
    at_query(monkeypatch, "WHERE key IN", lambda: again.extend(map(index.add, files)))
    assert len(index.rows("step", 1)) == 5
    assert len(again) == len(files)


def test_an_answer_that_lacks_a_file_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake_run(tmp_path)
    answers = Answers([tmp_path], cache=tmp_path / "cache")
    answers.close()  # the test does what the background would
    index = answers.found.find("lake").index
    *files, last = index.stale()
    for file in files:
        index.add(file)
    search = index.search

    def search_then_add(query: Filter) -> tuple[int, list[dict[str, Json]]]:
        found = search(query)
        index.add(last)
        return found

    monkeypatch.setattr(index, "search", search_then_add)
    found = answers.episodes("lake", {"split": "step", "step": "all"})
    assert found["total"] == 10
    assert found["indexed"] == {"files": 3, "of": 4}


def test_an_index_is_deleted_when_it_was_not_used_for_long(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    used, unused = (
        EpisodeIndex(RunFolder(lake_run(tmp_path, name)), cache=cache)
        for name in ("used", "unused")
    )
    for index in (used, unused):
        index.stale()
    for index in (used, unused):
        os.utime(index.path, (0, 0))
    used.stale()
    cache_folder(cache)
    assert used.path.exists()
    assert not unused.path.exists()


def test_the_page_and_its_files_are_served(lake: tuple[Client, Path]) -> None:
    client, _ = lake
    status, page, headers = client.ask("/")
    assert status == 200
    assert b"static/main.js" in page
    assert headers["content-type"].startswith("text/html")
    status, script, headers = client.ask("/static/main.js")
    assert (status, headers["content-type"].partition(";")[0]) == (200, "text/javascript")
    assert json.dumps(script.decode())
    assert client.ask("/static/vendor/uPlot.min.css")[0] == 200
    for name in ("../server.py", "vendor/../main.js", "vendor/LICENSE-htm", "%2e%2e/server.py", ""):
        assert client.ask(f"/static/{name}")[0] == 404
