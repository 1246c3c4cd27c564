"""Who the inspector answers: the person in front of it, and not the pages of other sites."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from inspect_parts import Client, lake_run

from turnwise.evaluate.evaluation import PolicyPlayer
from turnwise.inspect.server import InspectServer

PLAY = {"env": "bandit", "player": "random"}


def no_policy(*_: object) -> PolicyPlayer:
    raise AssertionError


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    lake_run(folder, steps=1)
    return folder


@pytest.fixture(scope="module")
def plain(runs: Path) -> Iterator[Client]:
    with InspectServer([runs], load_policy=no_policy) as server:
        yield Client(server)


@pytest.fixture(scope="module")
def guarded(runs: Path) -> Iterator[Client]:
    with InspectServer([runs], load_policy=no_policy, token="open-sesame") as server:
        yield Client(server)


def test_every_answer_has_its_headers(plain: Client) -> None:
    for path in ("/", "/static/main.js", "/api/runs", "/api/nothing", "/nothing"):
        _, _, headers = plain.ask(path)
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert headers["access-control-allow-origin"] is None


@pytest.mark.parametrize("path", ["/", "/api/runs", "/static/main.js"])
@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", ""])
def test_names_that_only_lead_here_are_refused(plain: Client, path: str, host: str) -> None:
    """DNS rebinding: the page of another site whose name resolves to this machine."""
    assert plain.ask(path, Host=host)[0] == 403


def test_pages_of_other_sites_are_refused(plain: Client) -> None:
    evil = "http://evil.example"
    assert plain.ask("/api/runs", Origin=evil)[0] == 403
    assert plain.ask("/api/runs", Origin="null")[0] == 403
    assert plain.ask("/api/runs", Sec_Fetch_Site="cross-site")[0] == 403
    assert plain.ask("/api/runs", Sec_Fetch_Site="same-site")[0] == 403  # another port
    assert plain.ask("/api/runs", Sec_Fetch_Site="same-origin")[0] == 200
    assert plain.ask("/", Sec_Fetch_Site="cross-site")[0] == 200  # a link may lead here


def test_only_our_page_may_play(plain: Client) -> None:
    json, own = "application/json", f"http://{plain.address}"
    other = f"http://{plain.address.partition(':')[0]}:1"

    def play(**headers: str) -> int:
        return plain.ask("/api/play", method="POST", body=PLAY, **headers)[0]

    assert play(Content_Type=json, Origin=own) == 200
    assert play(Content_Type=json, Origin=other) == 403  # the same machine, another program
    assert play(Content_Type=json, Origin="http://evil.example") == 403
    assert play(Content_Type="text/plain", Origin=own) == 415  # what a form can send
    assert play() == 415
    assert plain.ask("/api/play/x", method="DELETE", Origin="http://evil.example")[0] == 403
    assert plain.ask("/api/play", method="OPTIONS", Origin="http://evil.example")[0] in (403, 405)
    assert plain.ask("/api/runs", method="POST", body={}, Content_Type=json)[0] == 405


def test_a_token_is_asked_for_and_kept_in_a_cookie(guarded: Client) -> None:
    for path in ("/", "/api/runs", "/static/main.js", "/?token=wrong", "/api/envs"):
        assert guarded.ask(path)[0] == 401
    assert guarded.ask("/api/runs?token=open-sesame")[0] == 401  # the page's url alone has it
    assert guarded.ask("/api/runs", Authorization="Bearer open-sesame")[0] == 200
    status, _, headers = guarded.ask("/?token=open-sesame")
    assert status == 200
    cookie = headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    kept = cookie.partition(";")[0]
    assert guarded.ask("/api/runs", Cookie=kept)[0] == 200
    assert guarded.ask("/", Cookie=kept)[2]["set-cookie"] is None
    assert guarded.ask("/api/runs", Cookie=kept, Origin="http://evil.example")[0] == 403
    assert guarded.ask("/api/runs", Cookie=kept + "x")[0] == 401


def test_beyond_this_machine_a_token_is_made(runs: Path) -> None:
    with pytest.raises(ValueError, match="needs a token"):
        InspectServer([runs], host="0.0.0.0")
    words = [sys.executable, "-m", "turnwise", "inspect", str(runs), "--no-open", "--port", "0"]
    process = subprocess.Popen(
        [*words, "--host", "0.0.0.0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        url, _, token = line.strip().rpartition(" ")[2].partition("/?token=")
        assert len(token) > 20
        client = Client.__new__(Client)
        client.address = f"127.0.0.1:{url.rpartition(':')[2]}"
        assert client.ask("/api/runs")[0] == 401
        assert client.ask("/api/runs", Authorization=f"Bearer {token}")[0] == 200
    finally:
        process.terminate()
        _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert "Traceback" not in said


def test_large_requests_are_refused(plain: Client) -> None:
    headers = {"Content_Type": "application/json", "Content_Length": str(10**9)}
    assert plain.ask("/api/play", method="POST", **headers)[0] == 413
    body = {"env": "x" * 200_000}
    own = {"Content_Type": "application/json"}
    assert plain.ask("/api/play", method="POST", body=body, **own)[0] == 400
