"""`turnwise inspect` in a real browser: follow a run, open an episode, filter, compare."""

import json
from collections.abc import Generator
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from lake_runs import ODD, LakeRun, make_run
from tabs import Keep, Open, at, has, says, until

from turnwise.inspect.server import InspectServer


@pytest.fixture
def live(runs: Path) -> Generator[LakeRun]:
    """A run that goes on."""
    made = LakeRun(runs, "live", steps=6, skill=0.3, seed=3)
    made.begin()
    made.grow(1)
    yield made
    made.run.close()


def test_runs_are_listed_with_state_and_outcome(
    server: InspectServer, open_tab: Open, keep: Keep
) -> None:
    tab = open_tab(f"{server.url}/#/")
    row = tab.page.locator("tr", has_text="lake-bi-level")
    for part in ("ended", "12 / 12", "frozen_lake", "bi_level_gae", "12.0 %"):
        says(row, part)
    tab.page.get_by_label("Find").fill("grpo")
    has(tab.page.locator("table.runs tbody tr"), 1)
    tab.page.get_by_label("Find").fill("lake-")
    has(tab.page.locator("table.runs tbody tr"), 2)
    keep(tab, "inspect-runs", height=330)
    assert all(address.startswith((server.url, "data:")) for address in tab.asked)


def test_a_live_run_is_followed_until_it_ends(
    server: InspectServer, open_tab: Open, live: LakeRun
) -> None:
    tab = open_tab(f"{server.url}/#/run/live")
    head = tab.page.locator(".title")
    says(head, "running")
    says(head, "live")
    says(head, "step 1 of 6")
    chart = tab.page.get_by_role("img", name="rollout/reward,")
    says(tab.page.locator("main"), "rollout/reward")
    live.grow(2)
    live.grow(3)
    says(head, "step 3 of 6")
    tab.page.goto(f"{server.url}/#/run/live/episodes?split=step&step=all")
    says(tab.page.locator(".count"), "48 episodes")
    live.grow(4)
    says(tab.page.locator(".count"), "64 episodes")
    tab.page.goto(f"{server.url}/#/run/live")
    says(head, "step 4 of 6")
    assert "at step 4" in chart.get_attribute("aria-label")
    rows = [address for address in tab.asked if "/metrics" in address]
    assert "after=" not in rows[0]
    assert "after=" in rows[-1]  # only what is new is asked for
    live.evaluate(6)
    live.end()
    says(head, "ended")
    has(tab.page.locator(".live"), 0)


def test_curves_have_intervals_baselines_and_smoothing(
    server: InspectServer, open_tab: Open, keep: Keep
) -> None:
    tab = open_tab(f"{server.url}/#/run/lake-bi-level")
    says(tab.page.locator(".outcome-table"), "best blind player")
    says(tab.page.locator("main"), "Token fidelity")
    chart = tab.page.locator(".chart", has_text="eval/success")
    says(chart, "[")  # the interval beside the number
    keep(tab, "inspect-run")
    plain = ink_of(chart)
    tab.page.get_by_label("intervals").uncheck()
    tab.page.wait_for_timeout(100)
    assert ink_of(chart) != plain
    noisy = tab.page.locator(".chart", has_text="train/entropy")
    before = ink_of(noisy)
    tab.page.get_by_label("Smoothing").fill("0.9")
    says(tab.page.locator("output"), "0.90")
    tab.page.wait_for_timeout(100)
    assert ink_of(noisy) != before
    tab.page.get_by_label("Find").fill("loss")
    has(tab.page.locator(".chart"), 2)


def test_findings_stand_under_their_curves(server: InspectServer, open_tab: Open) -> None:
    tab = open_tab(f"{server.url}/#/run/games")
    says(tab.page.locator(".finding", has_text="format collapse"), "only 20% of the replies")
    chart = tab.page.locator(".chart", has_text="rollout/format_valid")
    says(chart.locator(".finding-at"), "only 20% of the replies hold an action")
    has(tab.page.locator(".finding-at"), 1)
    # Sums that cancel are 0.
    says(tab.page.locator(".chart", has_text="rollout/reward").locator(".value"), "0")
    has(tab.page.locator(".chart .value", has_text="e-"), 0)


