"""report.html and other exports, opened from a file in a real browser: they show the run, ask for
nothing, and nothing hostile in them runs."""

from pathlib import Path

import pytest
from lake_runs import ODD, OWNED
from tabs import Keep, Open, at, has, says

from turnwise.inspect.export import export_comparison
from turnwise.inspect.report import write_report

AFTER_SCRIPTS = "</body>"


@pytest.fixture(scope="module")
def report(runs: Path) -> Path:
    return write_report(runs / "lake-bi-level")


@pytest.fixture(scope="module")
def hostile(runs: Path) -> Path:
    return write_report(runs / ODD)


def test_a_report_shows_the_run_without_a_server(report: Path, open_tab: Open, keep: Keep) -> None:
    tab = open_tab(report.as_uri())
    says(tab.page.locator("h1"), "lake-bi-level")
    says(tab.page.locator(".outcome-table"), "shortest path")
    chart = tab.page.get_by_role("img", name="rollout/reward,")
    assert "at step 12" in chart.get_attribute("aria-label")
    has(tab.page.get_by_role("link", name="Play"), 0)  # it needs a server
    keep(tab, "report")
    tab.page.get_by_role("link", name="Episodes").click()
    rows = tab.page.locator("table.episodes tbody tr")
    has(rows, 6)
    tab.page.get_by_label("Text").fill("no reply says this")
    has(rows, 0)
    tab.page.get_by_label("Text").fill("Walk from P to G")  # of the system message
    has(rows, 0)
    tab.page.get_by_label("Text").fill("")
    has(rows, 6)
    tab.page.get_by_label("Sort by").select_option("-turns")
    at(tab.page, "sort=-turns")
    rows.first.get_by_role("link").click()
    says(tab.page.locator(".near"), "1 of 6")
    assert tab.page.locator(".token").count() > 0
    tab.page.get_by_label("Colour tokens by").select_option("entropy")
    says(tab.page.locator(".legend"), "unsure")
    tab.page.keyboard.press("j")
    says(tab.page.locator(".near"), "2 of 6")
    tab.page.goto(f"{report.as_uri()}#/run/lake-bi-level/step/2/1000")
    says(tab.page.locator(".note"), "does not contain")
    assert [address for address in tab.asked if not address.startswith(("file:", "data:"))] == []


def test_a_comparison_in_one_file(runs: Path, tmp_path: Path, open_tab: Open) -> None:
    page = tmp_path / "compared.html"
    page.write_text(export_comparison([runs / "lake-bi-level", runs / "lake-grpo"]))
    tab = open_tab(page.as_uri())
    says(tab.page.locator("table.diff"), "algo.name")
    says(tab.page.locator("main"), "24 tasks")
    label = tab.page.get_by_role("img", name="rollout/reward,").get_attribute("aria-label")
    assert "lake-grpo" in label


def test_nothing_hostile_in_a_report_runs(hostile: Path, open_tab: Open) -> None:
    tab = open_tab(hostile.as_uri())
    says(tab.page.locator(".events"), "<script>")
    tab.page.get_by_role("link", name="Episodes").click()
    rows = tab.page.locator("table.episodes tbody a")
    has(rows, 3)
    tab.page.get_by_label("Text").fill("it broke")  # in an error
    has(rows, 1)
    tab.page.get_by_label("Text").fill("GO")  # in the prompts alone
    has(rows, 3)
    rows.nth(1).click()
    says(tab.page.locator(".conversation"), "it broke <script>")
    assert tab.page.locator("#app script, #app img").count() == 0
    assert tab.page.title() != "owned"


@pytest.mark.parametrize("policy", [True, False])
def test_the_policy_would_stop_a_script_that_slipped_in(
    report: Path, tmp_path: Path, open_tab: Open, policy: bool
) -> None:
    text = report.read_text().replace(AFTER_SCRIPTS, f"<p id=slipped>{OWNED}</p></body>", 1)
    if not policy:  # so that the test can fail
        text = text.replace("Content-Security-Policy", "x-none", 1)
    page = tmp_path / "page.html"
    page.write_text(text)
    tab = open_tab(page.as_uri())
    tab.page.locator("#slipped").wait_for(state="attached")
    says(tab.page.locator("h1"), "lake-bi-level")
    marked = "document.querySelector('#slipped').dataset.ran"
    assert tab.page.evaluate(marked) == (None if policy else "yes")
    refused = [problem for problem in tab.problems if "Content Security Policy" in problem]
    assert bool(refused) == policy
    tab.problems.clear()
