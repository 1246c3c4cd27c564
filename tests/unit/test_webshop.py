"""WebShop: pages, goals, splits, the reward formula, and products that cannot be sold."""

import gzip
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("bm25s")
pytest.importorskip("rapidfuzz")

from turnwise.envs.base import EnvError
from turnwise.envs.games.webshop import (
    Goal,
    ProductError,
    WebShopEnv,
    judge,
    load_shop,
    read_products,
)
from turnwise.envs.games.webshop.catalog import Product, read_product
from turnwise.envs.games.webshop.goals import split_goals
from turnwise.envs.games.webshop.reward import Score
from turnwise.evaluate.check_env import check_env

DATA = (
    Path(os.environ.get("TURNWISE_SHARED_DATA", Path(__file__).parents[3] / "shared" / "data"))
    / "webshop"
)


def product(**changes: Any) -> Product:
    row: dict[str, Any] = {
        "asin": "P1",
        "name": "Clay Mug",
        "category": "home",
        "query": "mugs",
        "product_category": "Home \u203a Kitchen \u203a Mugs",
        "full_description": "A mug of clay, lead free.",
        "small_description": ["dishwasher safe"],
        "pricing": [12.0],
        "options": {"color": ["sea blue", "r.brown2070"], "size": ["small", "large"]},
        "Attributes": ["hand made"],
    }
    return read_product(row | changes)


def goal(**changes: Any) -> Goal:
    fields: dict[str, Any] = {
        "asin": "P1",
        "title": "Clay Mug",
        "query": "mugs",
        "product_category": "Home \u203a Kitchen \u203a Mugs",
        "instruction": "find a mug",
        "attributes": ("hand made", "lead free"),
        "options": ("r.brown2070", "small"),
        "price_limit": 20.0,
        "weight": 1.0,
    }
    return Goal(**(fields | changes))


def buy(env: WebShopEnv, wanted: Goal) -> tuple[float, dict[str, Any]]:
    """What a buyer who knows the answer gets by searching, paging, choosing and buying."""
    env.step(f"search[{wanted.title}]")
    while wanted.asin.lower() not in env.clickables:
        assert "next >" in env.clickables, f"{wanted.asin} is not among the results"
        env.step("click[Next >]")
    env.step(f"click[{wanted.asin}]")
    for option in wanted.options:
        env.step(f"click[{option}]")
    _, reward, terminated, truncated, info = env.step("click[Buy Now]")
    assert (terminated, truncated) == (True, False)
    return reward, info


def test_the_walk_through_the_pages() -> None:
    env = WebShopEnv(list_actions=False, show_attributes=True)
    text = env.reset(goal=0)
    assert text == f"WebShop [SEP] Instruction: [SEP] {env.goal.instruction} [SEP] Search"
    assert env.has_search_bar
    page = env.step("search[color size free]")[0]
    assert "[SEP] Back to Search [SEP] Page 1 (Total results: " in page
    first = env.clickables
    assert "next >" in first
    assert "< prev" not in first
    assert len([name for name in first if name.startswith("tw0")]) == 10
    env.step("click[next >]")
    assert "< prev" in env.clickables
    assert not set(env.clickables) & {name for name in first if name.startswith("tw0")}
    env.step("click[< prev]")
    assert env.clickables == first
    env.step(f"click[{first[-1]}]")
    item = env.render()
    for name in ("Description", "Features", "Reviews", "Attributes"):
        env.step(f"click[{name}]")
        assert env.clickables == ("back to search", "< prev")
        env.step("click[< Prev]")
        assert env.render() == item
    env.step("click[< prev]")
    assert env.clickables == first
    env.step("click[back to search]")
    assert env.render() == text


def test_rich_text_marks_what_was_clicked() -> None:
    env = WebShopEnv(list_actions=False, observation="text_rich", max_steps=50)
    env.reset(goal=0)
    wanted = next(p for p in env.shop.products.values() if "size" in p.options)
    env.step(f"search[{wanted.title}]")
    env.step(f"click[{wanted.asin}]")
    size = wanted.options["size"][1]
    text = env.step(f"click[{size}]")[0]
    assert text.startswith(f"You have clicked {size}.\n")
    assert f"\n  [clicked button] {size} [clicked button_]\n" in text
    assert f"\n  [button] {wanted.options['size'][0]} [button_]\n" in text
    text = env.step("click[< prev]")[0]
    assert f"\n\n[clicked button] {wanted.asin} [clicked button_]\n{wanted.title}\n" in text


def test_urls_name_the_state() -> None:
    env = WebShopEnv(list_actions=False, observation="url")
    assert env.reset(goal=3) == "http://127.0.0.1:3000/train_3"
    assert env.step("search[coffee mug]")[0].endswith("/search_results/train_3/coffee+mug/1")
    asin = next(name for name in env.clickables if name.startswith("tw0"))
    url = env.step(f"click[{asin}]")[0]
    assert url.endswith(f"/item_page/train_3/{asin.upper()}/coffee+mug/1/{{}}")
    option = next(iter(env.shop.products[asin.upper()].options.values()))[0]
    chosen = env.step(f"click[{option}]")[0]
    assert chosen != url
    assert env.step("click[nothing]")[0] == chosen == env.state_key()