WATCHED = """() => { globalThis.plots = []; globalThis.uPlot = class extends uPlot {
  constructor(...given) { super(...given); plots.push(this); } }; }"""


def test_charts_of_one_point_and_of_numbers_that_become_zero(
    server: InspectServer, open_tab: Open, runs: Path
) -> None:
    with make_run(runs, name="few") as run:
        run.write_metrics(1, {"train/entropy": 1.0, "eval/reward": 0.5})
        run.write_metrics(2, {"train/entropy": 2.0})
        tab = open_tab(f"{server.url}/#/")
        tab.page.evaluate(WATCHED)
        tab.page.goto(f"{server.url}/#/run/few")
        has(tab.page.locator(".chart canvas"), 2)
        scale = "plots[0].scales.x.min === 0 && plots[0].scales.x.max === 2"
        until(tab.page, scale)  # around the one evaluation in step 1
        tab.page.get_by_label("log scale").check()
        until(tab.page, "plots.length === 4 && plots[3].scales.y.distr === 3")
        run.write_metrics(3, {"train/entropy": 0.0})
        until(tab.page, "plots.length === 5 && plots[4].scales.y.distr === 1")
    tab = open_tab(f"{server.url}/#/compare/empty-a,empty-b")
    says(tab.page.locator("main"), "No metrics are written yet.")
    tab.problems.clear()  # there are no such runs


def ink_of(chart: Any) -> str:
    """What is drawn on a chart."""
    return chart.locator("canvas").evaluate("canvas => canvas.toDataURL()")


def test_episodes_are_filtered_sorted_and_opened(server: InspectServer, open_tab: Open) -> None:
    tab = open_tab(f"{server.url}/#/run/lake-bi-level/episodes?split=step&step=1")
    rows = tab.page.locator("table.episodes tbody tr")
    has(rows, 16)
    tab.page.get_by_label("Success").select_option("yes")
    says(tab.page.locator(".count"), "episode")
    at(tab.page, "success=yes")
    has(rows.locator(".no"), 0)
    won = rows.count()
    assert 0 < won < 16
    tab.page.get_by_label("Success").select_option("")
    tab.page.get_by_label("Reward from").fill("0.9")
    at(tab.page, "min_reward=0.9")
    tab.page.get_by_label("Reward from").fill("")
    has(rows, 16)
    tab.page.get_by_label("Sort by").select_option("-reward")
    at(tab.page, "sort=-reward")
    tab.page.get_by_label("Text").fill("not sure")
    at(tab.page, "text=not")
    says(tab.page.locator(".count"), "episode")
    tab.page.get_by_label("Text").fill("no reply says this")
    says(tab.page.locator("main"), "No episode passes these filters")
    tab.page.get_by_label("Text").fill("")
    has(rows, 16)
    tab.page.get_by_role("button", name="Evaluation").click()
    has(rows, 24)
    rows.first.get_by_role("link").click()
    says(tab.page.locator(".crumbs"), "evaluation 10")
    says(tab.page.locator(".near"), "1 of 24")


def test_filters_changed_at_once_all_count(server: InspectServer, open_tab: Open) -> None:
    """An input acts a moment after the last key; a filter that was changed meanwhile stays."""
    tab = open_tab(f"{server.url}/#/run/lake-bi-level/episodes?split=step&step=1")
    has(tab.page.locator("table.episodes tbody tr"), 16)
    tab.page.get_by_label("Reward from").fill("0.9")
    tab.page.get_by_label("Sort by").select_option("-reward")
    at(tab.page, "min_reward=0.9")
    at(tab.page, "sort=-reward")
    tab.page.get_by_label("Text").fill("goal")
    tab.page.get_by_role("button", name="Groups").click()
    at(tab.page, "text=goal")
    at(tab.page, "view=groups")
    tab.page.get_by_role("button", name="List").click()
    tab.page.get_by_label("Text").fill("hole")
    tab.page.get_by_role("link", name="Timeline").click()
    at(tab.page, "/timeline")
    tab.page.locator(".gantt svg").wait_for()
    at(tab.page, "/timeline")  # the view that was left does not come back


