"""report.html in a real browser: it renders, nothing hostile runs, and it asks for nothing from the
network."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from run_fixtures import fill_step, make_episode, make_run, make_turn

from turnwise.log.report import write_report

BROWSER = next(
    (
        path
        for name in ("chromium", "chromium-browser", "google-chrome")
        if (path := shutil.which(name))
    ),
    None,
)
OWNED = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="needs chromium: apt-get install chromium"),
]


def browse(page: Path, *options: str, profile: Path) -> subprocess.CompletedProcess[str]:
    assert BROWSER is not None
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={profile}",
        "--virtual-time-budget=2000",
    ]
    return subprocess.run(
        [BROWSER, *flags, *options, page.as_uri()], capture_output=True, text=True, timeout=120
    )


@pytest.fixture
def page(tmp_path: Path) -> Path:
    with make_run(tmp_path) as run:
        for step in range(1, 6):
            turns = (make_turn("up", restart=True), make_turn(OWNED, reward=1.0))
            fill_step(
                run, step, [make_episode(f"{step}", turns=turns)], {"rollout/reward": step / 5}
            )
        run.write_pieces(lambda token: chr(token) if token > 2 else "<end>")
    return write_report(run.path)


def test_it_renders_and_nothing_in_it_runs(page: Path, tmp_path: Path) -> None:
    done = browse(page, "--dump-dom", profile=tmp_path / "profile")
    assert done.returncode == 0, done.stderr
    assert "<title>run</title>" in done.stdout
    assert "owned" not in done.stdout.partition("</title>")[0]
    assert done.stdout.count("<polyline") == 1
    assert "<script" not in done.stdout
    assert done.stdout.rstrip().endswith("</html>")


def test_the_policy_would_stop_a_script_even_if_one_slipped_in(page: Path, tmp_path: Path) -> None:
    page.write_text(page.read_text().replace("<body>", f"<body>{OWNED}", 1))
    done = browse(page, "--dump-dom", profile=tmp_path / "profile")
    assert "<title>run</title>" in done.stdout
    bare = tmp_path / "bare.html"
    bare.write_text(page.read_text().replace("Content-Security-Policy", "x-none", 1))
    assert "<title>owned</title>" in browse(bare, "--dump-dom", profile=tmp_path / "profile").stdout


def test_it_can_be_looked_at(page: Path, tmp_path: Path) -> None:
    picture = tmp_path / "report.png"
    size = "--window-size=1000,1400"
    done = browse(page, f"--screenshot={picture}", size, profile=tmp_path / "profile")
    assert done.returncode == 0, done.stderr
    assert picture.stat().st_size > 10_000
