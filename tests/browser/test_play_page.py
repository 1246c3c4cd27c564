"""Games in a real browser: a person plays, and watches a policy play."""

import subprocess
from pathlib import Path
from subprocess import PIPE

import pytest
import warm
from tabs import Keep, Open, Tab, has, says

from turnwise.endpoint.policy import PolicyServer
from turnwise.generate.base import Sampling
from turnwise.generate.hf import HFGenerator
from turnwise.inspect.server import InspectServer
from turnwise.testing.tiny import tiny_model, tiny_tokenizer


def test_a_person_plays_by_keys_buttons_and_text(
    server: InspectServer, open_tab: Open, keep: Keep
) -> None:
    tab = open_tab(f"{server.url}/#/play")
    tab.page.get_by_label("Environment").select_option("frozen_lake")
    tab.page.get_by_label("Seed").fill("3")
    tab.page.get_by_label("Options").fill("size=4")
    tab.page.get_by_role("button", name="Start").click()
    game = tab.page.locator(".game")
    has(game.locator(".cell"), 16)
    turns = tab.page.locator("section.turn")
    tab.page.keyboard.press("ArrowDown")
    has(turns, 1)
    game.get_by_role("button", name="right").click()
    has(turns, 2)
    tab.page.get_by_label("Your reply").fill("right")
    tab.page.keyboard.press("Enter")
    has(turns, 3)
    says(game, "turn 4")
    keep(tab, "inspect-play")
    tab.page.locator("h1").click()  # out of the text field, where arrows move the cursor
    for played, key in enumerate(("ArrowRight", "ArrowDown", "ArrowDown"), start=4):
        tab.page.keyboard.press(key)
        has(turns, played)
    says(tab.page.locator(".ending"), "Won after 6 turns, reward 1")
    tab.page.get_by_role("button", name="Another game").click()
    has(turns, 0)
    says(game, "turn 1")


PRESS_AT_ONCE = """() => new MutationObserver((_, observer) => {
    if (!document.querySelector(".cell")) return;
    observer.disconnect();
    window.focused = document.activeElement.getAttribute("aria-label");
    document.activeElement.dispatchEvent(
        new KeyboardEvent("keydown", { key: "ArrowDown", bubbles: true }));
}).observe(document.body, { childList: true, subtree: true })"""


def test_a_board_that_is_seen_takes_keys(server: InspectServer, open_tab: Open) -> None:
    tab = open_tab(f"{server.url}/#/play")
    tab.page.evaluate(PRESS_AT_ONCE)
    tab.page.get_by_role("button", name="Start").click()
    has(tab.page.locator("section.turn"), 1)
    assert tab.page.evaluate("window.focused") == "Conversation"


def test_a_game_is_drawn_where_its_observations_are_not(
    server: InspectServer, open_tab: Open
) -> None:
    tab = open_tab(f"{server.url}/#/play")
    tab.page.get_by_label("Environment").select_option("frozen_lake")
    tab.page.get_by_label("Options").fill("size=4 observation=coordinates")
    tab.page.get_by_role("button", name="Start").click()
    game = tab.page.locator(".game")
    has(game.locator(".cell"), 16)
    has(tab.page.locator(".conversation .board"), 0)
    places = "all => all.findIndex(one => one.matches('.player, .won, .lost'))"
    before = game.locator(".cell").evaluate_all(places)
    tab.page.keyboard.press("ArrowDown")
    says(game, "turn 2")
    assert game.locator(".cell").evaluate_all(places) == before + 4
    tab.page.get_by_label("Environment").select_option("sudoku")
    tab.page.get_by_label("Options").fill("")
    tab.page.get_by_role("button", name="Start").click()
    says(game.locator("pre.drawing"), "|")


def test_what_cannot_be_played_is_refused_in_words(server: InspectServer, open_tab: Open) -> None:
    tab = open_tab(f"{server.url}/#/play")
    tab.page.get_by_role("button", name="Start").focus()
    tab.page.keyboard.press("Enter")
    says(tab.page.locator(".game"), "turn 1")
    focused = "document.activeElement.getAttribute('aria-label')"
    assert tab.page.evaluate(focused) == "Conversation"
    tab.page.get_by_label("Options").fill("size")
    tab.page.get_by_role("button", name="Start").click()
    says(tab.page.get_by_role("alert"), "KEY=VALUE")
    tab.page.get_by_label("Options").fill("size=1000")
    tab.page.get_by_role("button", name="Start").click()
    says(tab.page.get_by_role("alert"), "size is from 2 to 16")
    tab.page.locator(".game").get_by_role("button", name="down").click()  # it goes on
    says(tab.page.locator(".game"), "turn 2")
    has(tab.page.get_by_role("alert"), 0)
    # The browser notes every answer of 4xx as an error of its own.
    assert all("422" in problem or "400" in problem for problem in tab.problems)
    tab.problems.clear()