def test_a_filter_that_finds_nothing_stays_visible(server: InspectServer, open_tab: Open) -> None:
    base = f"{server.url}/#/run/games/episodes?split=step&step=1"
    tab = open_tab(f"{base}&status=env_error&env=webshop")
    says(tab.page.locator("main"), "No episode passes these filters")
    chosen = "one => one.selectedOptions[0].textContent"
    assert tab.page.get_by_label("Status").evaluate(chosen) == "env error (0)"
    assert tab.page.get_by_label("Environment").evaluate(chosen) == "webshop (0)"
    tab.page.goto(f"{base}&min_reward=abc")
    says(tab.page.get_by_role("alert"), "min_reward is a number")
    has(tab.page.get_by_text("Loading episodes"), 0)
    tab.problems.clear()  # the browser notes every answer of 4xx


def test_tokens_are_coloured_and_show_their_numbers(
    server: InspectServer, open_tab: Open, keep: Keep
) -> None:
    tab = open_tab(f"{server.url}/#/run/lake-bi-level/episodes?split=step&step=2&sort=-turns")
    tab.page.locator("table.episodes tbody a").first.click()
    token = tab.page.locator(".token").nth(1)
    token.wait_for()
    offered = tab.page.get_by_label("Colour tokens by").locator("option").all_text_contents()
    assert offered[:5] == ["advantage", "value", "return", "log-prob", "sampler gap"]
    assert "entropy" in offered
    tints = {}
    for name in ("advantage", "value", "logprob", "entropy", "mask", "none"):
        tab.page.get_by_label("Colour tokens by").select_option(name)
        tints[name] = token.evaluate("one => getComputedStyle(one).backgroundColor")
    assert len(set(tints.values())) == 6
    tab.page.get_by_label("Colour tokens by").select_option("gap")
    says(tab.page.locator(".legend"), "trainer less likely")
    signs = "all => all.map(one => one.style.background.includes('--worse'))"
    assert set(tab.page.locator(".token").evaluate_all(signs)) == {True, False}
    tab.page.get_by_label("Colour tokens by").select_option("advantage")
    token.hover()
    card = tab.page.locator(".token-card")
    for part in ("advantage", "value", "return", "log-prob", "sampler gap", "entropy", "trained"):
        says(card, part)
    keep(tab, "inspect-episode")
    says(tab.page.locator(".legend"), "worse than expected")


def test_tokens_are_coloured_by_entropy_where_it_is_stored(
    server: InspectServer, open_tab: Open
) -> None:
    tab = open_tab(f"{server.url}/#/run/lake-bi-level/step/2/0")
    choice = tab.page.get_by_label("Colour tokens by")
    tokens = tab.page.locator("section.turn").first.locator(".token")
    tokens.first.wait_for()
    has(tab.page.get_by_text("No entropy is stored"), 0)
    choice.select_option("entropy")
    legend = tab.page.locator(".legend")
    for part in ("0.1", "sure", "unsure"):
        says(legend, part)
    strength = "all => all.map(one => parseInt(one.style.background.match(/([0-9]+)%/)[1]))"
    found = tokens.evaluate_all(strength)
    assert found == sorted(set(found))  # the run's entropy grows from token to token
    tab.page.goto(f"{server.url}/#/run/lake-grpo/step/2/0")
    says(tab.page.locator(".toolbar"), "No entropy is stored for this step.")
    assert "entropy" not in choice.locator("option").all_text_contents()
    tab.page.goto(f"{server.url}/#/run/lake-bi-level/eval/10/0")
    says(tab.page.locator(".toolbar"), "No entropy is stored for evaluations.")
    tokens.first.hover()
    says(tab.page.locator(".token-card tr", has_text="trained"), "no")


