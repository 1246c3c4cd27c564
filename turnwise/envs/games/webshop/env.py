"""WebShop: search, look, choose and buy what an instruction asks for."""

import json
import random
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

from turnwise.envs.base import BaseEnv, EnvError
from turnwise.envs.games.webshop.buyer import Buyer, click
from turnwise.envs.games.webshop.goals import Goal, GoalKind
from turnwise.envs.games.webshop.pages import (
    BACK,
    BUY,
    MODES,
    NEXT,
    PAGE_SIZE,
    PREVIOUS,
    SUB_PAGES,
    ObservationMode,
    Page,
    as_rich_text,
    as_text,
    clickables,
    done_page,
    item_page,
    results_page,
    search_page,
    sub_page,
)
from turnwise.envs.games.webshop.reward import judge
from turnwise.envs.games.webshop.shop import load_shop
from turnwise.envs.validate import refuse_keywords
from turnwise.seeding import derive_seed

BASE_URL = "http://127.0.0.1:3000"
MAX_ACTION_CHARS = 20_000
_SUB_PAGES = {name.lower(): name for name in SUB_PAGES}


class WebShopEnv(BaseEnv):
    """A shop with a search box, result pages, product pages with options, and one purchase that
    ends it.

    The score of a purchase lies between 0 and 1 (see `judge`); everything before it earns 0. An
    action that means nothing on the current page changes nothing.

    Example:
        >>> env = WebShopEnv(list_actions=False)
        >>> env.reset(seed=1).split(" [SEP] ")[:2]
        ['WebShop', 'Instruction:']
        >>> page, reward, terminated, truncated, info = env.step("search[coffee mug]")
        >>> "Page 1 (Total results: " in page, reward, terminated
        (True, 0.0, False)
    """

    instruction = (
        "You are shopping online. Find a product that fits the instruction, choose the options it "
        "asks for, and buy it "
        "with click[buy now]. The actions are search[words], on any page, and click[something], "
        "where something is a "
        "button, a product id or an option that you see on the current page. You can buy once."
    )
    expert = "buyer who knows the goal"

    def __init__(
        self,
        *,
        products: str | Path | None = None,
        attributes: str | Path | None = None,
        title_nouns: str | Path | None = None,
        goals: GoalKind = "synthetic",
        observation: ObservationMode = "text",
        reward: Literal["score", "success"] = "score",
        sampling: Literal["uniform", "weighted"] = "uniform",
        show_attributes: bool = False,
        list_actions: bool = True,
        max_steps: int = 15,
    ) -> None:
        """Opens a shop; those with the same files share it.

        Args:
            products: a product file or a directory with WebShop's files. None: the sample that
                comes with turnwise.
            attributes: WebShop's items_ins file (attributes and instructions).
            title_nouns: JSON, product id -> nouns of its title. None: words that are likely nouns
                stand in.
            goals: synthetic (one per combination of options) or human.
            observation: text, text_rich or url.
            reward: the score itself, or 1 for a perfect score and 0 otherwise.
            sampling: goals alike, or more often those with rare attributes.
            show_attributes: product pages have the sub-page Attributes.
            list_actions: end each observation with the actions that are possible.
            max_steps: actions after which an episode is truncated.
        """
        for name, value, allowed in (
            ("goals", goals, ("synthetic", "human")),
            ("observation", observation, MODES),
            ("reward", reward, ("score", "success")),
            ("sampling", sampling, ("uniform", "weighted")),
        ):
            if value not in allowed:
                raise ValueError(f"{name} is one of {', '.join(allowed)}, got {value!r}")
        if max_steps < 1:
            raise ValueError(f"an episode has at least one step, got max_steps = {max_steps}")
        self.shop = load_shop(products, attributes=attributes, title_nouns=title_nouns, goals=goals)
        self.observation: ObservationMode = observation
        self.reward = reward
        self.sampling = sampling
        self.show_attributes = show_attributes
        self.list_actions = list_actions
        self.max_steps = max_steps
        self._weights = {
            split: list(accumulate(goal.weight for goal in side))
            for split, side in self.shop.goals.items()
        }
        self._goal: Goal | None = None
        self._buyer: Buyer | None = None
        self._session = ""
        self._done = True
        self._steps = 0
        self._show_search()

    @property
    def goal(self) -> Goal:
        if self._goal is None:
            raise EnvError("an episode begins with reset(), but the shop was entered without it")
        return self._goal

    @property
    def clickables(self) -> tuple[str, ...]:
        """Clickable elements of the current page, lower case."""
        return clickables(self.page)

    @property
    def has_search_bar(self) -> bool:
        return self._name == "search"

    def reset(
        self,
        seed: int | None = None,
        *,
        split: str = "train",
        goal: int | None = None,
        **kwargs: Any,
    ) -> str:
        """The search page with the instruction of the goal that this seed stands for; `goal` picks
        one by number."""
        refuse_keywords(kwargs, name="webshop")
        if split not in self.shop.goals:
            raise ValueError(f"split is one of {', '.join(self.shop.goals)}, got {split!r}")
        side = self.shop.goals[split]
        if not side:
            raise ValueError(
                f"the shop has {self.shop.num_goals} goals and none of them is in {split}; add "
                "products"
            )
        number = self._draw(seed or 0, split) if goal is None else goal
        if not 0 <= number < len(side):
            raise ValueError(f"goals of {split} are numbered 0 to {len(side) - 1}, got {number}")
        self._goal = side[number]
        self._buyer = Buyer(self.shop, self._goal)
        self._session = f"{split}_{number}"
        self._visited: set[str] = set()
        self._steps = 0
        self._done = False
        self._show_search()
        return self.render()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """(page, reward, bought, out of steps, info)."""
        goal = self.goal
        if self._done:
            raise EnvError("the episode is over; call reset() before the next step")
        self._steps += 1
        verb, argument = parse_action(action)
        valid = (verb == "search" and bool(argument)) or (
            verb == "click" and argument in self.clickables
        )
        # Said in every step: an episode that is cut before it bought anything has failed.
        info: dict[str, Any] = {"action_is_valid": valid, "success": False, "score": 0.0}
        reward, bought = 0.0, False
        if valid and argument == BUY.lower() and verb == "click":
            product = self.shop.products[self._asin]
            price = self.shop.prices[self._asin]
            score = judge(product, goal, price=price, options=self._options, nouns=self.shop.nouns)
            bought = True
            reward = score.total if self.reward == "score" else float(score.total >= 1.0)
            info |= {"success": score.total >= 1.0, "score": score.total, "r_type": score.r_type}
            self._show(
                "done",
                done_page(score.total),
                f"done/{self._session}/{self._asin}/{json.dumps(self._options)}",
            )
        elif valid and verb == "search":
            self._search(argument)
        elif valid:
            self._click(argument)
        out_of_steps = self._steps >= self.max_steps and not bought
        self._done = bought or out_of_steps
        return self.render(), reward, bought, out_of_steps, info

    def render(self) -> str:
        """The current page in the chosen way."""
        if self.observation == "url":
            text = self.url
        else:
            text = as_text(self.page) if self.observation == "text" else as_rich_text(self.page)
        if not self.list_actions or self._name == "done":
            return text
        actions = ["search[words]", *(f"click[{name}]" for name in self.clickables)]
        return f"{text}\nPossible actions: {', '.join(actions)}"

    def state_key(self) -> str | None:
        return self.url

    def random_action(self, rng: random.Random) -> str | None:
        """A click on something, or a search for words of the instruction."""
        if self.clickables and rng.random() < 0.8:
            return f"click[{rng.choice(self.clickables)}]"
        words = self.goal.instruction.replace("[", " ").replace("]", " ").split()
        return f"search[{' '.join(rng.sample(words, min(3, len(words))))}]"

    def expert_action(self) -> str | None:
        """The next action of a buyer that knows which products fit; see `Buyer`."""
        if self._buyer is None or self._done:
            return None
        if self._name == "search":
            return self._buyer.on_search()
        if self._name == "results":
            return self._buyer.on_results(self._query, self.clickables)
        if self._name == "item":
            return self._buyer.on_item(self._asin, chosen=self._options)
        return click(PREVIOUS)

    def _draw(self, seed: int, split: str) -> int:
        rng = random.Random(derive_seed(seed, f"webshop.goal.{split}"))
        numbers = range(len(self.shop.goals[split]))
        if self.sampling == "uniform":
            return rng.choice(numbers)
        return rng.choices(numbers, cum_weights=self._weights[split])[0]

    def _click(self, name: str) -> None:
        if name == BACK.lower():
            self._show_search()
        elif self._name == "results" and name in (NEXT.lower(), PREVIOUS.lower()):
            self._number += 1 if name == NEXT.lower() else -1
            self._show_results()
        elif self._name == "results":
            self._asin = name.upper()
            self._visited.add(self._asin)
            self._show_item()
        elif self._name == "item" and name == PREVIOUS.lower():
            self._options = {}
            self._show_results()
        elif self._name == "item" and name in _SUB_PAGES:
            self._show_sub_page(_SUB_PAGES[name])
        elif self._name == "item":
            options = self.shop.products[self._asin].options
            self._options[next(option for option, values in options.items() if name in values)] = (
                name
            )
            self._show_item()
        else:
            self._show_item()

    def _search(self, query: str) -> None:
        self._query = query
        self._results = self.shop.search(query)
        self._number = 1
        self._options = {}
        self._show_results()

    def _show(self, name: str, page: Page, path: str) -> None:
        self._name, self.page, self.url = name, page, f"{BASE_URL}/{path}"

    def _show_search(self) -> None:
        self._options: dict[str, str] = {}
        self._show(
            "search", search_page(self._goal.instruction if self._goal else ""), self._session
        )

    def _show_results(self) -> None:
        start = (self._number - 1) * PAGE_SIZE
        page = results_page(
            self.goal.instruction,
            self._results[start : start + PAGE_SIZE],
            page=self._number,
            total=len(self._results),
            visited=self._visited,
        )
        if self._buyer is not None:
            is_last = self._number * PAGE_SIZE >= len(self._results)
            self._buyer.saw_results(self._query, number=self._number, is_last=is_last)
        self._show(
            "results", page, f"search_results/{self._session}/{self._words()}/{self._number}"
        )

    def _show_item(self) -> None:
        product = self.shop.products[self._asin]
        page = item_page(
            self.goal.instruction,
            product,
            options=self._options,
            show_attributes=self.show_attributes,
        )
        place = f"{self._asin}/{self._words()}/{self._number}/{json.dumps(self._options)}"
        self._show("item", page, f"item_page/{self._session}/{place}")

    def _show_sub_page(self, name: str) -> None:
        page = sub_page(self.goal.instruction, self.shop.products[self._asin], name)
        place = f"{self._asin}/{self._words()}/{self._number}/{name}/{json.dumps(self._options)}"
        self._show("sub", page, f"item_sub_page/{self._session}/{place}")

    def _words(self) -> str:
        return "+".join(self._query.split(" "))


def parse_action(text: str) -> tuple[str, str]:
    """(verb, argument) of `search[..]` or `click[..]`, the argument in lower case; both empty for
    anything else.

    Example:
        >>> parse_action("Click[Buy Now]"), parse_action("search[mug [blue]]")
        (('click', 'buy now'), ('search', 'mug [blue]'))
        >>> parse_action("buy it")
        ('', '')
    """
    if len(text) > MAX_ACTION_CHARS:
        return "", ""
    verb, bracket, rest = text.strip().partition("[")
    end = rest.rfind("]")
    verb = verb.strip().lower()
    if not bracket or end < 0 or verb not in ("search", "click"):
        return "", ""
    printable = "".join(char if char.isprintable() else " " for char in rest[:end])
    return verb, " ".join(printable.lower().split())