def test_a_policy_is_watched_token_by_token(
    server: InspectServer, open_tab: Open, keep: Keep
) -> None:
    tab = open_tab(f"{server.url}/#/play")
    tab.page.get_by_label("Player").select_option("run:lake-bi-level")
    tab.page.get_by_role("button", name="Start").click()
    tab.page.get_by_role("button", name="Next turn").click()
    turns = tab.page.locator("section.turn")
    has(turns, 1)
    likely = tab.page.locator(".side .alternatives li")
    assert likely.count() >= 3
    shares = [float(text.split()[0]) for text in likely.locator(".number").all_text_contents()]
    assert shares == sorted(shares, reverse=True)
    assert 0 < sum(shares) <= 101
    says(tab.page.locator(".legend"), "unlikely")
    keep(tab, "inspect-watch")
    tab.page.locator("section.turn .token").first.hover()
    says(tab.page.locator(".token-card"), "probability")
    chain = tab.page.locator(".chain button")
    chain.nth(1).focus()
    tab.page.keyboard.press("Space")  # presses the button, and plays no turn
    says(tab.page.locator(".chain button[aria-pressed=true]"), chain.nth(1).text_content())
    assert chain.nth(1).get_attribute("aria-pressed") == "true"
    tab.page.keyboard.press("n")
    has(turns, 2)
    tab.page.get_by_label("play on by itself").check()
    tab.page.locator(".ending").wait_for()


def test_a_game_that_is_gone_is_not_asked_for_ever(server: InspectServer, open_tab: Open) -> None:
    tab = open_tab(f"{server.url}/#/play")
    tab.page.get_by_label("Player").select_option("random")
    tab.page.get_by_role("button", name="Start").click()
    tab.page.get_by_role("button", name="Next turn").wait_for()
    gone = "**/api/play/*/step"
    tab.page.route(gone, lambda route: route.fulfill(status=404, json={"error": "it is gone"}))
    tab.page.get_by_label("play on by itself").check()
    says(tab.page.get_by_role("alert"), "it is gone")
    has(tab.page.locator(".hand input:checked"), 0)
    assert len([address for address in tab.asked if address.endswith("/step")]) == 1
    tab.page.unroute(gone)
    tab.problems.clear()  # the browser notes every answer of 4xx


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that says anything."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def test_a_model_behind_an_api_is_watched_with_what_it_could_have_said(
    server: InspectServer, open_tab: Open, tiny_folder: Path
) -> None:
    words = [str(tiny_folder), "--port", "0", "--rollout.max_response_tokens", "6"]
    serve = subprocess.Popen([*warm.turnwise(), "serve", *words], stdout=PIPE, text=True)
    try:
        assert serve.stdout is not None
        told = next(line for line in serve.stdout if line.startswith("serving "))
        tab = open_tab(f"{server.url}/#/play")
        watch(tab, f"{told.split()[-1]}#{tiny_folder.name}")
        likely = tab.page.locator(".side .alternatives li")
        assert likely.count() >= 5
        shares = [float(text.split()[0]) for text in likely.locator(".number").all_text_contents()]
        assert shares == sorted(shares, reverse=True)
        assert 0 < sum(shares) <= 101
        has(tab.page.get_by_text("no top_logprobs"), 0)
        tab.page.locator("section.turn .token").first.hover()
        says(tab.page.locator(".token-card"), "probability")
        tab.page.get_by_role("button", name="Next turn").click()
        has(tab.page.locator("section.turn"), 2)
    finally:
        serve.terminate()
        serve.wait()


def test_a_server_that_tells_no_alternatives_is_said_to(
    server: InspectServer, open_tab: Open
) -> None:
    tokenizer = tiny_tokenizer()
    generator = HFGenerator(tiny_model(), tokenizer, slots=1, max_context=2048)
    with PolicyServer(generator, tokenizer, Sampling(max_tokens=6, temperature=1.0)) as api:
        tab = open_tab(f"{server.url}/#/play")
        watch(tab, f"{api.url}/v1#policy")
        has(tab.page.locator(".side .alternatives li"), 1)
        says(tab.page.locator(".side"), "no top_logprobs")


def watch(tab: Tab, address: str) -> None:
    """Starts a game of the model at an address, and plays its first turn."""
    tab.page.get_by_label("Environment").select_option("simple_game")
    tab.page.get_by_label("Player").select_option("openai")
    tab.page.get_by_label("URL#MODEL").fill(address)
    tab.page.get_by_role("button", name="Start").click()
    tab.page.get_by_role("button", name="Next turn").click()
    has(tab.page.locator("section.turn"), 1)