def test_turns_on_the_time_line_and_the_board(server: InspectServer, open_tab: Open) -> None:
    tab = open_tab(f"{server.url}/#/run/lake-bi-level/episodes?split=step&step=1&sort=-turns")
    tab.page.locator("table.episodes tbody a").first.click()
    turns = tab.page.locator("section.turn")
    turns.first.wait_for()
    count = turns.count()
    has(tab.page.locator(".timeline .slot"), count)
    tab.page.locator(".timeline .slot").nth(count - 1).click()
    says(tab.page.locator(".side h3").first, f"Turn {count}")
    has(tab.page.locator("section.turn.selected"), 1)
    board = tab.page.locator(".side .board").first
    assert board.locator(".cell").count() == 16
    assert board.locator(".cell.player").count() == 1
    tab.page.keyboard.press("p")
    says(tab.page.locator(".side h3").first, f"Turn {count - 1}")


def test_boards_of_numbers_are_drawn_whole(server: InspectServer, open_tab: Open) -> None:
    tab = open_tab(f"{server.url}/#/run/games/step/1/0")
    boards = tab.page.locator(".conversation .board")
    boards.first.wait_for()
    turns = tab.page.locator("section.turn").count()
    has(boards, turns + 1)
    cells = boards.evaluate_all("all => all.map(one => one.querySelectorAll('.cell').length)")
    assert set(cells) == {16}
    shown = [int(text) for text in boards.last.locator(".cell").all_text_contents() if text]
    assert max(shown) >= 16
    for _ in range(turns - 1):
        tab.page.keyboard.press("n")
    says(tab.page.locator(".side h3").first, f"Turn {turns}")
    assert tab.page.locator(".side .cell").count() == 32  # before and after
    # Where observations have no board, the keys of states draw it.
    tab.page.goto(f"{server.url}/#/run/games/step/2/0")
    says(tab.page.locator(".crumbs"), "step 2")
    has(tab.page.locator(".conversation .board"), 0)
    has(tab.page.locator(".side .board").first.locator(".cell"), 16)
    has(tab.page.locator(".side .board").first.locator(".cell.player"), 1)
    for step, line in ((3, "---------------------------------------"), (4, "Front")):
        tab.page.goto(f"{server.url}/#/run/games/step/{step}/0")
        drawing = tab.page.locator(".message.from-user pre.drawing").first
        says(drawing, line)
        assert "mono" in drawing.evaluate("one => getComputedStyle(one).fontFamily").lower()


def test_two_episodes_of_a_group_side_by_side(server: InspectServer, open_tab: Open) -> None:
    tab = open_tab(f"{server.url}/#/run/lake-bi-level/episodes?split=step&step=2&view=groups")
    group = tab.page.locator(".groups li").nth(1)
    group.get_by_role("checkbox").nth(0).check()
    group.get_by_role("checkbox").nth(1).check()
    group.get_by_role("link", name="Side by side").click()
    has(tab.page.locator(".pair > .episode"), 2)
    names = tab.page.locator(".pair h2").all_text_contents()
    assert names == ["train-000002-g1-m0", "train-000002-g1-m1"]


def test_a_rollout_in_time(server: InspectServer, open_tab: Open, keep: Keep) -> None:
    tab = open_tab(f"{server.url}/#/run/lake-bi-level/timeline?split=step&step=2")
    bars = tab.page.locator(".gantt .episode-bars")
    has(bars, 16)
    assert bars.first.locator("rect.generate").count() >= 1
    assert bars.first.locator("rect.env").count() >= 1
    keep(tab, "inspect-timeline", height=660)
    bars.nth(3).click()
    says(tab.page.locator(".crumbs"), "episode 3")
    tab.page.go_back()
    bars.nth(3).focus()
    tab.page.keyboard.press("Tab")
    says(tab.page.locator(".reading"), "train-000002-g2-m0: ")
    tab.page.keyboard.press("Enter")
    says(tab.page.locator(".crumbs"), "episode 4")