def test_possible_actions_are_listed() -> None:
    env = WebShopEnv()
    env.reset(goal=0)
    text = env.step("search[coffee mug]")[0]
    listed = text.rpartition("Possible actions: ")[2].split(", ")
    assert listed == ["search[words]", *(f"click[{name}]" for name in env.clickables)]


def test_a_perfect_buyer_scores_one_on_every_goal() -> None:
    env = WebShopEnv(max_steps=50)
    for split, goals in env.shop.goals.items():
        for number, wanted in enumerate(goals):
            env.reset(split=split, goal=number)
            reward, info = buy(env, wanted)
            assert reward == 1.0
            assert info["success"]
            with pytest.raises(EnvError, match="over"):
                env.step("search[more]")


def test_splits_repeat_and_share_no_goal() -> None:
    shop = load_shop()
    keys = {split: {item.key for item in goals} for split, goals in shop.goals.items()}
    assert not keys["train"] & keys["val"]
    assert not keys["train"] & keys["test"]
    assert not keys["val"] & keys["test"]
    assert sum(map(len, shop.goals.values())) == shop.num_goals
    env = WebShopEnv()
    assert env.reset(seed=5, split="val") == env.reset(seed=5, split="val")
    instructions = {env.reset(seed=seed, split="val") for seed in range(60)}
    assert len(instructions) > 10
    with pytest.raises(ValueError, match="split"):
        env.reset(seed=0, split="dev")


def test_goals_that_ask_for_the_same_stay_on_one_side() -> None:
    goals = [goal(asin=f"P{number % 40}", options=()) for number in range(200)]
    sides = split_goals(goals)
    keys = [{item.key for item in side} for side in sides.values()]
    assert all(keys[:2])
    assert len(keys[0] | keys[1] | keys[2]) == 40 == sum(map(len, keys))


def test_the_environment_keeps_its_contract() -> None:
    report = check_env("webshop", seeds=5)
    assert not report.findings, str(report)


def test_weighted_sampling_prefers_rare_attributes() -> None:
    env = WebShopEnv(sampling="weighted")
    weights: list[float] = []
    for seed in range(300):
        env.reset(seed=seed)
        weights.append(env.goal.weight)
    goals = env.shop.goals["train"]
    assert sum(weights) / len(weights) > 1.2 * sum(item.weight for item in goals) / len(goals)


@pytest.mark.parametrize(
    ("options", "price", "hits"),
    [
        ({"color": "r.brown2070", "size": "small"}, 12.0, (2, 2, True)),
        ({"color": "dark brown", "size": "small"}, 12.0, (2, 2, True)),  # both are brown
        ({"color": "sea blue", "size": "small"}, 12.0, (2, 1, True)),
        ({"size": "small"}, 12.0, (2, 1, True)),
        ({}, 21.0, (2, 0, False)),
    ],
)
def test_reward_counts_attributes_options_and_price(
    options: dict[str, str], price: float, hits: tuple[int, int, bool]
) -> None:
    score = judge(product(), goal(), price=price, options=options)
    assert (score.attribute_hits, score.option_hits, score.price_hit) == hits
    assert score.total == pytest.approx(sum(hits) / 5)


def test_type_reward_by_query_category_and_title() -> None:
    other = {"asin": "P2", "query": "bowls", "product_category": "Home"}
    words = {"P1": ["clay", "mug"], "P2": ["clay", "bowl"]}

    def kind(**changes: Any) -> float:
        nouns = {**words, "P2": changes.pop("nouns", words["P2"])}
        return judge(
            product(**(other | changes)), goal(), price=1.0, options={}, nouns=nouns
        ).r_type

    assert kind() == 1.0  # half of the title's nouns
    assert kind(nouns=["bowl"]) == 0.0
    assert kind(nouns=["bowl"], query="mugs") == 0.0  # as in WebShop: the title has the last word
    words["P1"] = [f"w{n}" for n in range(8)] + ["clay"]
    assert kind() == 0.5
    assert kind(query="mugs") == 1.0
    assert kind(product_category="Kitchen \u203a Home") == 1.0
    words["P1"] = [f"w{n}" for n in range(19)] + ["clay"]
    assert kind(query="mugs") == 0.1
    words["P1"] = []
    assert kind() == 0.5


def test_success_reward_is_all_or_nothing() -> None:
    env = WebShopEnv(reward="success", max_steps=50)
    number = next(n for n, item in enumerate(env.shop.goals["train"]) if item.options)
    env.reset(goal=number)
    assert buy(env, env.goal)[0] == 1.0
    env.reset(goal=number)
    asin = env.goal.asin
    env.step(f"search[{env.goal.title}]")
    env.step(f"click[{asin}]")
    _, reward, _, _, info = env.step("click[buy now]")
    assert (reward, info["success"]) == (0.0, False)
    assert 0.0 < info["score"] < 1.0


