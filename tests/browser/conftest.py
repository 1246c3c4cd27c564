"""One browser, one server and a few runs for all tests of the page."""

import os
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from lake_runs import games_run, lake_run, odd_run
from tabs import CHROMIUM, PATIENCE, Keep, Open, Tab

from turnwise.config.schema import Config
from turnwise.evaluate.evaluation import PolicyPlayer
from turnwise.inspect.server import InspectServer


@pytest.fixture(scope="session")
def chromium() -> str:
    if CHROMIUM is None:
        pytest.skip("needs chromium; `make browser` installs it")
    return CHROMIUM


@pytest.fixture(scope="module")  # its event loop is closed before the tests of other files run
def browser(chromium: str) -> Generator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # A test machine's user is often root, for whom Chromium has no sandbox.
        flags = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        opened = playwright.chromium.launch(
            executable_path=chromium, args=flags, timeout=2 * PATIENCE
        )
        yield opened
        opened.close()


@pytest.fixture(scope="session")
def runs(chromium: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs that can be compared, one of other games and one with hostile
    texts. Without a browser there is nothing to make them for."""
    folder = tmp_path_factory.mktemp("runs")
    lake_run(folder, "lake-bi-level", steps=12, skill=0.16)
    lake_run(folder, "lake-grpo", steps=12, skill=0.1, seed=1)
    (folder / "lake-bi-level" / "checkpoints" / "step_000012").mkdir(parents=True)
    games_run(folder)
    odd_run(folder)
    return folder


@pytest.fixture(scope="module")
def server(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[InspectServer]:
    cache = tmp_path_factory.mktemp("cache")
    with InspectServer([runs], cache=cache, load_policy=small_policy) as started:
        yield started


def small_policy(config: Config, run: Path, name: str) -> PolicyPlayer:
    """The embedded model in place of a checkpoint: a run made by hand has none."""
    from turnwise.train.load_policy import load_policy

    return load_policy(config, name=name)


@pytest.fixture(scope="module")
def windows(browser: Any) -> dict[tuple[str, int, str], Tab]:
    """Windows that stay open between tests: loading the page takes longer than most tests."""
    return {}


@pytest.fixture
def open_tab(browser: Any, windows: dict[tuple[str, int, str], Tab]) -> Generator[Open]:
    """Opens an address in a window of the wanted kind. Errors on any of them fail the test at its
    end."""
    used: list[Tab] = []

    def open_it(
        address: str, *, width: int = 1200, height: int = 800, scheme: str = "light"
    ) -> Tab:
        file = address.partition("#")[0]
        kind = (file, width, scheme)
        if kind in windows:
            windows[kind].page.goto(f"{file}#/nothing")  # the view of the last test goes
        else:
            windows[kind] = new_tab(browser, width=width, height=height, scheme=scheme)
        tab = windows[kind]
        tab.problems.clear()
        tab.asked.clear()
        used.append(tab)
        tab.page.goto(address)
        return tab

    yield open_it
    assert [problem for tab in used for problem in tab.problems] == []


def new_tab(browser: Any, *, width: int, height: int, scheme: str) -> Tab:
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=scheme, reduced_motion="reduce"
    )
    context.set_default_timeout(PATIENCE)
    tab = Tab(page=context.new_page(), problems=[], asked=[])
    tab.page.on("pageerror", lambda error: tab.problems.append(str(error)))
    tab.page.on(
        "console", lambda said: tab.problems.append(said.text) if said.type == "error" else None
    )
    tab.page.on("request", lambda request: tab.asked.append(request.url))
    return tab


@pytest.fixture
def keep(request: pytest.FixtureRequest) -> Keep:
    """Keeps a picture of the page where TURNWISE_SCREENSHOTS names a folder."""
    folder = os.environ.get("TURNWISE_SCREENSHOTS")

    def take(tab: Tab, name: str, *, height: int | None = None) -> None:
        if folder:
            path = Path(request.config.rootpath, folder, f"{name}.png")
            width = tab.page.viewport_size["width"]
            clip = {"x": 0, "y": 0, "width": width, "height": height} if height else None
            tab.page.wait_for_load_state("networkidle")
            tab.page.screenshot(path=path, animations="disabled", clip=clip)

    return take