PLACES = """all => all.map(row => [...row.querySelectorAll('rect.generate, rect.env')]
  .map(bar => [bar.classList[0], Number(bar.getAttribute('x')),
    Number(bar.getAttribute('x')) + Number(bar.getAttribute('width'))]))"""


def test_bars_lie_where_they_happened(server: InspectServer, open_tab: Open) -> None:
    tab = open_tab(f"{server.url}/#/run/lake-bi-level/timeline?split=step&step=2")
    rows = tab.page.locator(".gantt .episode-bars")
    has(rows, 16)
    has(tab.page.get_by_text("is not stored"), 0)
    found = rows.evaluate_all(PLACES)
    firsts = [row[0][1] for row in found]
    # Every member of a group begins 80 ms after the last, the next group 40 ms after its first.
    assert firsts[0] < firsts[2] < firsts[1] == pytest.approx(firsts[4])
    for row in found:
        assert [kind for kind, *_ in row[:3]] == ["env", "generate", "env"]  # a reset first
        assert all(later[1] > bar[1] for bar, later in pairwise(row))
        queued = [row[turn + 1][1] - row[turn][2] for turn in range(0, len(row) - 1, 2)]
        assert min(queued) > 5  # pixels between environment and generation
    titles = rows.first.locator("title").all_text_contents()
    assert titles[0] == "reset: 100 ms from 0 s"
    assert titles[1].startswith("turn 1, generation: ")
    assert titles[1].endswith(" from 160 ms")
    rows.nth(1).hover()
    says(tab.page.locator(".reading"), "from 80 ms to")


def test_a_run_without_starts_is_drawn_from_zero(server: InspectServer, open_tab: Open) -> None:
    tab = open_tab(f"{server.url}/#/run/lake-grpo/timeline?split=step&step=2")
    rows = tab.page.locator(".gantt .episode-bars")
    has(rows, 16)
    says(tab.page.locator("main"), "When they started is not stored, so all episodes begin at 0.")
    found = rows.evaluate_all(PLACES)
    assert len({row[0][1] for row in found}) == 1
    assert all(row[0][0] == "generate" for row in found)


def test_times_that_nobody_measured_break_no_chart(
    server: InspectServer, open_tab: Open, runs: Path
) -> None:
    made = LakeRun(runs, "broken-times", steps=1)
    made.begin()
    made.grow(1)
    made.run.close()
    file = made.run.path / "timings" / "step_000001.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows[0]["reset_start"] = -5.0
    rows[1]["generate_start"] = [1e308] * len(rows[1]["generate_start"])
    rows[2]["env"] = [None] * len(rows[2]["env"])
    rows[3]["env_start"] = ["<b>soon</b>"] * len(rows[3]["env_start"])
    rows[4]["generate"] = [-1e300] * len(rows[4]["generate"])
    rows[5] = {name: rows[5][name] for name in ("id", "generate", "env")}
    rows[6]["generate_start"] = [0.5]
    del rows[7]["env_start"]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows) + "NaN\n")
    tab = open_tab(f"{server.url}/#/run/broken-times/timeline?split=step&step=1")
    drawn = tab.page.locator(".gantt .episode-bars")
    has(drawn, 14)
    says(tab.page.locator("main"), "When the bars of 4 of 14 episodes started is not stored")
    left, right = tab.page.locator(".gantt line.grid").evaluate_all(
        "all => [all[0], all[4]].map(one => Number(one.getAttribute('x1')))"
    )
    for row in drawn.evaluate_all(PLACES):
        assert all(left <= begin <= end <= right + 1 for _, begin, end in row)