def test_hostile_actions_change_nothing() -> None:
    env = WebShopEnv(max_steps=100)
    before = env.reset(goal=0)
    for action in (
        "",
        "buy",
        "click[buy now]",
        "click[search]",
        "search[]",
        "search[\x00\x1b]",
        "[" * 19_000,
        "x" * 10_000_000,
    ):
        page, reward, terminated, _, info = env.step(action)
        assert (page, reward, terminated, info["action_is_valid"]) == (before, 0.0, False, False)
    page = env.step("search[zzzz qqqq]")[0]
    assert "Total results: 0" in page
    env.step("search[" + "mug " * 4_000 + "]")
    assert "Total results: 0" not in env.render()
    env.step("search[../../etc/passwd]")
    assert env.step("click[../../etc/passwd]")[4]["action_is_valid"] is False


def test_truncation_and_use_before_reset() -> None:
    env = WebShopEnv(max_steps=2)
    with pytest.raises(EnvError, match="reset"):
        env.step("search[mug]")
    env.reset(goal=0)
    assert env.step("search[mug]")[2:4] == (False, False)
    assert env.step("search[mug]")[2:4] == (False, True)


def test_random_players_never_break_it() -> None:
    env = WebShopEnv(max_steps=30)
    rng = random.Random(0)
    ends = 0
    for seed in range(40):
        env.reset(seed=seed)
        done = False
        while not done:
            action = env.random_action(rng)
            assert action is not None
            _, reward, terminated, truncated, info = env.step(action)
            assert info["action_is_valid"]
            assert 0.0 <= reward <= 1.0
            done = terminated or truncated
        ends += terminated
    assert ends > 0


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"asin": "A", "name": "x"}, "missing: category, query"),
        ({"asin": " "}, "not empty"),
        ({"name": None}, "'name' is text, got NoneType"),
        ({"pricing": "free"}, "price"),
        ({"pricing": [-1]}, "price lies between"),
        ({"options": {"size": "small"}}, "'options' is a list of texts"),
        ({"options": None, "customization_options": {"size": [{}]}}, "has a 'value'"),
        ("text", "a product is an object"),
    ],
)
def test_bad_products_are_refused(tmp_path: Path, row: Any, message: str) -> None:
    good = {
        "asin": "G1",
        "name": "Mug",
        "category": "home",
        "query": "mugs",
        "product_category": "Home",
        "full_description": "",
        "small_description": "",
    }
    bad = good | row if isinstance(row, dict) and "missing" not in message else row
    file = tmp_path / "products.jsonl"
    file.write_text(json.dumps(good) + "\n" + json.dumps(bad) + "\n")
    with pytest.raises(ProductError, match=message) as caught:
        read_products(file)
    assert "product 2" in str(caught.value)


def test_bad_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "products.jsonl"
    with pytest.raises(FileNotFoundError, match="no product file"):
        WebShopEnv(products=file)
    for content, message in (
        (b"{", "line 1 is not JSON"),
        (b'{"asin": ' + b"9" * 5000 + b"}", "line 1 is not JSON"),
        (gzip.compress(b"[]" * 1000)[:20] + b"\xff" * 9, "UTF-8 text, or gzip"),
        (b"[]", "at least one product"),
        (b"\xff\xfe", "UTF-8"),
    ):
        file.write_bytes(content)
        with pytest.raises(ProductError, match=message):
            read_products(file)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ProductError, match="found none"):
        load_shop(empty)
    file.write_text(
        json.dumps(
            {
                "asin": "G1",
                "name": "Mug",
                "category": "h",
                "query": "m",
                "product_category": "H",
                "full_description": "",
                "small_description": "",
            }
        )
    )
    with pytest.raises(ProductError, match="no product has what a synthetic goal"):
        WebShopEnv(products=file)


def test_raw_webshop_rows_are_read() -> None:
    raw = product(
        options=None,
        pricing="$1,019.99 to $1,200.00",
        customization_options={"Color": [{"value": " Black/Red "}], "Size": None},
    )
    assert raw.pricing == (1019.99, 1200.0)
    assert raw.options == {"color": ("black | red",)}
    assert product(pricing=None).pricing == (100.0,)


def test_score_of_nothing_right_is_zero() -> None:
    assert (
        Score(
            r_type=1.0,
            attribute_hits=0,
            option_hits=0,
            price_hit=False,
            num_attributes=1,
            num_options=0,
        ).total
        == 0
    )


@pytest.mark.skipif(
    not DATA.exists(), reason="WebShop's products are not at hand (TURNWISE_SHARED_DATA)"
)
def test_the_thousand_products_of_webshop_small() -> None:
    env = WebShopEnv(products=DATA, max_steps=100)
    assert len(env.shop.products) == 1000
    assert env.shop.num_goals == 6910
    assert (len(env.shop.goals["test"]), len(env.shop.goals["val"])) == (500, 1000)
    rewards: list[float] = []
    for split, goals in env.shop.goals.items():
        for number in range(0, len(goals), 25):
            env.reset(split=split, goal=number)
            rewards.append(buy(env, goals[number])[0])
    assert sum(rewards) / len(rewards) >= 0.99
    human = WebShopEnv(products=DATA, goals="human")
    assert human.shop.num_goals == 13