def test_runs_are_compared(server: InspectServer, open_tab: Open, keep: Keep) -> None:
    tab = open_tab(f"{server.url}/#/")
    tab.page.get_by_label("Compare lake-bi-level").check()
    tab.page.get_by_label("Compare lake-grpo").check()
    tab.page.get_by_role("button", name="Compare 2").click()
    says(tab.page.locator("table.diff"), "algo.name")
    says(tab.page.locator("main"), "Paired test")
    says(tab.page.locator("main"), "24 tasks")
    chart = tab.page.get_by_role("img", name="rollout/reward,")
    label = chart.get_attribute("aria-label")
    assert "lake-bi-level" in label
    assert "lake-grpo" in label
    keep(tab, "inspect-compare")


def test_hostile_texts_are_shown_and_never_run(server: InspectServer, open_tab: Open) -> None:
    name = quote(ODD, safe="")
    tab = open_tab(f"{server.url}/#/run/{name}")
    says(tab.page.locator("h1"), ODD)
    says(tab.page.locator(".events"), "<script>")
    tab.page.locator("summary", has_text="odd").last.click()
    for address in ("/episodes?split=step&step=2", "/timeline", "/step/2/1"):
        tab.page.goto(f"{server.url}/#/run/{name}{address}")
        says(tab.page.locator("main"), "<script>")
    says(tab.page.locator(".conversation"), "it broke <script>")
    says(tab.page.locator(".tree"), "context 1")
    assert tab.page.locator("main script, main img").count() == 0
    assert "owned" not in tab.page.title().partition("·")[0]
    tab.page.get_by_role("button", name="Show all").first.click()
    has(tab.page.get_by_role("button", name="Show all"), 0)


def test_every_part_can_be_reached_by_keyboard(server: InspectServer, open_tab: Open) -> None:
    tab = open_tab(f"{server.url}/#/run/lake-bi-level/episodes?split=step&step=1")
    has(tab.page.locator("table.episodes tbody tr"), 16)
    tab.page.keyboard.press("j")
    tab.page.keyboard.press("j")
    tab.page.keyboard.press("Enter")
    says(tab.page.locator(".near"), "2 of 16")
    tab.page.keyboard.press("j")
    says(tab.page.locator(".near"), "3 of 16")
    tab.page.keyboard.press("ArrowLeft")
    says(tab.page.locator(".near"), "2 of 16")
    tab.page.locator(".tokens").first.focus()
    tab.page.keyboard.press("ArrowRight")
    tab.page.keyboard.press("ArrowRight")
    has(tab.page.locator('.token.at[data-token="1"]'), 1)
    says(tab.page.locator(".near"), "2 of 16")
    outline = "getComputedStyle(document.activeElement).outlineStyle"
    assert tab.page.evaluate(outline) == "solid"
    nameless = """() => [...document.querySelectorAll('button, input, select, a[href]')]
        .filter(one => !one.labels?.length && !one.getAttribute('aria-label')
            && !one.textContent.trim()).map(one => one.outerHTML)"""
    assert tab.page.evaluate(nameless) == []


def test_a_narrow_window_shows_everything(
    server: InspectServer, open_tab: Open, keep: Keep
) -> None:
    run = "#/run/lake-bi-level"
    for address, shown in {
        "#/": "table.runs",
        run: "canvas",
        f"{run}/episodes?split=step&step=1": "table.episodes",
        f"{run}/timeline": ".gantt svg",
        "#/compare/lake-bi-level,lake-grpo": "table.diff",
        f"{run}/step/1/0": ".token",
    }.items():
        tab = open_tab(f"{server.url}/{address}", width=360, height=760)
        tab.page.locator(shown).first.wait_for()
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= 360, address
    keep(tab, "inspect-narrow")


CONTRASTS = """() => {
  const style = getComputedStyle(document.documentElement);
  const paint = document.createElement('canvas').getContext('2d');
  const named = name => style.getPropertyValue(name).trim();
  const ratio = (ink, ground) => {
    const [dark, bright] = [light(ink), light(ground)].sort((a, b) => a - b);
    return (bright + 0.05) / (dark + 0.05);
  };
  const light = colour => {
    paint.fillStyle = colour;
    paint.fillRect(0, 0, 1, 1);
    const parts = [...paint.getImageData(0, 0, 1, 1).data].slice(0, 3).map(part => part / 255)
      .map(part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
  };
  const pairs = [['--ink', '--bg'], ['--ink', '--card'], ['--quiet', '--bg'], ['--quiet', '--card'],
    ['--quiet', '--sunk'], ['--accent', '--bg'], ['--accent', '--card'],
    ['--accent', '--accent-soft'],
    ['--on-accent', '--accent'], ['--good', '--good-soft'], ['--fair', '--fair-soft'],
    ['--bad', '--bad-soft'], ['--ink', '--better'], ['--ink', '--worse'], ['--ink', '--ramp'],
    ['--ink', '--trained']];
  const found = pairs.map(
    ([ink, ground]) => [`${ink} on ${ground}`, ratio(named(ink), named(ground))]);
  for (const kind of ['player', 'goal', 'won', 'hole', 'lost', 'target', 'box', 'done', 'key',
      'door', 'other']) {
    const cell = document.body.appendChild(document.createElement('span'));
    cell.className = `cell ${kind}`;
    const { color, backgroundColor } = getComputedStyle(cell);
    found.push([kind, ratio(color, backgroundColor)]);
    cell.remove();
  }
  return Object.fromEntries(found);
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_have_contrast(
    server: InspectServer, open_tab: Open, keep: Keep, scheme: str
) -> None:
    tab = open_tab(f"{server.url}/#/run/lake-bi-level/step/1/0", scheme=scheme)
    tab.page.locator(".token").first.wait_for()
    faint = {name: value for name, value in tab.page.evaluate(CONTRASTS).items() if value < 4.5}
    assert faint == {}
    ground = tab.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(19, 22, 26)") == (scheme == "dark")
    if scheme == "dark":
        keep(tab, "inspect-dark")


def test_what_the_modules_compute(server: InspectServer, open_tab: Open) -> None:
    tab = open_tab(f"{server.url}/#/")
    compute = """async () => {
      const board = await import('./static/board.js');
      const chart = await import('./static/chart.js');
      const gantt = await import('./static/gantt.js');
      const play = await import('./static/play.js');
      return {
        lake: board.parseBoard('P _ O\\n_ _ G'),
        rooms: board.parseBoard('####\\n#PX#\\n####'),
        tiles: board.parseBoard('  .   2   4\\n 16 128   .'),
        words: board.parseBoard('two words\\nand more'),
        parts: board.splitBoards('Here:\\nP _\\n_ G\\nYour move?').map(part => part.board),
        frames: board.splitDrawings('A sudoku:\\n1 2 | 3 4\\n---------\\n3 4 | 1 2\\nGo.\\n\\na  b')
          .map(part => [part.drawing, part.text]),
        prose: board.splitDrawings('Reply a || b.\\nOr c || d.  So.').map(part => part.drawing),
        smooth: chart.smooth([1, null, 3], 0.5),
        laid: gantt.laidOut({bars: [{kind: 'generate', start: 1, seconds: 2}]}).bars.length,
        odd: gantt.laidOut({bars: [{kind: 'env', start: -1, seconds: 2},
          {kind: 'generate', start: NaN}, {kind: 'env', seconds: 1}]}).bars.map(bar => bar.start),
        options: play.readOptions('size=4 name=x'),
      };
    }"""
    assert tab.page.evaluate(compute) == {
        "lake": [["P", "_", "O"], ["_", "_", "G"]],
        "rooms": [["#", "#", "#", "#"], ["#", "P", "X", "#"], ["#", "#", "#", "#"]],
        "tiles": [[".", "2", "4"], ["16", "128", "."]],
        "words": None,
        "parts": [False, True, False],
        "frames": [
            [False, "A sudoku:"],
            [True, "1 2 | 3 4\n---------\n3 4 | 1 2"],
            [False, "Go.\n\na  b"],
        ],
        "prose": [False],
        "smooth": [1, None, pytest.approx(7 / 3)],
        "laid": 2,
        "odd": [0, 2, 2],
        "options": {"size": 4, "name": "x"},
    }
